"""An installed component held to the contract of its kind, with input that is made up: `slime plugins check`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.errors import ConfigError, PluginError
from slime.plugin import Context, Options
from slime.plugins.component import Component
from slime.plugins.component_options import checked_options
from slime.testing.buffer_filters import buffer_filter_rules
from slime.testing.caller import Caller
from slime.testing.context import SAMPLES_PER_PROMPT, make_context
from slime.testing.datasources import datasource_rules
from slime.testing.estimators import estimator_rules
from slime.testing.generators import generator_rules
from slime.testing.modules import assert_pickles
from slime.testing.rewards import reward_rules
from slime.testing.rules import Rule, try_rules

#: names of options that a data source may take its file by
_FILE_OPTIONS = ("path", "file", "data")


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of a component under the contract kit.

    `slime plugins check` prints `problems` and exits with 1 when there are any; `notes` say what could not be
    checked without the user's data, and are no failure.
    """

    #: rules it keeps
    kept: list[str] = field(default_factory=list)
    #: "RULE: what was got and expected", for each that it breaks
    problems: list[str] = field(default_factory=list)
    #: what was not checked, and why
    notes: list[str] = field(default_factory=list)


def check_component(component: Component, options: Mapping[str, Any] | None = None) -> Checked:
    """Build a component in a temporary run and try every rule of its kind.  Never raises for the component's sake.

    options   its own options, where the defaults will not do; raises `ConfigError` where they are wrong
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slime-check-")))
        context = make_context(run_dir=folder)
        [data] = context.config.data.prompt_data
        try:
            chosen, _ = checked_options(component, _filled_in(component, data) if options is None else options)
        except ConfigError as error:
            if options is not None:
                raise
            return Checked(notes=[f"not checked, because it has options without defaults: {error}"])
        caller = stack.enter_context(Caller())
        try:
            rules = _rules(component, chosen, context, caller)
        except ConfigError as error:
            return Checked(notes=[f"not checked, because it refuses a made-up run: {error}"])
        except PluginError as error:
            if isinstance(error.__cause__, ValueError | LookupError | OSError):
                return Checked(notes=[f"not checked, because it cannot be built in a made-up run: {error}"])
            return Checked(problems=[f"can be built: {error}"])
        outcome = try_rules([Rule("has options that pickle", lambda: assert_pickles(chosen)), *rules])
    notes = (
        [] if outcome.refused is None else [f"not checked further, because it refuses made-up data: {outcome.refused}"]
    )
    return Checked(outcome.kept, outcome.broken, notes)


def _rules(component: Component, options: Options, context: Context, caller: Caller) -> list[Rule]:
    spec = component.spec
    if component.kind == "estimator":
        return estimator_rules(component.build(options, replace(context, tokenizer=None)), spec)  # as in the trainer
    made = component.build(options, context)
    if component.kind == "reward":
        return reward_rules(made, caller, spec)
    if component.kind == "buffer_filter":
        return buffer_filter_rules(made)
    if component.kind == "generator":
        return generator_rules(made, caller, spec)
    return datasource_rules(lambda: component.build(options, context), SAMPLES_PER_PROMPT)


def _filled_in(component: Component, data: str) -> dict[str, Any]:
    """Options for a data source that must be told a file."""
    fields = component.spec.options.model_fields
    return {
        name: data
        for name, info in fields.items()
        if component.kind == "datasource"
        and info.is_required()
        and info.annotation in (str, Path)
        and any(word in name for word in _FILE_OPTIONS)
    }
