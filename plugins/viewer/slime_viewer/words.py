"""What metrics are called where people read, their units, and in which size they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_GIB, _MIB = 2.0**-30, 2.0**-20


@dataclass(frozen=True)
class MetricWords:
    """A metric for people: its value times `factor` is in `unit`."""

    title: str
    unit: str = ""
    factor: float = 1.0


_KNOWN = {
    "rollout/reward_mean": MetricWords("reward"),
    "rollout/reward_std": MetricWords("spread of rewards"),
    "rollout/zero_std_ratio": MetricWords("groups of equal reward", "%", 100.0),
    "rollout/truncated_ratio": MetricWords("answers cut off", "%", 100.0),
    "rollout/response_length_mean": MetricWords("answer length", "tokens"),
    "rollout/response_length_max": MetricWords("longest answer", "tokens"),
    "rollout/response_length_min": MetricWords("shortest answer", "tokens"),
    "rollout/samples": MetricWords("samples a step"),
    "rollout/tokens": MetricWords("tokens a step"),
    "rollout/tokens_per_s": MetricWords("generated", "tokens/s"),
    "rollout/failed": MetricWords("failed samples"),
    "rollout/aborted": MetricWords("aborted samples"),
    "train/loss": MetricWords("loss"),
    "train/kl": MetricWords("KL to the reference", "nats/token"),
    "train/entropy": MetricWords("entropy", "nats/token"),
    "train/logprob_gap_mean": MetricWords("log-prob gap, engine to trainer", "nats/token"),
    "train/logprob_gap_max": MetricWords("largest log-prob gap", "nats"),
    "train/staleness_mean": MetricWords("staleness", "rollouts"),
    "train/staleness_max": MetricWords("largest staleness", "rollouts"),
    "train/grad_norm": MetricWords("gradient norm"),
    "train/lr": MetricWords("learning rate"),
    "train/clip_fraction": MetricWords("clipped tokens", "%", 100.0),
    "train/clip_fraction_low": MetricWords("clipped from below", "%", 100.0),
    "train/clip_fraction_high": MetricWords("clipped from above", "%", 100.0),
    "train/advantage_zero_fraction": MetricWords("tokens without advantage", "%", 100.0),
    "train/engine_ess": MetricWords("effective sample size", "%", 100.0),
    "time/step": MetricWords("time of a step", "s"),
    "time/kernel_overhead": MetricWords("kernel overhead", "s"),
    "ledger/in_flight": MetricWords("prompts in flight"),
    "ledger/buffered": MetricWords("prompts buffered"),
    "ledger/dropped": MetricWords("prompts dropped"),
    "ledger/regenerated": MetricWords("prompts generated again"),
    "synced_bytes": MetricWords("weights sent a sync", "MiB", _MIB),
}
#: beginnings and ends of names whose unit they say
_UNITS = (
    ("memory/", "", "GiB", _GIB),
    ("", "_bytes", "MiB", _MIB),
    ("", "_tokens_per_s", "tokens/s", 1.0),
    ("", "tflops", "TFLOP/s", 1.0),
    ("", "_ratio", "%", 100.0),
    ("", "_fraction", "%", 100.0),
    ("time/", "", "s", 1.0),
    ("", "seconds_mean", "s", 1.0),
)


def words(name: str) -> MetricWords:
    """What a metric is called."""
    if name in _KNOWN:
        return _KNOWN[name]
    unit, factor = next(
        ((unit, factor) for start, end, unit, factor in _UNITS if name.startswith(start) and name.endswith(end)),
        ("", 1.0),
    )
    if name.startswith("eval/"):
        held_out, _, rest = name.removeprefix("eval/").partition("/")
        return MetricWords(f"{held_out}: {_plain(rest)}" if rest else held_out, unit, factor)
    # Of a metric of the loop itself the group says little; of those of plugins it says whose they are.
    _, _, rest = name.partition("/")
    return MetricWords(_plain(rest or name), unit, factor)


def all_words(names: Iterable[str]) -> dict[str, tuple[str, str, float]]:
    """Name -> title, unit, factor."""
    return {name: ((found := words(name)).title, found.unit, found.factor) for name in names}


def _plain(name: str) -> str:
    return name.replace("_", " ").replace("/", ", ")
