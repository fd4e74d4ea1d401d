"""The viewer: shows run folders to people, in the browser, in the terminal, and as `report.html` in each run folder.

It reads files alone, and imports nothing that runs. While a run goes on, it tells if nothing is learned from its
rewards.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slime.plugin as sp
from slime.errors import SlimeError, disk_problem
from slime_viewer.watch import RewardWatch

slime_api = 1
logger = logging.getLogger("slime.viewer")


#: run folder -> what is counted of it; a process drives one run, perhaps in several attempts
_watched: dict[Path, RewardWatch] = {}


@sp.hookimpl
def slime_run_started(run_dir: Path, config: Any) -> None:
    if not config.run.quiet:
        print(f"in the browser: {_page_of(run_dir)}", flush=True)
    _watched.clear()
    _watched[run_dir] = RewardWatch(run_dir)


@sp.hookimpl
def slime_step_finished(step: int, metrics: Mapping[str, float]) -> None:
    for watch in _watched.values():
        if told := watch.step(step, metrics):
            logger.warning("%s", told)


@sp.hookimpl
def slime_run_closed(run_dir: Path, outcome: str, build_panel: sp.BuildPanel) -> dict[str, str]:
    # Here, so that a Python without SQLite loses the page only.
    from slime_viewer.report import REPORT, write_report_page

    try:
        write_report_page(run_dir, outcome, build_panel)
    except (SlimeError, OSError) as error:
        reason = disk_problem(error, run_dir / REPORT) if isinstance(error, OSError) else error
        logger.warning("%s cannot be written; the run continues: %s", REPORT, reason)
        return {}
    return {REPORT: f"for the browser: curves, best and worst answers; everything: {_page_of(run_dir)}"}


def _page_of(run_dir: Path) -> str:
    """The command that shows the page of a run."""
    return f"slime view {shlex.quote(str(run_dir))}"
