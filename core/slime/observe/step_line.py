"""One aligned, readable line for each step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

#: |engine - trainer| log-prob per token above which training is noticeably off-policy
LOGPROBGAP_WARNING = 0.05
#: between columns
GAP = "  "
#: the header is repeated after this many steps, so that it is never far away
HEADER_EVERY = 25
#: steps whose mean duration tells how long the rest takes
RECENT = 20


def number(value: float) -> str:
    """At most seven characters: up to four decimals, or scientific notation for very large and small numbers."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 100_000 or 0 < size < 0.001:
        return f"{value:.1e}"
    return f"{value:.{4 if size < 10 else 2 if size < 1000 else 0}f}"


def seconds(value: float) -> str:
    """Seconds with as many decimals as matter."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def duration(value: float) -> str:
    """`45s`, `12m`, `3h05` or `2d03h`: at most five characters for less than 100 days."""
    minutes = round(value / 60)
    if value < 100:
        return f"{value:.0f}s"
    if minutes < 100:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours < 48 else f"{hours // 24}d{hours % 24:02}h"


def percent(value: float) -> str:
    """A ratio as per cent."""
    return f"{100 * value:.1f}%"


def count(value: float) -> str:
    """A mean number of tokens, with one decimal below 1000."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


@dataclass(frozen=True)
class Column:
    """One number of the step line. A narrow terminal drops the columns of the highest rank first."""

    title: str
    metric: str
    #: for the legend; empty if the title says it all
    meaning: str = ""
    show: Callable[[float], str] = number
    width: int = 7
    rank: int = 0
    style: str = ""
    warn_above: float = math.inf

    def cell(self, metrics: Mapping[str, float]) -> Text:
        """The number, right-aligned; a dot if the step has none."""
        value = metrics.get(self.metric)
        if value is None:
            return Text("·".rjust(self.width), style="dim")
        wrong = not math.isfinite(value) or value > self.warn_above
        return Text(self.show(value).rjust(self.width), style="bold red" if wrong else self.style)


COLUMNS: tuple[Column, ...] = (
    Column("reward", "rollout/reward_mean", "mean of the samples", style="bold green"),
    Column("kl", "train/kl", "to the reference per token", rank=3),
    Column("entropy", "train/entropy", "nats per token", rank=4),
    Column(
        "lp gap",
        "train/logprob_gap_mean",
        "|engine - trainer| log-prob per token",
        rank=2,
        warn_above=LOGPROBGAP_WARNING,
    ),
    Column("loss", "train/loss", rank=9),
    Column("length", "rollout/response_length_mean", "mean response tokens", show=count, rank=5),
    Column("cut", "rollout/truncated_ratio", "responses at the length limit", show=percent, width=6, rank=8),
    Column("grad", "train/grad_norm", "gradient norm", rank=6),
    Column("gen s", "time/wait_rollout", "generate and score", show=seconds, width=6, rank=7, style="cyan"),
    Column("ready", "rollout/ready", "finished rollouts that the trainer found", show=count, width=5, rank=8),
    Column("stale", "train/staleness_mean", "rollouts since the weights of the samples", show=count, width=5, rank=5),
    Column(
        "idle s", "time/engines_idle", "engines waited for the trainer", show=seconds, width=6, rank=8, style="cyan"
    ),
    Column("train s", "time/train", show=seconds, rank=7, style="cyan"),
    Column("sync s", "time/sync_weights", show=seconds, width=6, rank=7, style="cyan"),
    Column("left", "time/left", "until the last step", show=duration, width=5, rank=3),
    Column("step s", "time/step", show=seconds, width=6, rank=1, style="bold cyan"),
    Column("kernel", "time/kernel_overhead", "neither engine nor trainer compute", show=percent, width=6, rank=8),
)


def fit(columns: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Indices of the columns to show in `room` characters; `columns` are (rank, width), the lowest rank goes first."""
    kept = []
    for index, (_, width) in sorted(enumerate(columns), key=lambda column: column[1][0]):
        room -= width + len(GAP)
        if room < 0:
            break
        kept.append(index)
    return sorted(kept)


class StepLine:
    """Formats the steps of one run."""

    def __init__(self, last_step: int | None) -> None:
        """`last_step`: shown behind the step, as in `3/59`."""
        self._last_step = last_step
        #: metrics of columns that some step had numbers for: not every step syncs weights
        self._seen: set[str] = set()
        #: their columns, and those of them that fit
        self._present: list[Column] = []
        self._shown: list[Column] = []
        self._step_width = max(len(self._step_text(last_step or 9999)), len("step"))
        self._steps = 0
        #: seconds of the latest steps
        self._recent: deque[float] = deque(maxlen=RECENT)

    def _step_text(self, step: int) -> str:
        return str(step) if self._last_step is None else f"{step:>{len(str(self._last_step))}}/{self._last_step}"

    def lines(self, step: int, metrics: Mapping[str, float], width: int) -> Iterator[Text]:
        """The line of one step, below a header if one is due; a legend precedes the first header."""
        metrics = {**metrics, **self._left(step, metrics)}
        self._seen |= metrics.keys()
        present = [column for column in COLUMNS if column.metric in self._seen]
        if "rollout/reward_mean" not in metrics:  # supervised: the loss is what one looks at
            present = [replace(c, rank=0, style="bold green") if c.metric == "train/loss" else c for c in present]
        if "rollout/ready" in metrics:  # asynchronous: what is left to wait for is not what generating took
            present = [
                replace(c, title="wait s", meaning="trainer waited for it") if c.metric == "time/wait_rollout" else c
                for c in present
            ]
        if present != self._present or self._steps % HEADER_EVERY == 0:
            self._present = present
            chosen = fit([(column.rank, column.width) for column in present], width - self._step_width)
            self._shown = [present[index] for index in chosen]
            if self._steps == 0:
                yield from self._legend(width)
            titles = [column.title.rjust(column.width) for column in self._shown]
            yield Text(GAP.join(["step".rjust(self._step_width), *titles]), style="bold dim")
        self._steps += 1
        line = Text.assemble((self._step_text(step).rjust(self._step_width), "bold"))
        for column in self._shown:
            line.append(GAP).append_text(column.cell(metrics))
        yield line

    def _left(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The seconds until the last step, if the latest steps tell."""
        if (took := metrics.get("time/step")) is None or self._last_step is None:
            return {}
        self._recent.append(took)
        return {"time/left": sum(self._recent) / len(self._recent) * max(0, self._last_step - step)}

    def _legend(self, width: int) -> list[Text]:
        """What the shown columns mean, wrapped at `width`."""
        lines: list[str] = []
        for column in self._shown:
            entry = f"{column.title}: {column.meaning}"
            if not column.meaning:
                continue
            if lines and len(lines[-1]) + len(entry) + 3 <= width:
                lines[-1] += f" · {entry}"
            else:
                lines.append(entry)
        return [Text(line, style="dim") for line in lines]
