"""Restarts of a whole run (`--use-fault-tolerance`): which errors another attempt can cure, and how many there may be.

Before a restart every process of the run has ended, Ray included. The next attempt continues from the newest intact
checkpoint of the run, or from its beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path

from slime.config import RunConfig
from slime.errors import SlimeError
from slime.observe.observer import RunObserver
from slime.run.checkpoint.read import Checkpoint, checkpoints_in, newest_intact
from slime.run.supervise.losses import is_curable

logger = logging.getLogger(__name__)


def newest_of_run(newest: Path) -> Checkpoint | None:
    """The checkpoint `newest`, or the one before it, whose files are all as they were saved. Others are logged.

    Those after it are not looked at: they are of a run that was continued from an earlier one on purpose.
    """
    from_it_on = dropwhile(lambda one: one.name != newest.name, checkpoints_in(newest.parent))
    return newest_intact(from_it_on, lambda error: logger.warning("%s", error))


def run_with_restarts(
    attempt: Callable[[RunConfig], None], config: RunConfig, observer: RunObserver, *, unless: Callable[[], bool]
) -> None:
    """Call `attempt` until it succeeds, raises an error that another attempt would not cure, or the budget is spent.

    Args:
        attempt: Runs a configuration to its end; when it raises, no process of the run is left.
        config: The run. Later attempts load its newest checkpoint.
        observer: Told of each restart. Its counts use up the budget: restarts of single parts are among them.
        unless: Whether the user has asked the run to end.

    Raises:
        SlimeError: What the last attempt raised; a note lists the restarts before it.
    """
    budget = config.cluster.max_restarts if config.restarts_run else 0
    causes: list[str] = []
    trying = config
    while True:
        try:
            return attempt(trying)
        except SlimeError as error:
            causes.append(str(error).partition("\n")[0])
            if unless() or observer.restarts.total() >= budget or not is_curable(error, first=len(causes) == 1):
                _note_restarts(error, causes[:-1])
                raise
        checkpoint = None if observer.saved is None else newest_of_run(observer.saved[1])
        if checkpoint is None:
            trying = config
            observer.restarting(causes[-1], None)
        else:
            trying = config.with_options("checkpoint", load=str(checkpoint.path))
            observer.restarting(causes[-1], (checkpoint.rollouts_done, checkpoint.path))


def _note_restarts(error: SlimeError, causes: list[str]) -> None:
    if causes:
        listed = "\n".join(f"  {number}. after: {cause}" for number, cause in enumerate(causes, start=1))
        error.add_note(f"restarts before this (--max-restarts): {len(causes)}\n{listed}")
