"""The check of an installed component against the contract of its kind, with made-up input: `slime plugins check`."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.errors import ConfigError, PluginError
from slime.registry.component import Component, checked_options
from slime.registry.kinds import KINDS
from slime.testing.context import make_context
from slime.testing.contract_rules import Caller, Contract, ContractOutcome, Subject
from slime.testing.family_numbers import assert_family_matches_transformers

#: words in the name of an option that is the file of a data source
_FILE_OPTIONS = ("path", "file", "data")


def check_component(
    component: Component, options: Mapping[str, Any] | None = None, *, numbers: bool = False
) -> ContractOutcome:
    """Build a component in a temporary run and try every rule of its kind on it.

    Args:
        component: The component. Its errors are part of the outcome.
        options: Its options, if the defaults will not do.
        numbers: Whether to train the example of a model family too, and compare it with transformers. This starts
            trainer ranks, and takes tens of seconds.

    Raises:
        ConfigError: The `options` are wrong.
    """
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slime-check-")), "run")
        run_dir.mkdir()
        context = make_context(run_dir=run_dir)
        [data] = context.config.data.prompt_data
        try:
            chosen, _ = checked_options(component, _file_options(component, data) if options is None else options)
        except ConfigError as error:
            if options is not None:
                raise
            return ContractOutcome(notes=[f"not checked, because it has options without defaults: {error}"])

        def build(**changes: Any) -> Any:
            return component.build(chosen, replace(context, **changes))

        subject = Subject(build, component.spec, stack.enter_context(Caller()), chosen)
        try:
            outcome = _contract_of(component.kind)(subject).try_rules()
        except ConfigError as error:
            return ContractOutcome(notes=[f"not checked, because it refuses a made-up run: {error}"])
        except PluginError as error:
            if isinstance(error.__cause__, ValueError | LookupError | OSError):
                return ContractOutcome(notes=[f"not checked, because it cannot be built in a made-up run: {error}"])
            return ContractOutcome(problems=[f"can be built: {error}"])
    if numbers and component.kind == "family" and outcome.kept and not outcome.problems:
        _compare_with_transformers(component, outcome)
    return outcome


def _compare_with_transformers(family: Component, outcome: ContractOutcome) -> None:
    try:
        assert_family_matches_transformers(family.id)
    except AssertionError as error:
        outcome.problems.append(f"computes what transformers does: {error}")
    except ValueError as error:
        outcome.notes.append(f"not compared with transformers: {error}")
    else:
        outcome.kept.append("computes what transformers does")


def _contract_of(kind: str) -> Callable[[Subject], Contract]:
    name = "".join(part.capitalize() for part in kind.split("_"))
    contract: Callable[[Subject], Contract] = getattr(
        importlib.import_module(f"slime.testing.{KINDS[kind].plural}"), f"{name}Contract"
    )
    return contract


def _file_options(component: Component, data: str) -> dict[str, Any]:
    """The prompt file of the made-up run, for the options of a data source that require one."""
    return {
        name: data
        for name, info in component.spec.options.model_fields.items()
        if component.kind == "datasource"
        and info.is_required()
        and info.annotation in (str, Path)
        and any(word in name for word in _FILE_OPTIONS)
    }
