"""The help of `slime train`: slime's own options, the chosen components' and the engines'."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from slime.cli.plugins_show import options_table
from slime.cli.text_layout import WIDTH, block, entry
from slime.compat.functions import place_functions
from slime.config import read_config
from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, SGLANG, Flag
from slime.config.run_config import SECTIONS
from slime.config.value_types import Arity, ValueType
from slime.errors import SlimeError
from slime.registry.kinds import KINDS, SLOTS
from slime.registry.plugin_set import survey_plugins
from slime.registry.resolve import Use, components_used

if TYPE_CHECKING:
    from slime.registry.component import Component

_USAGE = """\
usage: slime train [RUN.toml] [--flag value]...

Train a model by reinforcement learning (or supervised, with --loss-type
sft_loss). Every flag is also a key of the run file, in the table named in
brackets; flags override the file.

  --resume FOLDER       continue the run in this run folder, with its
                        configuration; flags change it
  --resume auto         continue the run that --run-name names if it has begun,
                        otherwise start it
  --dry-run             check everything and print the plan; start nothing
  --help                this text
  --help WORD           the flags whose name or description has WORD, also of
                        Megatron and SGLang
  --help-megatron       Megatron's options (native names; table [megatron])
  --help-sglang         SGLang's server options (with the prefix --sglang-;
                        table [sglang])

An option of a component is a flag that begins with its slot, or a key of the
slot's table:
{slots}.
The end of this text lists the options of the components that the other flags
choose; `slime plugins` lists all installed components.
A switch takes no value: --flag, --no-flag or --flag=false.
"""


def train_help(argv: Sequence[str] = ()) -> str:
    """The text of `slime train --help`; `argv` is the rest of the command line, which may choose components."""
    slots = ", ".join(f"--{name.replace('_', '-')}.OPTION" for name in SLOTS)
    blocks = [_USAGE.format(slots=textwrap.fill(slots, WIDTH, break_on_hyphens=False))]
    for section, options in SECTIONS.items():
        title = f"[{section}]  {(options.__doc__ or '').splitlines()[0]}"
        blocks.append(_flags_block(title, flags_of(section)))
    return "\n".join([*blocks, *_chosen_components(argv)])


def engine_help(target: str) -> str:
    """The text of `slime train --help-megatron` and `--help-sglang`."""
    title = {
        MEGATRON: "Megatron's options, from the installed megatron-core. --no-NAME turns a switch off.",
        SGLANG: "SGLang's server options, from the installed sglang. --sglang-no-NAME turns a switch off.",
    }[target]
    return _flags_block(title, flags_of(target))


def search_help(words: Sequence[str]) -> str:
    """Every flag whose name or description has all the `words`: of slime, Megatron and SGLang, and of components."""
    wanted = [word.lower().lstrip("-").replace("_", "-") for word in words]

    def found(*texts: str) -> bool:
        text = " ".join(texts).lower().replace("_", "-")
        return all(word in text for word in wanted)

    blocks = []
    for target in (*SECTIONS, MEGATRON, SGLANG):
        if flags := [flag for flag in flags_of(target) if found(flag.spelled, flag.help)]:
            blocks.append(_flags_block(f"[{target}]", flags))
    components: list[str] = []
    for component in survey_plugins().registered:
        slot = KINDS[component.kind].slots[-1].prefixes[0]
        for name, info in component.spec.options.model_fields.items():
            flag, meaning = f"--{slot}.{name.replace('_', '-')}", info.description or ""
            if found(flag, component.name, meaning):
                components += entry(f"  {flag}", [meaning, f"({component.title})"], "")
    if components:
        blocks.append(block("options of components", components))
    shown = " ".join(words)
    return "\n".join(blocks) or f"no flag has {shown!r} in its name or description; slime train --help lists them\n"


def flag_lines(flag: Flag, text: str | None = None, aliases: Sequence[str] = ()) -> Iterator[str]:
    """One flag of a help text; `text` replaces its description."""
    words = "" if flag.file_only else _metavar(flag.type)
    parts = [flag.help if text is None else text, f"(also {', '.join(aliases)})" if aliases else ""]
    yield from entry(f"  {flag.spelled}{words}", [part for part in parts if part], flag.default)


def _flags_block(title: str, flags: Iterable[Flag]) -> str:
    by_name = {flag.name: flag for flag in flags}
    aliases: dict[str, list[str]] = {}
    for flag in by_name.values():
        if flag.alias_of in by_name:
            aliases.setdefault(flag.alias_of, []).append(flag.spelled)
    lines = [
        line
        for flag in by_name.values()
        if flag.alias_of not in by_name
        for line in flag_lines(flag, aliases=aliases.get(flag.name, ()))
    ]
    return block(title, lines)


def _metavar(kind: ValueType) -> str:
    """The placeholder for the words after a flag."""
    described = kind.describe()
    word = f"{{{described.removeprefix('one of ').replace(', ', ',')}}}" if described.startswith("one of ") else "VALUE"
    if len(word) > 40:
        word = "NAME"
    return {Arity.SWITCH: "", Arity.ONE: f" {word}", Arity.OPTIONAL: f" [{word}]", Arity.PAIRS: " NAME FILE ..."}.get(
        kind.arity, f" {word} ..."
    )


# --- components --------------------------------------------------------------------------------------


def _chosen_components(argv: Sequence[str]) -> Iterator[str]:
    """A block for each component that the command line and its run file choose, or why it cannot be shown."""
    try:
        functions = place_functions(read_config(argv))
        plugins = survey_plugins(functions.config.plugins, functions.components)
        uses = components_used(functions.config)
    except SlimeError as error:
        yield f"options of the chosen components: not shown, because this command line cannot be read: {error}\n"
        return
    yield from (f"{problem}\n" for problem in functions.problems)
    for use in (one for one in uses if not functions.has_failed(one.name)):
        try:
            yield _component_block(use, plugins.find(use.kind, use.name))
        except SlimeError as error:
            yield f"[{use.slot}]  {error}\n"


def _component_block(use: Use, component: Component) -> str:
    if use.eval_set is not None:
        title, prefix = f"[[evaluation.sets]] {use.eval_set}  Keys of {use.kind} = {{...}}: {component.title}.", ""
    elif "[" in use.slot:
        slot = SLOTS[use.slot.partition("[")[0]]
        title, prefix = f"[[{slot.section}.{slot.list_key}]]  Keys of the table of {component.title}.", ""
    else:
        title, prefix = f"[{use.slot}]  Options of {component.title}.", f"--{use.slot.replace('_', '-')}."
    return block(title, [options_table(component, prefix)])
