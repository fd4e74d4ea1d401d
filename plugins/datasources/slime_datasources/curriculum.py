"""Prompts of increasing difficulty, as the policy learns to solve them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from slime.errors import CheckpointError, DataError
from slime.plugin import Context, Group, NoOptions, Sample
from slime_datasources.options import CurriculumOptions
from slime_datasources.prompts import Prompts

_FORMAT = 1


class Curriculum:
    """The prompts of the data source `prompts`, nearest to the current level of difficulty first.

    - A pool is kept filled with `pool` prompts from the prompt files. `take` returns those whose difficulty is nearest
      to the level; if two are equally near, the one that was read first. The others stay in the pool.
    - The difficulty of a prompt is the number at `difficulty_key` in its metadata, or its length in tokens.
    - The level starts at `start`, by default the lowest difficulty in the first pool. The pass rate is the share of
      `window` scored samples whose reward is at least `passed`. If it is above `raise_above`, the level goes up by
      `step`; if it is below `lower_below`, it goes down. It stays within the difficulties seen so far.

    Level, pass rate and pool are part of the state. Raises the errors of `prompts`, and `DataError` for a row without
    difficulty.
    """

    def __init__(self, options: CurriculumOptions, context: Context) -> None:
        self._options = options
        self._prompts = Prompts(NoOptions(), context)
        self._pool: list[Group] = []
        self._level = options.start
        #: lowest and highest difficulty seen so far
        self._range: tuple[float, float] | None = None
        self._seen = self._passed = 0
        self._rate: float | None = None

    def take(self, n: int) -> list[Group]:
        """The `n` prompts of the pool that are nearest to the level, nearest first."""
        fresh = self._prompts.take(max(0, self._options.pool + n - len(self._pool)))
        for difficulty in map(self._difficulty, fresh):
            low, high = self._range or (difficulty, difficulty)
            self._range = min(low, difficulty), max(high, difficulty)
        self._pool += fresh
        if self._level is None:
            self._level = self._range[0] if self._range else 0.0
        level = self._level
        chosen = heapq.nsmallest(n, self._pool, key=lambda group: (abs(self._difficulty(group) - level), group.index))
        taken = {group.index for group in chosen}
        self._pool = [group for group in self._pool if group.index not in taken]
        return chosen

    def generated(self, groups: Sequence[Group]) -> None:
        """Count the samples that passed, and move the level at the end of a window."""
        options = self._options
        for sample in (sample for group in groups for sample in group.samples):
            if not sample.trainable or (reward := sample.reward_value) is None:
                continue
            self._seen += 1
            self._passed += reward >= options.passed
        if self._seen < options.window or self._level is None or self._range is None:
            return
        self._rate = self._passed / self._seen
        self._seen = self._passed = 0
        if self._rate > options.raise_above:
            self._level += options.step
        elif self._rate < options.lower_below:
            self._level -= options.step
        low, high = self._range
        self._level = min(max(self._level, low), high)

    def metrics(self) -> dict[str, float]:
        """`curriculum/...`: the level and the pass rate of the last complete window. Also the metrics of `prompts`."""
        metrics = self._prompts.metrics()
        if self._level is not None:
            metrics["curriculum/level"] = self._level
        if self._rate is not None:
            metrics["curriculum/pass_rate"] = self._rate
        return metrics

    def close(self) -> None:
        """End the data workers and close the files."""
        self._prompts.close()

    def state_dict(self) -> dict[str, Any]:
        """The level, the current window, the pool, and the state of `prompts`."""
        return {
            "format": _FORMAT,
            "prompts": self._prompts.state_dict(),
            "pool": [[sample.to_dict() for sample in group.samples] for group in self._pool],
            "level": self._level,
            "range": self._range,
            "seen": self._seen,
            "passed": self._passed,
            "rate": self._rate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        if state.get("format") != _FORMAT:
            raise CheckpointError(f"the curriculum's state has format {state.get('format')!r}, expected {_FORMAT}")
        self._prompts.load_state_dict(state["prompts"])
        pool = [[Sample.from_dict(row) for row in rows] for rows in state["pool"]]
        self._pool = [Group(int(samples[0].group_index or 0), samples) for samples in pool]
        self._level, self._rate = state["level"], state["rate"]
        self._range = None if state["range"] is None else (state["range"][0], state["range"][1])
        self._seen, self._passed = state["seen"], state["passed"]

    def _difficulty(self, group: Group) -> float:
        sample, key = group.samples[0], self._options.difficulty_key
        if key is None:
            return float(len(sample.tokens))
        value = sample.metadata.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(
                f"prompt {group.index} ({str(sample.prompt)[:60]!r}) has {key} = {value!r} in its metadata; the data"
                " source curriculum expects a number (--data-source.difficulty-key)"
            )
        return float(value)
