"""The help of `slime train`: slime's own options, the chosen components' and the engines'."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

from slime.cli.help_topics import example, topics, topics_of
from slime.cli.plugins_show import options_table
from slime.cli.text_layout import WIDTH, block, entry
from slime.compat.functions import place_functions
from slime.config import read_config
from slime.config.flag_table import find_flag, flags_of
from slime.config.flags import MEGATRON, SGLANG, Flag
from slime.config.run_config import SECTIONS
from slime.config.value_types import Arity, check_path
from slime.errors import ConfigError, SlimeError, did_you_mean
from slime.registry.kinds import KINDS, SLOTS
from slime.registry.original_names import NameTable, original_names
from slime.registry.plugin_set import survey_plugins
from slime.registry.resolve import Use, components_used

if TYPE_CHECKING:
    from slime.registry.component import Component

_USAGE = """\
usage: slime train [RUN.toml] [--flag value]...

Train a model by reinforcement learning, or supervised (--help sft).

example:
{example}
"""
_REST = """\
Every flag is also a key of the run file, in the table named in brackets; flags
override the file.

  --resume FOLDER       continue the run in this run folder, with its
                        configuration; flags change it
  --resume auto         continue the run that --run-name names if it has begun,
                        otherwise start it
  --dry-run             check what is there and print the plan; start nothing
  --from-recipe FILE    print the run of a script or YAML file of TRL, verl,
                        OpenRLHF or the original slime as a run file; with
                        --dry-run, check it too
  --help                this text
  --help WORD           what has to do with WORD: a subject such as sft, lora or
                        memory, a word of a flag's name or description, also of
                        Megatron and SGLang, or another framework's flag
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
#: what nine runs in ten set
_FIRST = (
    "hf-checkpoint",
    "prompt-data",
    "reward",
    "advantage-estimator",
    "num-rollout",
    "rollout-batch-size",
    "n-samples-per-prompt",
    "rollout-max-response-len",
    "lr",
    "eval-prompt-data",
)
#: types in words -> what stands for a value
_PLACEHOLDERS = {
    "a whole number": "N",
    "a list of whole numbers": "N",
    "a number": "NUMBER",
    "a list of numbers": "NUMBER",
    "a string": "TEXT",
    "a list of strings": "TEXT",
    "a table": "JSON",
}
#: characters of choices that stand beside a flag
_CHOICES = 40


def train_help(argv: Sequence[str] = ()) -> str:
    """The text of `slime train --help`; `argv` is the rest of the command line, which may choose components."""
    slots = ", ".join(f"--{name.replace('_', '-')}.OPTION" for name in SLOTS)
    first = [line for name in _FIRST for line in _first_lines(flag_named(name))]
    rest = _REST.format(slots=textwrap.fill(slots, WIDTH, break_on_hyphens=False))
    blocks = [_USAGE.format(example=example()), block("nine runs in ten set:", first), rest]
    for section, options in SECTIONS.items():
        title = f"[{section}]  {(options.__doc__ or '').splitlines()[0]}"
        blocks.append(flags_block(title, flags_of(section)))
    return "\n".join([*blocks, *_chosen_components(argv)])


def engine_help(target: str) -> str:
    """The text of `slime train --help-megatron` and `--help-sglang`."""
    title = {
        MEGATRON: "Megatron's options, from the installed megatron-core. --no-NAME turns a switch off.",
        SGLANG: "SGLang's server options, from the installed sglang. --sglang-no-NAME turns a switch off.",
    }[target]
    return flags_block(title, flags_of(target))


def search_help(words: Sequence[str]) -> str:
    """What has to do with the `words`: a subject, flags of slime, components, Megatron and SGLang, and other names.

    A flag is found if all words begin a word of its name or description, so that "dpo" is not found in "endpoint".

    Raises:
        ConfigError: Nothing has.
    """
    wanted = [word.lower().lstrip("-").replace("_", "-") for word in words]
    patterns = [re.compile(rf"(?<![a-z0-9]){re.escape(word)}") for word in wanted]

    def found(*texts: str) -> bool:
        text = " ".join(texts).lower().replace("_", "-")
        return all(pattern.search(text) for pattern in patterns)

    answers = topics_of(wanted)
    blocks, engines = list[str](), list[str]()
    for topic in answers:
        lines = [line for name in topic.flags for line in _first_lines(flag_named(name))]
        blocks.append(block(f"{topic.text} ({topic.page})", lines))
    told = {name for topic in answers for name in topic.flags}
    for target in (*SECTIONS, MEGATRON, SGLANG):
        if flags := [flag for flag in flags_of(target) if flag.name not in told and found(flag.spelled, flag.help)]:
            # Those whose name has the word first.
            flags.sort(key=lambda flag: not found(flag.spelled))
            (engines if target in (MEGATRON, SGLANG) else blocks).append(flags_block(f"[{target}]", flags))
    components: list[str] = []
    for component in survey_plugins().registered:
        slot = KINDS[component.kind].slots[-1].prefixes[0]
        for name, info in component.spec.options.model_fields.items():
            flag, meaning = f"--{slot}.{name.replace('_', '-')}", info.description or ""
            if found(flag, component.name, meaning):
                components += entry(f"  {flag}", [meaning, f"({component.title})"], "")
    if components:
        blocks.append(block("options of components", components))
    if others := list(_other_names(found)):
        blocks.append(block("names of other frameworks, and what to write here (docs/migrating.md)", others))
    if not blocks and not engines:
        known = [word for topic in topics() for word in topic.words]
        known += [flag.name for section in SECTIONS for flag in flags_of(section)]
        raise ConfigError(
            f"no flag has {' '.join(words)!r} in its name or description.{did_you_mean('-'.join(wanted), known)}"
            " slime train --help lists them"
        )
    return "\n".join([*blocks, *engines])


