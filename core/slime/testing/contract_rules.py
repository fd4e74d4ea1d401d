"""What the contracts of all kinds share: rules, each with a name that a plugin's author can act on."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slime.errors import PluginContractError
from slime.plugin import Options
from slime.testing.modules import assert_pickles

_CLOSING_S = 5.0


class RefusedError(AssertionError):
    """A component raised `ValueError` or `LookupError`: it cannot work with the kit's made-up input."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A component to try."""

    #: builds it anew; keyword arguments replace fields of the `Context` that it is built with
    build: Callable[..., Any]
    #: what its plugin registers
    spec: Any
    caller: Caller
    #: the options that it is built with, if they are to be tried too
    options: Options | None = None


@dataclass(frozen=True, slots=True)
class ContractOutcome:
    """The result of trying a component's rules."""

    #: rules it keeps
    kept: list[str] = field(default_factory=list)
    #: "RULE: what was got and expected", for each rule it breaks
    problems: list[str] = field(default_factory=list)
    #: what could not be checked without data of the user's, and why; no failure
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ContractRule:
    """One thing that a component must do; see `rule`."""

    name: str
    check: Callable[[Any], None]
    basic: bool
    applies: Callable[[Any], bool]


def rule(
    name: str, *, basic: bool = False, when: Callable[[Any], bool] = lambda _: True
) -> Callable[[Callable[[Any], None]], ContractRule]:
    """Make a method of a `Contract` one of its rules. The method raises `AssertionError` when the rule is broken.

    Args:
        name: Reads after the component's name: "gives one finite reward per sample".
        basic: The rules after it are not tried when it is broken, because they would fail for the same reason.
        when: Whether the rule applies, given the `Contract`.
    """
    return lambda check: ContractRule(name, check, basic, when)


class Contract:
    """The contract of a kind, tried on one component. Subclasses mark their rules with `rule`, in order."""

    #: the method that most rules call
    method: ClassVar[str]

    def __init__(self, subject: Subject, **context: Any) -> None:
        """Build the component, with these fields of its `Context` replaced."""
        self.subject = subject
        self.spec = subject.spec
        self.component = subject.build(**context)
        self.name = type(self.component).__name__
        self.call = f"{self.name}.{self.method}"

    @rule("has options that pickle", when=lambda contract: contract.subject.options is not None)
    def options_pickle(self) -> None:
        assert self.subject.options is not None
        assert_pickles(self.subject.options)

    def try_rules(self) -> ContractOutcome:
        """Try every rule that applies, up to a basic one that fails."""
        outcome = ContractOutcome()
        members = [member for part in reversed(type(self).__mro__) for member in vars(part).values()]
        for each in members:
            if not isinstance(each, ContractRule) or not each.applies(self):
                continue
            try:
                each.check(self)
            except AssertionError as error:
                if each.basic and isinstance(error, RefusedError):
                    outcome.notes.append(f"not checked further, because it refuses made-up data: {each.name}: {error}")
                    break
                outcome.problems.append(f"{each.name}: {error}")
                if each.basic:
                    break
            else:
                outcome.kept.append(each.name)
        return outcome


def assert_contract(contract: Callable[[Subject], Contract], build: Callable[..., Any], spec: Any) -> None:
    """Raise one `AssertionError` that lists every rule that a component breaks.

    Args:
        contract: The contract of its kind.
        build: See `Subject`.
        spec: What its plugin registers.
    """
    with Caller() as caller:
        tried = contract(Subject(build, spec, caller))
        outcome = tried.try_rules()
    if problems := [*outcome.problems, *outcome.notes]:
        lines = [f"{tried.name} breaks its contract:", *(f"- {problem}" for problem in problems)]
        raise AssertionError("\n".join(lines))


@contextmanager
def attributed(call: str, case: str) -> Iterator[None]:
    """Turn any exception of a component into an `AssertionError` that names the call and its input.

    Args:
        call: The method: "ExactMatch.score".
        case: Its input: "7 ordinary samples".
    """
    try:
        yield
    except AssertionError:
        raise
    except PluginContractError as error:
        raise AssertionError(f"{call}, given {case}, {error}") from error
    except Exception as error:
        refused = isinstance(error, ValueError | LookupError)
        message = f"{call}, given {case}, raised {type(error).__name__}: {error}"
        raise (RefusedError if refused else AssertionError)(message) from error


def check(condition: bool, problem: str) -> None:
    """Raise `AssertionError` with `problem` unless the condition holds."""
    if not condition:
        raise AssertionError(problem)


class Caller:
    """Calls components as a run does: all in one event loop, with a deadline that holds even if the loop is blocked.

        with Caller() as caller:
            rewards = caller.call(lambda: reward.score(samples), timeout_s=60, what="Reward.score")

    The loop has its own thread, which is abandoned if a component hangs in it. All calls share the loop, because a
    component may keep connections that belong to it.
    """

    def __enter__(self) -> Caller:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=_serve, args=(started,), name="slime-testing", daemon=True)
        self._thread.start()
        self._loop = started.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_S)

    def call(self, make: Callable[[], Any], *, timeout_s: float, what: str) -> Any:
        """Return what `make()` returns, awaited if it is awaitable.

        Raises:
            AssertionError: It takes longer than `timeout_s` or calls sys.exit(); `what` names it in the message.
            Exception: What it raises itself.
        """
        future = asyncio.run_coroutine_threadsafe(_finish(make, what), self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise AssertionError(f"{what} took longer than {timeout_s:g} s; expected an answer by then") from None


def _serve(started: Future[asyncio.AbstractEventLoop]) -> None:
    # The runner cancels what is left when the loop stops.
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        started.set_result(loop)
        loop.run_forever()


async def _finish(make: Callable[[], Any], what: str) -> Any:
    try:
        answer = make()
        return await answer if inspect.isawaitable(answer) else answer
    except SystemExit as error:
        raise AssertionError(f"{what} called sys.exit({error.code!r}); expected an answer or an exception") from error
