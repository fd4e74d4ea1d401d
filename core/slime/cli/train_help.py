"""The help of `slime train`, from the table of flags."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from slime.config.flags import MEGATRON, PLUGINS, SGLANG, UNAVAILABLE, Flag, FlagTable
from slime.config.options import SECTIONS
from slime.config.values import Arity

_USAGE = """\
usage: slime train [RUN.toml] [--flag value]...

Train a model by reinforcement learning (or supervised, with --loss-type sft_loss).  Every flag is also a key of
the run file, in the table named in brackets; flags win over the file.

  --dry-run             check everything, print the plan, start nothing
  --help                this text
  --help-megatron       Megatron's options (native names; table [megatron])
  --help-sglang         SGLang's server options (behind --sglang-; table [sglang])

Options of the chosen components: --reward.OPTION VALUE, --estimator.OPTION, --generator.OPTION,
--datasource.OPTION, or the tables [reward] [estimator] [generator] [datasource]; `slime plugins` lists them.
A switch takes no value: --flag, --no-flag or --flag=false.
"""
_WIDTH, _COLUMN = 112, 34


def train_help(flags: FlagTable) -> str:
    """`slime train --help`."""
    own = list(flags.own())
    blocks = [_USAGE]
    for section, options in SECTIONS.items():
        title = f"[{section}]  {(options.__doc__ or '').splitlines()[0]}"
        blocks.append(_block(title, [flag for flag in own if flag.target == section]))
    blocks.append(_block("[plugins]  Which plugins load.", [flag for flag in own if flag.target == PLUGINS]))
    blocks.append(_block("not in this release", [flag for flag in own if flag.target == UNAVAILABLE]))
    return "\n".join(blocks)


def engine_help(flags: FlagTable, target: str) -> str:
    """`slime train --help-megatron` and `--help-sglang`."""
    title = {
        MEGATRON: "Megatron's options, from the installed megatron-core.  A switch is turned off with --no-NAME.",
        SGLANG: "SGLang's server options, from the installed sglang.  A switch is turned off with --sglang-no-NAME.",
    }[target]
    return _block(title, flags.of(target))


def _block(title: str, flags: Iterable[Flag]) -> str:
    listed = list(flags)
    aliases: dict[str, list[str]] = {}
    for flag in listed:
        if flag.alias_of is not None:
            aliases.setdefault(flag.alias_of, []).append(flag.spelled)
    lines = [title]
    for flag in listed:
        # A spelling of a flag that is not listed stands for itself.
        if flag.alias_of is None or flag.alias_of not in {other.name for other in listed}:
            lines += _entry(flag, aliases.get(flag.name, []))
    return "\n".join(lines) + "\n"


def _entry(flag: Flag, aliases: list[str]) -> Iterator[str]:
    head = f"  {flag.spelled}{_metavar(flag)}"
    parts = [flag.help] if flag.help else []
    if aliases:
        parts.append(f"(also {', '.join(aliases)})")
    if flag.default not in ("", "None", "False", "[]"):
        parts.append(f"[{flag.default}]")
    lines = textwrap.wrap(" ".join(parts), _WIDTH - _COLUMN, break_on_hyphens=False) or [""]
    if len(head) >= _COLUMN - 1:
        yield head
    else:
        lines[0] = head.ljust(_COLUMN) + lines[0]
        yield lines.pop(0)
    for line in lines:
        yield " " * _COLUMN + line


def _metavar(flag: Flag) -> str:
    kind = flag.type.describe()
    word = f"{{{kind.removeprefix('one of ').replace(', ', ',')}}}" if kind.startswith("one of ") else "VALUE"
    if len(word) > 40:
        word = "NAME"
    if flag.pairs:
        return " NAME FILE ..."
    return {Arity.SWITCH: "", Arity.ONE: f" {word}", Arity.MAYBE: f" [{word}]"}.get(flag.type.arity, f" {word} ...")
