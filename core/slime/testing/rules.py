"""A contract as a list of rules, each with a name that a plugin's author can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from slime.errors import PluginContractError


class Refused(AssertionError):
    """A component said by `ValueError` or `LookupError` that it cannot work with what the kit made up."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a component must do."""

    #: reads after the component's name: "gives one finite reward per sample"
    name: str
    #: raises `AssertionError` where it does not
    check: Callable[[], None]
    #: where this fails the rules after it are not tried, because they would fail alike
    basic: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a list of rules."""

    kept: list[str] = field(default_factory=list)
    #: "RULE: what was got and expected"
    broken: list[str] = field(default_factory=list)
    #: why the component could not be checked any further, where it refused ordinary input
    refused: str | None = None


def try_rules(rules: Sequence[Rule]) -> Outcome:
    """Try every rule, up to a basic one that fails."""
    kept: list[str] = []
    broken: list[str] = []
    for rule in rules:
        try:
            rule.check()
        except Refused as refusal:
            if rule.basic:
                return Outcome(kept, broken, f"{rule.name}: {refusal}")
            broken.append(f"{rule.name}: {refusal}")
        except AssertionError as error:
            broken.append(f"{rule.name}: {error}")
            if rule.basic:
                break
        else:
            kept.append(rule.name)
    return Outcome(kept, broken)


def assert_rules(who: str, rules: Sequence[Rule]) -> None:
    """Raise one `AssertionError` that lists every broken rule."""
    outcome = try_rules(rules)
    problems = [*outcome.broken, *([] if outcome.refused is None else [outcome.refused])]
    if problems:
        raise AssertionError("\n".join([f"{who} breaks its contract:", *(f"- {problem}" for problem in problems)]))


@contextmanager
def attributed(call: str, case: str) -> Iterator[None]:
    """Whatever a component raises becomes an `AssertionError` that says which call, on what.

    call   "ExactMatch.score"
    case   "7 ordinary samples"
    """
    try:
        yield
    except AssertionError:
        raise
    except PluginContractError as error:
        raise AssertionError(f"{call}, given {case}, {error}") from error
    except (ValueError, LookupError) as error:
        raise Refused(f"{call}, given {case}, raised {type(error).__name__}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{call}, given {case}, raised {type(error).__name__}: {error}") from error


def check(true: bool, problem: str) -> None:
    """Raise `AssertionError` with `problem` unless `true`."""
    if not true:
        raise AssertionError(problem)
