"""The help of `slime train`, from the table of flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slime.cli.component_help import component_help
from slime.cli.help_text import block, entry, metavar
from slime.config.flags import MEGATRON, PLUGINS, SGLANG, UNAVAILABLE, Flag, FlagTable
from slime.config.options import FILE_ONLY, SECTIONS

_USAGE = """\
usage: slime train [RUN.toml] [--flag value]...

Train a model by reinforcement learning (or supervised, with --loss-type sft_loss).  Every flag is also a key of
the run file, in the table named in brackets; flags win over the file.

  --dry-run             check everything, print the plan, start nothing
  --help                this text
  --help-megatron       Megatron's options (native names; table [megatron])
  --help-sglang         SGLang's server options (behind --sglang-; table [sglang])

Options of the chosen components: --reward.OPTION VALUE, --estimator.OPTION, --generator.OPTION, --datasource.OPTION,
--sampling-filter.OPTION, --buffer-filter.OPTION, or the tables [reward] [estimator] ...  They stand at the end of this
text, for the components that the flags beside --help choose; `slime plugins` lists what is installed.
A switch takes no value: --flag, --no-flag or --flag=false.
"""


def train_help(flags: FlagTable, argv: Sequence[str] = ()) -> str:
    """`slime train --help`; `argv` is the rest of the command line, which chooses components."""
    own = list(flags.own())
    blocks = [_USAGE]
    for section, options in SECTIONS.items():
        title = f"[{section}]  {(options.__doc__ or '').splitlines()[0]}"
        only_in_files = [
            line
            for key, field in options.model_fields.items()
            if (section, key) in FILE_ONLY
            for line in entry(f"  [[{section}.{key}]]", [field.description or ""], "")
        ]
        blocks.append(_flags_block(title, [flag for flag in own if flag.target == section], only_in_files))
    blocks.append(_flags_block("[plugins]  Which plugins load.", [flag for flag in own if flag.target == PLUGINS]))
    blocks.append(_flags_block("not in this release", [flag for flag in own if flag.target == UNAVAILABLE]))
    blocks += component_help(argv)
    return "\n".join(blocks)


def engine_help(flags: FlagTable, target: str) -> str:
    """`slime train --help-megatron` and `--help-sglang`."""
    title = {
        MEGATRON: "Megatron's options, from the installed megatron-core.  A switch is turned off with --no-NAME.",
        SGLANG: "SGLang's server options, from the installed sglang.  A switch is turned off with --sglang-no-NAME.",
    }[target]
    return _flags_block(title, flags.of(target))


def _flags_block(title: str, flags: Iterable[Flag], more: Sequence[str] = ()) -> str:
    listed = list(flags)
    aliases: dict[str, list[str]] = {}
    for flag in listed:
        if flag.alias_of is not None:
            aliases.setdefault(flag.alias_of, []).append(flag.spelled)
    lines: list[str] = []
    for flag in listed:
        # A spelling of a flag that is not listed stands for itself.
        if flag.alias_of is None or flag.alias_of not in {other.name for other in listed}:
            lines += _entry(flag, aliases.get(flag.name, []))
    return block(title, [*lines, *more])


def _entry(flag: Flag, aliases: list[str]) -> Iterator[str]:
    words = " NAME FILE ..." if flag.pairs else metavar(flag.type)
    parts = [flag.help] if flag.help else []
    if aliases:
        parts.append(f"(also {', '.join(aliases)})")
    return entry(f"  {flag.spelled}{words}", parts, flag.default)
