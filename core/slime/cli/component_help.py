"""The part of `slime train --help` that is about the components this command line chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime.cli.help_text import block, entry, metavar
from slime.config import read_config
from slime.config.local_paths import place_functions
from slime.config.values import type_of
from slime.errors import SlimeError
from slime.plugins import survey_plugins
from slime.plugins.limits import LIMITED_KINDS, Limits
from slime.plugins.resolve import Use, components_used

if TYPE_CHECKING:
    from slime.plugin import Options
    from slime.plugins import Component

#: slot -> how its flags begin
_FLAGS = {"sampling_filter": "sampling-filter", "buffer_filter": "buffer-filter"}


def component_help(argv: Sequence[str]) -> Iterator[str]:
    """A block for each component that `argv` (its flags and run file) chooses; why not, where that cannot be told."""
    try:
        config = place_functions(read_config(argv))
        plugins = survey_plugins(config.plugins)
        uses = components_used(config)
    except SlimeError as error:
        yield f"options of the chosen components: not shown, since this command line cannot be read: {error}\n"
        return
    for use in uses:
        try:
            yield _of(use, plugins.find(use.kind, use.name))
        except SlimeError as error:
            yield f"[{use.slot}]  {error}\n"


def _of(use: Use, component: Component) -> str:
    """The options of one component, under the names that set them."""
    if use.eval_set is not None:
        title, before = f"[[evaluation.sets]] {use.eval_set}  Keys of {use.kind} = {{...}}: {component.title}.", ""
    elif "[" in use.slot:
        title, before = f"[[reward.terms]]  Keys of the table of {component.title}.", ""
    else:
        title, before = f"[{use.slot}]  Options of {component.title}.", f"--{_FLAGS.get(use.slot, use.slot)}."
    models: list[type[Options]] = [component.spec.options]
    if component.kind in LIMITED_KINDS:
        models.append(Limits)
    lines = [line for model in models for line in _options(model, before)]
    return block(title, lines or ["  none"])


def _options(model: type[Options], before: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = type_of(field.annotation)
        default = "" if field.is_required() else str(field.get_default(call_default_factory=True))
        parts = [field.description or "", "(required)" if field.is_required() else ""]
        word = " {true,false}" if kind.annotation is bool else metavar(kind)
        yield from entry(f"  {before}{name.replace('_', '-')}{word}", [part for part in parts if part], default)