def _other_names(found: Callable[..., bool]) -> Iterator[str]:
    """Options of other frameworks with a word, by their tables; of the original slime those that differ here."""
    tables: tuple[tuple[NameTable, str], ...] = (
        ("TRL", "TRL"),
        ("verl", "verl"),
        ("OpenRLHF", "OpenRLHF"),
        ("flags", "THUDM's slime"),
    )
    for table, framework in tables:
        for name, instead in original_names()[table].items():
            if found(name):
                yield from entry(f"  {name}", [f"{framework}: {instead.replace('`', '')}"], "")


def flag_named(name: str) -> Flag:
    """The flag of this name (no leading dashes), which must be one."""
    flag = find_flag(name)
    assert flag is not None, f"--{name} is no flag"
    return flag


def _first_lines(flag: Flag) -> Iterator[str]:
    """A flag of the short list: also with the names of the components that it chooses among."""
    named = [slot for slot in SLOTS.values() if slot.flag == flag.spelled]
    choices = f"Installed: {', '.join(choices_of(flag))}." if named else ""
    yield from _flag_lines(flag, " ".join(part for part in (flag.help, choices) if part))


def choices_of(flag: Flag) -> list[str]:
    """The values of a flag, if they are known: those of its type, or the components that it chooses among."""
    kind = next((kind.name for kind in KINDS.values() for slot in kind.slots if slot.flag == flag.spelled), None)
    if kind is not None:
        return [component.name for component in survey_plugins().components(kind)]
    described = flag.type.describe()
    return described.removeprefix("one of ").split(", ") if described.startswith("one of ") else []


def _flag_lines(flag: Flag, text: str, aliases: Sequence[str] = ()) -> Iterator[str]:
    """One flag of a help text, described by `text`."""
    words = "" if flag.file_only else _placeholder(flag)
    parts = [text, f"(also {', '.join(aliases)})" if aliases else ""]
    yield from entry(f"  {flag.spelled}{words}", [part for part in parts if part], flag.default)


def flags_block(title: str, flags: Iterable[Flag], texts: Mapping[str, str] = MappingProxyType({})) -> str:
    """A block of a help text: these flags, each with its aliases among them. `texts` replaces descriptions, by name."""
    by_name = {flag.name: flag for flag in flags}
    aliases: dict[str, list[str]] = {}
    for flag in by_name.values():
        if flag.alias_of in by_name:
            aliases.setdefault(flag.alias_of, []).append(flag.spelled)
    lines = [
        line
        for flag in by_name.values()
        if flag.alias_of not in by_name
        for line in _flag_lines(flag, texts.get(flag.name, flag.help), aliases.get(flag.name, ()))
    ]
    return block(title, lines)


def _placeholder(flag: Flag) -> str:
    """What stands for the words after a flag: its choices, or their type."""
    described = flag.type.describe()
    choices = f"{{{described.removeprefix('one of ').replace(', ', ',')}}}" if described.startswith("one of ") else ""
    if any(slot.flag == flag.spelled for slot in SLOTS.values()):
        choices = "NAME"
    word = choices or ("PATH" if _is_path(flag) else _PLACEHOLDERS.get(described, "VALUE"))
    if len(word) > _CHOICES:
        word = "NAME"
    return {Arity.SWITCH: "", Arity.ONE: f" {word}", Arity.OPTIONAL: f" [{word}]", Arity.PAIRS: " NAME FILE ..."}.get(
        flag.type.arity, f" {word} ..."
    )


def _is_path(flag: Flag) -> bool:
    """Whether the value of one of slime's own options is checked as a path, and is no mere name."""
    section = SECTIONS.get(flag.target)
    field = None if section is None else section.model_fields.get(flag.key)
    return field is not None and not flag.key.endswith("_name") and _checks_path([field.annotation, *field.metadata])


def _checks_path(parts: Iterable[object]) -> bool:
    return any(getattr(part, "func", None) is check_path or _checks_path(get_args(part)) for part in parts)


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
