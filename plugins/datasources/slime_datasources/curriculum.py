"""Prompts of increasing difficulty, as the policy learns to solve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.errors import CheckpointError, DataError, did_you_mean
from slime.kit.readers.keys import ABSENT, find, paths
from slime.plugin import Context, Group, NoOptions, Sample
from slime_datasources.options import CurriculumOptions
from slime_datasources.prompts import Prompts

_FORMAT = 2
#: how often the pool may be exchanged for one batch
_EXCHANGES = 8


class Curriculum:
    """The prompts of the data source `prompts`, nearest to the current level of difficulty first.

    - A pool holds `pool` prompts of the files. `take` returns those whose difficulty is nearest to the level; if two
      are equally near, the one that was read first. The others stay in the pool.
    - A prompt is of the level if it is at most half a `step` away. While the pool has too few of these, the prompts
      that are farthest away are passed over, and others are read in their place: at most 8 times as many as the pool
      and the batch have together. Those passed over come again in the next epoch.
    - The difficulty of a prompt is the number at `difficulty_key` in its metadata, or its length in tokens. Lengths are
      so many that few prompts have that of the level, so by length only the pool is ordered, and no prompt is passed
      over.
    - The level starts at `start`, by default the lowest difficulty in the first pool. The pass rate is the share of
      `window` scored samples whose reward is at least `passed`. If it is above `raise_above`, the level goes up by
      `step`; if it is below `lower_below`, it goes down. It stays within the difficulties seen so far.

    Level, pass rate and pool are part of the state. Raises the errors of `prompts`, and `DataError` for a row without
    difficulty: at the start, or when a stream reaches it.
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
        #: mean difficulty of the prompts that were taken last
        self._difficulty: float | None = None
        #: prompts that were read and not taken, because others were nearer to the level
        self._passed_over = 0
        for row, where in self._prompts.checked_rows() if options.difficulty_key is not None else ():
            self._stated(row.metadata, where)

    def take(self, n: int) -> list[Group]:
        """The `n` prompts of the pool that are nearest to the level, nearest first."""
        options = self._options
        self._read(max(0, options.pool + n - len(self._pool)))
        if self._level is None:
            self._level = self._range[0] if self._range else 0.0
        self._pool.sort(key=self._distance)
        left = 0 if options.difficulty_key is None else _EXCHANGES * (options.pool + n)
        while n and options.pool and left > 0 and self._distance(self._pool[n - 1])[0] > options.step / 2:
            exchanged = min(max(n, options.pool // 4), options.pool)
            del self._pool[len(self._pool) - exchanged :]
            self._passed_over += exchanged
            self._read(exchanged)
            self._pool.sort(key=self._distance)
            left -= exchanged
        chosen, self._pool = self._pool[:n], self._pool[n:]
        if chosen:
            self._difficulty = sum(map(self._difficulty_of, chosen)) / len(chosen)
        return chosen

    def _read(self, n: int) -> None:
        """Read prompts into the pool."""
        fresh = self._prompts.take(n)
        for difficulty in map(self._difficulty_of, fresh):
            low, high = self._range or (difficulty, difficulty)
            self._range = min(low, difficulty), max(high, difficulty)
        self._pool += fresh

    def _distance(self, group: Group) -> tuple[float, int]:
        """How far a prompt is from the level; of equal prompts, the one that was read first is nearer."""
        assert self._level is not None
        return abs(self._difficulty_of(group) - self._level), group.index

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
        """`curriculum/...`, and the metrics of `prompts`.

        `level` applies to the next prompts, `difficulty` is the mean of those that were taken last, `pass_rate` is of
        the last complete window, and `passed_over` counts prompts over the whole run.
        """
        values = {"level": self._level, "difficulty": self._difficulty, "pass_rate": self._rate}
        stated = {f"curriculum/{name}": value for name, value in values.items() if value is not None}
        return self._prompts.metrics() | stated | {"curriculum/passed_over": float(self._passed_over)}

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
            "difficulty": self._difficulty,
            "passed_over": self._passed_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        if state.get("format") not in (1, _FORMAT):  # 1 has no values for metrics
            raise CheckpointError(f"the curriculum's state has format {state.get('format')!r}, expected {_FORMAT}")
        self._prompts.load_state_dict(state["prompts"])
        pool = [[Sample.from_dict(row) for row in rows] for rows in state["pool"]]
        self._pool = [Group(int(samples[0].group_index or 0), samples) for samples in pool]
        self._level, self._rate = state["level"], state["rate"]
        self._range = None if state["range"] is None else (state["range"][0], state["range"][1])
        self._seen, self._passed = state["seen"], state["passed"]
        self._difficulty, self._passed_over = state.get("difficulty"), state.get("passed_over", 0)

    def _difficulty_of(self, group: Group) -> float:
        sample = group.samples[0]
        if self._options.difficulty_key is None:
            return float(len(sample.tokens))
        return self._stated(sample.metadata, lambda: f"prompt {group.index} ({str(sample.prompt)[:60]!r})")

    def _stated(self, metadata: Mapping[str, Any], where: Callable[[], str]) -> float:
        """The difficulty that a row states; `where` locates it for an error."""
        key = str(self._options.difficulty_key)
        value = find(metadata, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            got = f"no {key!r}" if value is ABSENT else f"{key!r} = {value!r}"
            keys = ", ".join(map(repr, metadata)) or "none"
            raise DataError(
                f"{where()} has {got} in its metadata (--metadata-key), whose keys are {keys}; the data source"
                f" curriculum expects a number (--data-source.difficulty-key).{did_you_mean(key, paths(metadata))}"
            )
        return float(value)
