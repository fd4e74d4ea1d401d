"""The words of `slime plugins`, and which part answers them.

Each part is imported when it is asked for: the table must answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.cli.plugins.arguments import Arguments, known_kind
from slime.errors import ConfigError, did_you_mean

_HELP = """\
usage: slime plugins [OPTIONS]                 every installed plugin, as a table
       slime plugins show ID                   one component (NAME or PLUGIN/NAME), or all of a plugin
       slime plugins check [ID...]             run the contract kit on installed components
       slime plugins new KIND NAME [--into DIR]  write a new plugin package, with tests

KIND is reward, estimator, datasource, buffer-filter or generator.

options of the table:
  --kind KIND       only plugins with components of one kind, and broken ones
  --json            as JSON
  --no-load         read metadata only; no plugin's code runs
  --check           exit with 1 when a plugin is broken or its names clash
  -v, --verbose     with modules, entry points, sources, and the tracebacks of broken plugins
  --for RUN.toml [FLAGS...]
                    only what `slime train RUN.toml FLAGS...` would use; exit with 1 when something of it cannot be used
  --freeze          pins of the installed plugin packages: versions, commits, hashes of the files
  --compare FILE    compare with what --freeze printed; exit with 1 when something differs

show takes --kind where components of two kinds have one name.  check exits with 1 when a component breaks a rule.
"""


def run(argv: Sequence[str]) -> int:
    """The command; its exit code.  Raises `SlimeError`."""
    command, words = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("list", argv)
    if command not in _COMMANDS:
        raise ConfigError(
            f"slime plugins: unknown command {command!r}.{did_you_mean(command, _COMMANDS)}"
            f" Commands: {', '.join(_COMMANDS)}."
        )
    if {"-h", "--help"} & set(words):
        print(_HELP, end="")
        return 0
    return _COMMANDS[command](words)


def _list(words: Sequence[str]) -> int:
    parser = Arguments("slime plugins")
    parser.add_argument("--kind")
    for switch in ("--json", "--no-load", "--check", "--freeze"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--compare", type=Path)
    asked_for_run = "--for" in words
    at = words.index("--for") if asked_for_run else len(words)
    own, run_words = [*words[:at]], [*words[at + 1 :]]
    # Switches of the listing may follow the run's words: `slime plugins --for run.toml --json`.
    own += [word for word in run_words if word in ("--json", "--check", "-v", "--verbose")]
    stated = parser.read(own)
    _refuse_combinations(stated, asked_for_run)
    if asked_for_run:
        from slime.cli.plugins.for_run import for_run

        return for_run([word for word in run_words if word not in own], json=stated.json)
    if stated.freeze or stated.compare is not None:
        from slime.cli.plugins.compare import compare, freeze

        return freeze() if stated.compare is None else compare(stated.compare)
    from slime.cli.plugins.listing import listing

    with _quiet():
        table = listing(kind=known_kind(stated.kind), load=not stated.no_load)
    print(table.json() if stated.json else table.text(verbose=stated.verbose))
    return int(stated.check and table.trouble)


def _refuse_combinations(stated: argparse.Namespace, asked_for_run: bool) -> None:
    """Each of these answers another question."""
    asked = {"--for": asked_for_run, "--freeze": stated.freeze, "--compare": stated.compare is not None}
    alone = [name for name, given in asked.items() if given]
    others = {"--kind": stated.kind is not None, "--no-load": stated.no_load}
    # Pins are always read from metadata alone and have one format.
    if alone and alone[0] != "--for":
        others |= {"--json": stated.json, "--verbose": stated.verbose, "--check": stated.check}
    beside = [*alone[1:], *(name for name, given in others.items() if given)] if alone else []
    if beside:
        raise ConfigError(f"slime plugins {alone[0]} cannot be combined with {' and '.join(beside)}")


def _show(words: Sequence[str]) -> int:
    from slime.cli.plugins.show import show

    parser = Arguments("slime plugins show")
    parser.add_argument("id", metavar="ID")
    parser.add_argument("--kind")
    stated = parser.read(words)
    with _quiet():
        text = show(stated.id, known_kind(stated.kind))
    print(text)
    return 0


def _check(words: Sequence[str]) -> int:
    from slime.cli.plugins.check import check

    parser = Arguments("slime plugins check")
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--kind")
    stated = parser.read(words)
    return check(stated.ids, known_kind(stated.kind))


def _new(words: Sequence[str]) -> int:
    from slime.cli.plugins.new import new

    parser = Arguments("slime plugins new")
    parser.add_argument("kind", metavar="KIND")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--into", type=Path, default=Path())
    stated = parser.read(words)
    return new(known_kind(stated.kind), stated.name, stated.into)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What plugins print when they are imported goes to stderr: stdout is the answer, which may be JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


_COMMANDS = {"list": _list, "show": _show, "check": _check, "new": _new}
