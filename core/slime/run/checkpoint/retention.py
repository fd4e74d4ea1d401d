"""Which checkpoints of a run are kept: `--save-keep-last`, `--save-keep-every` and `--save-keep-best`."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from slime.config.weight_options import CheckpointOptions
from slime.errors import did_you_mean
from slime.observe.metrics import read_metrics

logger = logging.getLogger(__name__)


def superfluous(
    saved: Iterable[int],
    newest: int,
    *,
    last: int,
    every: int | None = None,
    scores: Mapping[int, float] | None = None,
    unscored: Collection[int] = (),
) -> list[int]:
    """The checkpoints to delete, each named by its number of rollouts done.

    Args:
        saved: The complete checkpoints of the run. Those after `newest` neither count nor are deleted.
        newest: The one that was completed last; it is always kept.
        last: How many to keep, counted back from `newest`.
        every: Also keep the multiples of this number.
        scores: Of these also keep the one with the highest score, and of equal ones the newest.
        unscored: Also keep these, because their score may still turn out to be the highest.

    Returns:
        Their numbers, ascending: a run that is killed on the way has deleted the oldest.
    """
    present = sorted({number for number in saved if number <= newest} | {newest})
    kept = {newest, *present[-last:], *unscored}
    if every is not None:
        kept.update(number for number in present if number % every == 0)
    if scored := [(scores[number], number) for number in present if scores and number in scores]:
        kept.add(max(scored)[1])
    return [number for number in present if number not in kept]


class Retention:
    """The rule of one run, and the numbers by which it knows the best checkpoint.

    The score of a checkpoint after N rollouts comes from the evaluation after N rollouts for `eval/...`, and from
    rollout N - 1, the last that it was trained on, for other metrics.
    """

    def __init__(
        self, options: CheckpointOptions, eval_interval: int | None = None, num_rollout: int | None = None
    ) -> None:
        """The rule that `options` state, in a run that is evaluated at multiples of `eval_interval` and at its end."""
        self._eval_interval, self._num_rollout = eval_interval, num_rollout
        self._last, self._every = options.save_keep_last, options.save_keep_every
        self._metric, self._lower = options.best_metric or ("", False)
        #: from the step of a row to its checkpoint: evaluations are numbered as checkpoints are, rollouts from 0
        self._shift = 0 if self._metric.startswith("eval/") else 1
        #: whether the metric is reported with each step
        self._by_step = bool(self._metric) and self._shift == 1
        self._scores: dict[int, float] = {}
        #: the checkpoint that the run continues, and those that it has written itself
        self._continued, self._own = -1, set[int]()
        #: the newest checkpoints for which the run that is continued, and this one, have reported the metric
        self._reported_before, self._reported = -1, -1
        self._warned = False

    @property
    def keeps_all(self) -> bool:
        """Whether no checkpoint is ever deleted."""
        return self._last is None

    def superfluous(self, saved: Collection[int], newest: int) -> list[int]:
        """Which of the checkpoints `saved` are to be deleted, now that this run has completed `newest`.

        What neither this run nor the one that it continues has saved was put there by somebody, and stays.
        """
        if self._last is None:
            return []
        self._own.add(newest)
        of_run = [number for number in saved if number <= self._continued or number in self._own]
        unscored = [number for number in of_run if self._metric and self._may_get_score(number)]
        return superfluous(of_run, newest, last=self._last, every=self._every, scores=self._scores, unscored=unscored)

    def _may_get_score(self, number: int) -> bool:
        """Whether the score is not known, and was not passed over: evaluations may finish after the checkpoint."""
        due = number in (self._num_rollout, self._continued)
        if self._shift == 0 and self._eval_interval and number % self._eval_interval and not due:
            return False
        if self._reported_before >= 0 and number < self._continued:
            return False  # the run that could score it has ended
        reported = self._reported if number > self._continued else self._reported_before
        return number not in self._scores and number > reported

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step, by the names of metrics.jsonl."""
        if self._by_step:
            self._report(step + 1, metrics)

    def evaluated(self, done: int, metrics: Mapping[str, float]) -> None:
        """The metrics of the evaluation after `done` rollouts."""
        if self._shift == 0:
            self._report(done, metrics)

    def resumed(self, done: int, run_dir: Path) -> None:
        """The run continues from the checkpoint after `done` rollouts; the folder has its metrics until now."""
        self._continued = done
        if not self._metric:
            return
        with suppress(OSError):  # if the disk refuses the file, older checkpoints are kept for lack of numbers
            for row in read_metrics(run_dir):
                if self._metric in row and (number := row["step"] + self._shift) <= done:
                    self._reported_before = max(self._reported_before, number)
                    self._score(number, row[self._metric])

    def _report(self, number: int, metrics: Mapping[str, float]) -> None:
        if self._metric in metrics:
            self._reported = max(self._reported, number)
            self._score(number, metrics[self._metric])
        elif self._reported < 0 and not self._warned:
            self._warned = True
            logger.warning(
                "--save-keep-best %s: there is no such metric after %d rollouts, so no checkpoint is deleted until"
                " there is one; metrics.jsonl has all names.%s",
                self._metric,
                number,
                did_you_mean(self._metric, metrics),
            )

    def _score(self, number: int, value: float | None) -> None:
        self._scores.pop(number, None)  # of an earlier attempt
        if value is not None and math.isfinite(value):
            self._scores[number] = -value if self._lower else value
