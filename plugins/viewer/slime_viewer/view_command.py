"""`slime view`: looks at runs in the browser."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.cli.arguments import Arguments
from slime.cli.output import write
from slime.errors import ConfigError, SlimeError

if TYPE_CHECKING:
    from slime.plugin.watchers import BuildPanel, Panel
    from slime.registry.plugin_set import PluginSet
    from slime_viewer.demo import Demo

_T = TypeVar("_T")
#: where runs are, if nobody says otherwise
OUTPUTS = Path("outputs")
_HELP = """\
usage: slime view [RUN ...] [--port PORT] [--panel NAME ...]
       slime view --demo [DIR] [--port PORT] [--panel NAME ...]

Show run folders in the browser, while the runs go on or after them: curves,
what went wrong, samples by filter and text, groups, conversations, one prompt
through the run, two runs compared. RUN may be a folder of runs: they are
listed, and new ones appear by themselves. Without RUN it is outputs/.

The page is served on this machine alone (127.0.0.1), to whoever has the
address that is printed; nothing can be changed with it. On a server, forward
the port: ssh -L PORT:127.0.0.1:PORT HOST

  --demo [DIR]     make a small run and show it while it goes on: a model of
                   300,000 parameters learns to add, in about a minute on two
                   CPU cores.
                   Model and run folder are in DIR, which is new or empty
                   [outputs/demo-TIME]; Ctrl-C ends the run too
  --port PORT      [a free one]
  --panel NAME ..  panels of plugins, besides those that the run's
                   configuration names
  --help           this text

Ctrl-C ends it. `slime show` prints a run in the terminal.
"""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError`."""
    if {"-h", "--help"} & set(argv):
        write(_HELP)
        return 0
    parser = Arguments("slime view")
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path)
    parser.add_argument("--demo", metavar="DIR", nargs="?", const="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--panel", nargs="+", default=[])
    stated = parser.read(argv)
    if not 0 <= stated.port < 2**16:
        raise ConfigError(f"--port {stated.port} is no port; expected 1 to 65535, or none for a free one")
    demo, runs = None, list(stated.runs)
    if runs and stated.demo is not None:
        raise ConfigError("slime view: expected run folders, or --demo, which makes a run of its own; got both")
    if not runs and stated.demo is None:
        if not OUTPUTS.is_dir():
            raise ConfigError(
                f"slime view without a run lists those in {OUTPUTS}/, which is not here: name a run folder or a folder"
                " of runs, or see a small run with --demo"
            )
        runs = [OUTPUTS]
    if stated.demo is not None:
        from slime_viewer.demo import Demo

        demo = Demo(Path(stated.demo) if stated.demo else None)
    return asyncio.run(_serve(runs, stated.port, stated.panel, demo))


def _panel_builder() -> BuildPanel:
    """Builds panels of the installed plugins, which are loaded for the first one."""
    loaded: list[PluginSet] = []

    def build(name: str, options: Mapping[str, Any], run_dir: Path) -> Panel:
        from slime.plugin import Context
        from slime.registry.plugin_set import survey_plugins

        if not loaded:
            loaded.append(survey_plugins())
        panel: Panel = loaded[0].build("panel", name, options, Context(0, run_dir, logging.getLogger("slime_viewer")))
        return panel

    return build


async def _serve(folders: Sequence[Path], port: int, panels: Sequence[str], demo: Demo | None) -> int:
    """Serve until a signal; the exit code. Raises `ConfigError`, and `SlimeError` if the demo does not begin."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        ended.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            # A second one ends it at once, whatever is still being read.
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        if demo is not None:
            print(f"a small run is made in {demo.folder}; the page opens in a moment", flush=True)
            await demo.start()
            await _first(demo.made(), ended)
            folders = [demo.run]
        return 0 if ended.is_set() else await _show(folders, port, panels, demo, ended)
    finally:
        if demo is not None:
            await demo.end()


async def _show(
    folders: Sequence[Path], port: int, panels: Sequence[str], demo: Demo | None, ended: asyncio.Event
) -> int:
    # It imports aiohttp, which takes longer than printing the help.
    from slime_viewer.server import ViewServer

    server, code = ViewServer(folders, build=_panel_builder(), panels=panels), 0
    await server.start(port)
    try:
        for watched in server.runs:
            print(f"{watched.folder.path}  index of the samples: {watched.reader.path}")
        for root in server.list.roots:
            print(f"{root}  {len(server.list.paths())} runs")
        print(f"open {server.address}", flush=True)
        if demo is not None:
            try:
                if told := await _first(demo.finished(), ended):
                    print(told, flush=True)
            except SlimeError as error:  # what there is of the run can be looked at
                print(f"slime: error: {error}", file=sys.stderr, flush=True)
                code = error.exit_code
        await ended.wait()
    finally:
        await server.stop()
    return code


async def _first(awaited: Coroutine[Any, Any, _T], ended: asyncio.Event) -> _T | None:
    """The result of a coroutine; None if the end comes first."""
    tasks = asyncio.create_task(awaited), asyncio.create_task(ended.wait())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks[1].cancel()
    if tasks[0].done():
        return tasks[0].result()
    tasks[0].cancel()
    return None
