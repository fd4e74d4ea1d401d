"""`slime view`: looks at runs in the browser."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.cli.arguments import Arguments
from slime.errors import ConfigError

if TYPE_CHECKING:
    from slime.plugins.plugin_set import PluginSet
    from slime.view.plugin_panels import BuildPanel
    from slime.watching import Panel

_HELP = """\
usage: slime view RUN [RUN ...] [--port PORT] [--panel NAME ...]

Show run folders in the browser, while the runs go on or after them: curves,
what went wrong, samples by filter and text, groups, conversations, one prompt
through the run, two runs compared. The page is served on this machine alone
(127.0.0.1), to whoever has the address that is printed; nothing can be
changed with it. On a server, forward the port: ssh -L PORT:127.0.0.1:PORT HOST

  --port PORT      [a free one]
  --panel NAME ..  panels of plugins, besides those that the run's
                   configuration names
  --help           this text

Ctrl-C ends it. `slime show` prints a run in the terminal.
"""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError`."""
    if not argv or {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0 if argv else 2
    parser = Arguments("slime view")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--panel", nargs="+", default=[])
    stated = parser.read(argv)
    if not 0 <= stated.port < 2**16:
        raise ConfigError(f"--port {stated.port} is no port; expected 1 to 65535, or none for a free one")
    asyncio.run(_serve(stated.runs, stated.port, stated.panel))
    return 0


def _panel_builder() -> BuildPanel:
    """Builds panels of the installed plugins, which are loaded for the first one."""
    loaded: list[PluginSet] = []

    def build(name: str, options: Mapping[str, Any], run_dir: Path) -> Panel:
        from slime.plugin import Context
        from slime.plugins.plugin_set import survey_plugins

        if not loaded:
            loaded.append(survey_plugins())
        panel: Panel = loaded[0].build("panel", name, options, Context(0, run_dir, logging.getLogger("slime.view")))
        return panel

    return build


async def _serve(folders: Sequence[Path], port: int, panels: Sequence[str]) -> None:
    # It imports aiohttp, which takes longer than printing the help.
    from slime.view.server import ViewServer

    server = ViewServer(folders, build=_panel_builder(), panels=panels)
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        ended.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            # A second one ends it at once, whatever is still being read.
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    await server.start(port)
    try:
        for watched in server.runs:
            print(f"{watched.folder.path}  index of the samples: {watched.reader.path}")
        print(f"open {server.address}", flush=True)
        await ended.wait()
    finally:
        await server.stop()
