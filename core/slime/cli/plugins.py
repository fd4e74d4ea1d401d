"""`slime plugins`: lists, describes, checks and creates plugins.

Parts are imported when they are needed, so that the table appears quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from slime.cli.arguments import Arguments
from slime.cli.output import write
from slime.errors import ConfigError, PluginLoadError, PluginNotFoundError, did_you_mean
from slime.registry.component import Component
from slime.registry.function_path import is_reference
from slime.registry.kinds import KINDS
from slime.registry.plugin_set import PluginSet, survey_plugins

_HELP = """\
usage: slime plugins [OPTIONS]        list every installed plugin
       slime plugins show ID          describe one component (NAME or
                                      PLUGIN/NAME), or all of a plugin
       slime plugins check [ID...]    run the contract kit on installed
                                      components
       slime plugins new KIND NAME [--into DIR]
                                      write a new plugin package, with tests

KIND is one of
{kinds}.

options of the list:
  --kind KIND       only plugins with components of one kind, and broken ones
  --json            print JSON
  --no-load         read metadata only; no plugin's code runs
  --check           exit with 1 if a plugin is broken or names clash
  -v, --verbose     add modules, entry points, sources, and the tracebacks of
                    broken plugins
  --for RUN.toml [FLAGS...]
                    only what `slime train RUN.toml FLAGS...` would use; exit
                    with 1 if it cannot use some of it
  --freeze          print pins of the installed plugin packages: versions,
                    commits, hashes of the files
  --compare FILE    compare with the output of --freeze; exit with 1 if
                    something differs

show and check take --kind if components of two kinds have the same name. check
exits with 1 if a component breaks a rule. check --numbers also trains the
examples of model families, and compares them with transformers; it takes tens
of seconds for each.
"""
#: kinds as written on the command line
_KIND_NAMES = [name.replace("_", "-") for name in KINDS]


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        SlimeError: The arguments are wrong, or a component that they name is missing or broken.
    """
    command, words = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("list", argv)
    commands = {"list": _list, "show": _show, "check": _check, "new": _new}
    if command not in commands:
        raise ConfigError(
            f"slime plugins: unknown command {command!r}.{did_you_mean(command, commands)}"
            f" Commands: {', '.join(commands)}."
        )
    if {"-h", "--help"} & set(words):
        write(_HELP.format(kinds=textwrap.fill(", ".join(_KIND_NAMES), 66, break_on_hyphens=False)))
        return 0
    return commands[command](words)


def _kind(text: str) -> str:
    """Read a kind of component: `buffer-filter` or `buffer_filter`."""
    kind = text.replace("-", "_")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a kind of component; expected one of {', '.join(_KIND_NAMES)}."
            f"{did_you_mean(text, _KIND_NAMES)}"
        )
    return kind


# --- list --------------------------------------------------------------------------------------------


