"""Curves for the terminal, drawn so that noise looks like noise, and their change in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from slime_viewer.alerts import WINDOW
from slime_viewer.words import MetricWords

_BARS = "▁▂▃▄▅▆▇█"
#: with fewer values, three at the beginning and at the end, noise is not told from a trend
_ENOUGH = 9
#: of normal noise of deviation 1, the deviation of second differences, and the median of their absolute values
_SECOND_DIFFERENCE, _MEDIAN = math.sqrt(1 + 4 + 1), 0.6745 * math.sqrt(1 + 4 + 1)
#: the height of a curve is at least so many deviations of what it shows: pure noise then takes a third of it
_HEIGHT = 12.0
#: and at least this share of the values themselves; of shares of 1, this much
_OF_VALUE, _OF_SHARE = 0.05, 0.2
#: and, of values that touch zero, where a share of them says nothing, at least this: less is rounding. The learning
#: rate, which falls from about 1e-6 to zero, is more
_OF_ZERO = 1e-8
#: a change is clear if it is beyond so many deviations
_CLEAR = 3.0


@dataclass(frozen=True)
class Change:
    """The means of the first and the last steps of a metric, and whether they differ by more than noise."""

    first: float
    last: float
    #: None: there are too few values to know
    clear: bool | None
    constant: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> Change:
        """The change of one value or more."""
        window = max(1, min(WINDOW, len(values) // 3))
        first, last = fmean(values[:window]), fmean(values[-window:])
        constant = min(values) == max(values)
        if constant or len(values) < _ENOUGH:
            return cls(first, last, False if constant else None, constant)
        # Noise as the two windows have it counts too: of a metric that is mostly constant the rest has none, and one
        # step that stands out of a window is no change of the run.
        ends = [*_bends(values[:window]), *_bends(values[-window:])]
        spread = max(noise(values), math.sqrt(fmean(bend * bend for bend in ends)) / _SECOND_DIFFERENCE)
        return cls(first, last, abs(last - first) > _CLEAR * spread * math.sqrt(2 / window), constant)

    def text(self, words: MetricWords) -> str:
        """`0.16 -> 0.66`, `about 0.5`, `0 throughout`, in the unit of the metric."""
        first, last = number(self.first * words.factor), number(self.last * words.factor)
        unit = f" {words.unit}" if words.unit else ""
        if self.constant:
            return f"{last}{unit} throughout"
        return f"about {last}{unit}" if self.clear is False or first == last else f"{first} -> {last}{unit}"


def noise(values: Sequence[float]) -> float:
    """The standard deviation of values about their trend; 0 of values that are too few to know.

    It follows from second differences, which a straight trend does not have, and from their median, which one jump does
    not change.
    """
    if len(values) < _ENOUGH:
        return 0.0
    return median(map(abs, _bends(values))) / _MEDIAN


def _bends(values: Sequence[float]) -> list[float]:
    """Second differences: 0 where values lie on a line."""
    return [values[n] - 2 * values[n + 1] + values[n + 2] for n in range(len(values) - 2)]


def sparkline(values: Sequence[float], width: int, *, share: bool = False) -> str:
    """A curve of `width` characters or fewer; each shows the mean of its share of the values.

    Its height is not merely the span of the values, with which any noise would fill it: noise stays within a third.
    `share`: the values are shares of 1, whose height is a fifth or more.
    """
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(column * len(values) / width) for column in range(width + 1)]
    means = [math.fsum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    of_noise = _HEIGHT * noise(values) / math.sqrt(len(values) / width)
    height = max(high - low, of_noise, _OF_VALUE * max(abs(low), abs(high)), _OF_SHARE if share else 0.0)
    if low <= 0 <= high:
        height = max(height, _OF_ZERO)
    base = (low + high - height) / 2
    if low >= 0:
        base = max(0.0, base)
    if share and high <= 1:
        base = min(base, 1 - height)
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, max(0, round((mean - base) / height * top))) if height else 0] for mean in means)


def number(value: float | None) -> str:
    """Three digits; a dot for none."""
    return "·" if value is None else f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
