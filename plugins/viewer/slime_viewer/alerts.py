"""What went wrong in a run, in words, each with the way to the evidence: a metric, or a filter for its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from slime.observe.metrics import eval_set_names
from slime_viewer.run_files import Metrics

#: steps at the beginning and at the end of a run that are compared; shorter runs compare their thirds
WINDOW = 10
#: with fewer steps nothing is said about trends
MIN_STEPS = 6
#: from which share on something is told: of groups that teach nothing, of responses that were cut off
EQUAL_GROUPS, TRUNCATED = 0.8, 0.3
#: the gap between the engines' and the trainer's log-probs is told above this, if it has grown so many times
GAP, GAP_GROWTH = 0.01, 3.0
#: entropy has collapsed if it is below this many nats, and below this share of the highest value in the first window
#: (not of its mean, which a collapse within a few steps has already lowered)
ENTROPY_SHARE, ENTROPY = 0.2, 0.1
#: the least gain in reward of a run that is not stalled, in standard deviations of a step's samples
GAIN = 0.1
#: a reward has stalled that gains less in its second half than this share of what is missing to the best reward of a
#: sample, if that is more than this share of it
STALL_GAIN, STALL_ROOM = 0.1, 0.3
#: answers with their label and without the highest reward: how many are told, and from which share on of those below it
LABELLED, LABELLED_SHARE = 20, 0.05
#: reward is told to have fallen by this share of its best, and an evaluation if its intervals lie apart
FALL = 0.25


@dataclass(frozen=True)
class Alert:
    """One thing that a person should look at."""

    text: str
    #: what to look at or to do next
    advice: str
    #: the metric that shows it
    metric: str
    #: the filter that finds its samples
    filter: str = ""
    #: the step from which on it is so
    step: int | None = None
    #: comes before everything else
    urgent: bool = False


@dataclass(frozen=True)
class _Trend:
    """The beginning and the end of a metric."""

    steps: list[int]
    values: list[float]

    @property
    def window(self) -> int:
        return min(WINDOW, len(self.values) // 3)

    @property
    def first(self) -> float:
        return fmean(self.values[: self.window])

    @property
    def last(self) -> float:
        return fmean(self.values[-self.window :])

    @property
    def since(self) -> int:
        """The first step of the window at the end."""
        return self.steps[-self.window]

    @property
    def best(self) -> float:
        """The highest mean of a window."""
        starts = range(len(self.values) - self.window + 1)
        return max(fmean(self.values[start : start + self.window]) for start in starts)

    def crossed(self, is_past: Callable[[float], bool]) -> int:
        """The step from which on, to the end, the values are past a bound."""
        start = len(self.steps)
        while start and is_past(self.values[start - 1]):
            start -= 1
        return self.steps[min(start, len(self.steps) - self.window)]


@dataclass(frozen=True)
class Counts:
    """What samples show that metrics do not: counted over the index, of those that were trained on."""

    #: without the highest reward of the run, although the answer has the label in it
    labelled: int = 0
    #: without the highest reward of the run, and with a label
    wrong: int = 0
    #: the highest and the lowest reward of a sample
    best: float | None = None
    lowest: float | None = None


def alerts(metrics: Metrics, counts: Counts | None = None) -> list[Alert]:
    """What is worth a look in a run, the most urgent first. Without `counts`, only what metrics show."""
    found = [alert for check in CHECKS for alert in check.find(metrics)]
    if counts is not None:
        found = [*_stalled(metrics, counts, found), *_label_unpaid(counts), *found]
    return sorted(found, key=lambda alert: not alert.urgent)


def _label_unpaid(counts: Counts) -> Iterator[Alert]:
    if counts.labelled >= LABELLED and counts.labelled >= LABELLED_SHARE * counts.wrong:
        yield Alert(
            f"{counts.labelled:,} answers contain their label and got less than the best reward, {counts.best:g}"
            f" ({counts.labelled / counts.wrong:.0%} of the answers that did)",
            "The reward may be wrong: read some of them with their labels.",
            "rollout/reward_mean",
            f"kind:train labelled=1 reward<{counts.best:g}",
        )


def _stalled(metrics: Metrics, counts: Counts, found: list[Alert]) -> Iterator[Alert]:
    """A reward that has risen and then stays below the best one."""
    name = "rollout/reward_mean"
    reward, spread = _trend(metrics, name), _trend(metrics, "rollout/reward_std")
    told = any(alert.metric == name for alert in found)
    if told or reward is None or spread is None or counts.best is None or len(reward.values) < 3 * MIN_STEPS:
        return
    half = len(reward.values) // 2
    before, after = fmean(reward.values[half : -reward.window]), reward.last
    room = counts.best - after
    if room > STALL_ROOM * abs(counts.best) and after - before < STALL_GAIN * room:
        yield Alert(
            f"reward stays at {after:.3g}, where the best answers have {counts.best:g}: {before:.3g} from step"
            f" {reward.steps[half]} on, {after:.3g} in the last {reward.window} steps",
            "Look at what the answers with a low reward have in common.",
            name,
            f"kind:train reward<{counts.best:g} step>={reward.since}",
            reward.steps[half],
        )


def _trend(metrics: Metrics, name: str) -> _Trend | None:
    steps, values = metrics.series(name)
    return _Trend(steps, values) if len(values) >= MIN_STEPS else None


def _not_finite(metrics: Metrics) -> Iterator[Alert]:
    seen: dict[str, list[int]] = {}
    for step in metrics.steps:
        for name, value in metrics.rows[step].items():
            if value is None:
                seen.setdefault(name, []).append(step)
    if seen:
        name, steps = min(seen.items(), key=lambda one: one[1][0])
        others = f" and {len(seen) - 1} more" if len(seen) > 1 else ""
        yield Alert(
            f"{name}{others} had no finite value, first in step {steps[0]}",
            "Look at the gradient norm and the rewards of the steps before it.",
            name,
            f"kind:train step:{max(0, steps[0] - 2)}..{steps[0]}",
            steps[0],
            urgent=True,
        )


def _reward(metrics: Metrics) -> Iterator[Alert]:
    name = "rollout/reward_mean"
    reward, spread = _trend(metrics, name), _trend(metrics, "rollout/reward_std")
    if reward is None:
        return
    constant = max(reward.values) == min(reward.values)
    if constant and (spread is None or max(spread.values) == 0):
        all_of = "every sample of every step has" if spread else "the samples of every step have, in the mean,"
        yield Alert(
            f"{all_of} the reward {reward.values[0]:g} ({len(reward.values)} steps)",
            "Either all answers are equally good, or the reward does not tell: read some with their labels, and try it"
            " on a right and on a wrong answer (slime score).",
            name,
            "kind:train",
            reward.steps[0],
        )
    elif reward.best > 0 and reward.last < (1 - FALL) * reward.best:
        yield Alert(
            f"reward fell to {reward.last:.3g} in the last {reward.window} steps, from {reward.best:.3g} at its best",
            "Compare the answers to one prompt at its best and now.",
            name,
            f"kind:train step>={reward.since}",
            reward.since,
        )
    elif spread is not None and reward.last - reward.first < GAIN * fmean(spread.values):
        yield Alert(
            f"reward has not risen: {reward.first:.3g} in the first {reward.window} steps,"
            f" {reward.last:.3g} in the last",
            "Look at the answers with the lowest reward, and at the learning rate.",
            name,
            f"kind:train step>={reward.since}",
            reward.since,
        )


def _loss(metrics: Metrics) -> Iterator[Alert]:
    """Of a run without rewards, which learns from examples."""
    name = "train/loss"
    loss = _trend(metrics, name)
    if "rollout/reward_mean" in metrics.names or loss is None or loss.last < loss.first:
        return
    yield Alert(
        f"loss has not fallen: {loss.first:.3g} in the first {loss.window} steps, {loss.last:.3g} in the last",
        "Look at the learning rate, at the gradient norm, and at which tokens are trained on.",
        name,
        f"kind:train step>={loss.since}",
        loss.since,
    )


def _equal_groups(metrics: Metrics) -> Iterator[Alert]:
    name = "rollout/zero_std_ratio"
    trend, reward = _trend(metrics, name), _trend(metrics, "rollout/reward_mean")
    if trend is not None and reward is not None and trend.last >= EQUAL_GROUPS:
        since = trend.crossed(lambda value: value >= EQUAL_GROUPS)
        yield Alert(
            f"{trend.last:.0%} of the groups have one reward for all their samples (last {trend.window} steps, mean"
            f" reward {reward.last:.3g}): there is nothing to learn from comparing them",
            "Prompts that are too hard or too easy: choose others, filter such groups, or repair the reward.",
            name,
            f"kind:train step>={since}",
            since,
        )


def _truncation(metrics: Metrics) -> Iterator[Alert]:
    name = "rollout/truncated_ratio"
    trend = _trend(metrics, name)
    if trend is not None and trend.last >= TRUNCATED:
        since = trend.crossed(lambda value: value >= TRUNCATED)
        yield Alert(
            f"{trend.last:.0%} of the responses were cut off at the length limit (last {trend.window} steps)",
            "What is cut off is mostly scored as wrong: allow longer responses (--rollout-max-response-len), or see"
            " whether the model repeats itself.",
            name,
            f"kind:train status:truncated step>={since}",
            since,
        )


def _entropy(metrics: Metrics) -> Iterator[Alert]:
    name = "train/entropy"
    trend = _trend(metrics, name)
    if trend is None:
        return
    first = max(trend.values[: trend.window])
    if trend.last < ENTROPY and trend.last < ENTROPY_SHARE * first:
        since = trend.crossed(lambda value: value < ENTROPY_SHARE * first)
        yield Alert(
            f"entropy collapsed: {trend.last:.3g} nats per token in the last {trend.window} steps,"
            f" {first:.3g} at the beginning",
            "The answers to a prompt are nearly equal, so that nothing is explored: compare siblings. A lower learning"
            " rate, a KL or entropy term, or a higher temperature help.",
            name,
            f"kind:train step>={since}",
            since,
        )


def _gap(metrics: Metrics) -> Iterator[Alert]:
    name = "train/logprob_gap_mean"
    trend = _trend(metrics, name)
    if trend is not None and trend.last > GAP and trend.last > GAP_GROWTH * trend.first:
        since = trend.crossed(lambda value: value > GAP)
        yield Alert(
            f"the gap between the engines' and the trainer's log-probs grew to {trend.last:.3g} per token, from"
            f" {trend.first:.3g}",
            "Training is off policy by that much: look at staleness, the weight sync and the precision of the engines.",
            name,
            f"kind:train step>={since}",
            since,
        )


def _evaluation(metrics: Metrics) -> Iterator[Alert]:
    for held_out in eval_set_names(metrics.names):
        name = f"eval/{held_out}"
        steps, values = metrics.series(name)
        lows, highs = (dict(zip(*metrics.series(f"{name}/{end}"), strict=True)) for end in ("low", "high"))
        if len(values) < 2 or steps[-1] not in highs:
            continue
        best = max(range(len(values)), key=values.__getitem__)
        if steps[best] in lows and highs[steps[-1]] < lows[steps[best]]:
            yield Alert(
                f"the evaluation {held_out} fell to {values[-1]:.3g}, from {values[best]:.3g} after"
                f" {steps[best]} rollouts; their 95 % intervals lie apart",
                "The checkpoint of that time is better.",
                name,
                f"kind:eval set:{held_out} step={steps[-1]}",
                steps[-1],
            )


def _lost(metrics: Metrics) -> Iterator[Alert]:
    for status in ("failed", "aborted"):
        name = f"rollout/{status}"
        steps, values = metrics.series(name)
        lost = [step for step, value in zip(steps, values, strict=True) if value]
        if lost:
            yield Alert(
                f"{sum(values):.0f} samples {'failed' if status == 'failed' else 'were aborted'} in {len(lost)} of"
                f" {len(steps)} steps, first in step {lost[0]}",
                "Each says why.",
                name,
                f"kind:train,dropped status:{status}",
                lost[0],
            )


def _restarts(metrics: Metrics) -> Iterator[Alert]:
    names = ("restarts/run", "restarts/engine", "restarts/router")
    for name in names:
        restarted = {step: times for step, times in zip(*metrics.series(name), strict=True) if times}
        if restarted:
            what = {"run": "the run", "engine": "an engine", "router": "the router"}[name.partition("/")[2]]
            first = min(restarted)
            told = f"{what} was restarted {_times(sum(restarted.values()))}, first before the end of step {first}"
            yield Alert(told, "The logs say why.", name, step=first)


def _times(number: float) -> str:
    return "once" if number == 1 else f"{number:.0f} times"


@dataclass(frozen=True)
class Check:
    """One look at the metrics of a run."""

    name: str
    #: how the names of the metrics begin that it looks at
    metrics: tuple[str, ...]
    find: Callable[[Metrics], Iterator[Alert]]


#: the checks, in the order in which their findings are shown
CHECKS = (
    Check("finite numbers", ("",), _not_finite),
    Check("reward", ("rollout/reward_mean",), _reward),
    Check("loss", ("train/loss",), _loss),
    Check("groups of equal reward", ("rollout/zero_std_ratio",), _equal_groups),
    Check("cut-off answers", ("rollout/truncated_ratio",), _truncation),
    Check("entropy", ("train/entropy",), _entropy),
    Check("log-prob gap", ("train/logprob_gap_mean",), _gap),
    Check("evaluations", ("eval/",), _evaluation),
    Check("failed samples", ("rollout/failed", "rollout/aborted"), _lost),
    Check("restarts", ("time/step", "restarts/"), _restarts),
)