def _list(words: Sequence[str]) -> int:
    parser = Arguments("slime plugins")
    parser.add_argument("--kind", type=_kind)
    for switch in ("--json", "--no-load", "--check", "--freeze"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--for", dest="run", nargs=argparse.REMAINDER)
    # --for takes all words that follow it, and --json may be one of them.
    stated = parser.read(sorted(words, key=lambda word: word != "--json"))
    _refuse_combinations(stated)
    if stated.run is not None:
        from slime.cli.plugins_for_run import print_used

        return print_used(stated.run, json=stated.json)
    if stated.freeze or stated.compare is not None:
        from slime.cli.plugins_freeze import print_differences, print_pins

        return print_pins() if stated.freeze else print_differences(stated.compare)
    from slime.cli.plugins_list import installed

    # What plugins print is not for stdout: that is for the command's own output, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        found = installed(kind=stated.kind, load=not stated.no_load)
    if stated.json:
        print(found.content.model_dump_json(indent=2))
    else:
        write(found.text(verbose=stated.verbose))
    return int(stated.check and found.has_problems)


def _refuse_combinations(stated: argparse.Namespace) -> None:
    """Refuse pairs of options of which one would be ignored."""
    given = {f"--{name.replace('_', '-')}" for name, value in vars(stated).items() if value not in (None, False)}
    if stated.run is not None:
        given = given - {"--run"} | {"--for"}
    allowed: dict[str, set[str]] = {
        "--for": {"--json"},
        "--freeze": set(),
        "--compare": set(),
        "--no-load": {"--json", "--verbose"},  # metadata does not show kinds or problems
        "--json": {"--for", "--kind", "--no-load", "--check"},
    }
    for option, beside in allowed.items():
        ignored = given - {option} - beside
        if option in given and ignored:
            raise ConfigError(f"slime plugins {option} cannot be combined with {' and '.join(sorted(ignored))}")


# --- show, check, new --------------------------------------------------------------------------------


def _show(words: Sequence[str]) -> int:
    from slime.cli.plugins_show import component_text

    parser = Arguments("slime plugins show")
    parser.add_argument("id", metavar="ID")
    parser.add_argument("--kind", type=_kind)
    stated = parser.read(words)
    with contextlib.redirect_stdout(sys.stderr):
        texts = [component_text(component) for component in _selected(survey_plugins(), stated.id, stated.kind)]
    write("\n\n".join(texts))
    return 0


def _check(words: Sequence[str]) -> int:
    """Print one line for each component, and its problems; returns 1 if there are any."""
    from slime.cli.text_layout import count
    from slime.testing.check import check_component

    parser = Arguments("slime plugins check")
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--kind", type=_kind)
    parser.add_argument("--numbers", action="store_true")
    stated = parser.read(words)
    plugins = survey_plugins()
    components = [] if stated.ids else plugins.components(stated.kind)
    for name in stated.ids:
        components += [one for one in _selected(plugins, name, stated.kind) if one not in components]
    failed = 0
    for component in components:
        with contextlib.redirect_stdout(sys.stderr):
            checked = check_component(component, numbers=stated.numbers)
        failed += bool(checked.problems)
        word = "broken" if checked.problems else "ok" if checked.kept else "-"
        print(f"{word:<8}{component.title}: {len(checked.kept)} rules kept", flush=True)
        for line in (*checked.problems, *checked.notes):
            print(f"        {line}", flush=True)
    broken = () if stated.ids else plugins.failures
    for failure in broken:
        print(f"broken  {failure}")
    total = f"{count(len(components), 'component')} checked"
    print(f"{total}, {failed} with problems" if failed else total)
    return int(bool(failed or broken))


def _new(words: Sequence[str]) -> int:
    """Write a package and print what to do next."""
    from slime.testing.scaffold import Names, write_package

    parser = Arguments("slime plugins new")
    parser.add_argument("kind", metavar="KIND", type=_kind)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--into", type=Path, default=Path())
    stated = parser.read(words)
    names = Names.of(stated.kind, stated.name)
    folder = write_package(names, stated.into)
    print(f"wrote {folder}/")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"  {path.relative_to(folder)}")
    print(
        f"""
next:
  pip install -e {folder}
  pytest {folder}
  slime plugins
  slime plugins check {names.plugin}
  slime train RUN.toml {KINDS[stated.kind].slots[-1].flag} {names.plugin}/{names.plugin}

The component is in {folder}/{names.module}/impl.py, its options in {names.module}/__init__.py."""
    )
    return 0


def _selected(plugins: PluginSet, name: str, kind: str | None) -> list[Component]:
    """The components called `name` (NAME or PLUGIN/NAME), and all components of the plugin or package `name`.

    A reference to a function of the user's own selects it as a component of each kind that it can be.

    Raises:
        PluginLoadError: It is the name of a broken plugin.
        PluginConflictError: Several components of one kind have the name.
        PluginNotFoundError: Nothing has the name; the message suggests the most similar one.
    """
    if is_reference(name):
        return _functions(name, kind)
    found: list[Component] = []
    for candidate in (kind,) if kind else KINDS:
        with contextlib.suppress(PluginNotFoundError):
            found.append(plugins.find(candidate, name))
    found += [one for one in plugins.components(kind) if one not in found and one.found.is_called(name)]
    if found:
        return found
    for failure in plugins.failures:
        if failure.found.is_called(name):
            raise PluginLoadError(str(failure))
    what = f"{KINDS[kind].title} or plugin" if kind else "component or plugin"
    known = {
        spelling
        for one in plugins.components(kind)
        for spelling in (one.id, one.name, one.found.name, one.found.distribution)
    }
    raise PluginNotFoundError(f"no {what} is called {name!r}.{did_you_mean(name, known)} `slime plugins` lists them.")


def _functions(text: str, kind: str | None) -> list[Component]:
    """What `_selected` returns for a reference."""
    from slime.compat.functions import find_function

    by_path = [one.name for one in KINDS.values() if any(slot.path_key for slot in one.slots)]
    found: list[Component] = []
    refusals: list[PluginNotFoundError] = []
    for candidate in (kind,) if kind else by_path:
        try:
            found.append(find_function(candidate, text))
        except PluginNotFoundError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found
