"""What metrics are called where people read, their units, and in which size they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_GIB, _MIB = 2.0**-30, 2.0**-20


@dataclass(frozen=True)
class Words:
    """A metric for people: its value times `factor` is in `unit`."""

    title: str
    unit: str = ""
    factor: float = 1.0


_KNOWN = {
    "rollout/reward_mean": Words("reward"),
    "rollout/reward_std": Words("spread of rewards"),
    "rollout/zero_std_ratio": Words("groups of equal reward", "%", 100.0),
    "rollout/truncated_ratio": Words("answers cut off", "%", 100.0),
    "rollout/response_length_mean": Words("answer length", "tokens"),
    "rollout/response_length_max": Words("longest answer", "tokens"),
    "rollout/response_length_min": Words("shortest answer", "tokens"),
    "rollout/samples": Words("samples a step"),
    "rollout/tokens": Words("tokens a step"),
    "rollout/tokens_per_s": Words("generated", "tokens/s"),
    "rollout/failed": Words("failed samples"),
    "rollout/aborted": Words("aborted samples"),
    "train/loss": Words("loss"),
    "train/kl": Words("KL to the reference", "nats/token"),
    "train/entropy": Words("entropy", "nats/token"),
    "train/logprob_gap_mean": Words("log-prob gap, engine to trainer", "nats/token"),
    "train/logprob_gap_max": Words("largest log-prob gap", "nats"),
    "train/staleness_mean": Words("staleness", "rollouts"),
    "train/staleness_max": Words("largest staleness", "rollouts"),
    "train/grad_norm": Words("gradient norm"),
    "train/lr": Words("learning rate"),
    "train/clip_fraction": Words("clipped tokens", "%", 100.0),
    "train/clip_fraction_low": Words("clipped from below", "%", 100.0),
    "train/clip_fraction_high": Words("clipped from above", "%", 100.0),
    "train/advantage_zero_fraction": Words("tokens without advantage", "%", 100.0),
    "train/engine_ess": Words("effective sample size", "%", 100.0),
    "time/step": Words("time of a step", "s"),
    "time/kernel_overhead": Words("kernel overhead", "s"),
    "ledger/in_flight": Words("prompts in flight"),
    "ledger/buffered": Words("prompts buffered"),
    "ledger/dropped": Words("prompts dropped"),
    "ledger/regenerated": Words("prompts generated again"),
    "synced_bytes": Words("weights sent a sync", "MiB", _MIB),
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


def words(name: str) -> Words:
    """What a metric is called."""
    if name in _KNOWN:
        return _KNOWN[name]
    unit, factor = next(
        ((unit, factor) for start, end, unit, factor in _UNITS if name.startswith(start) and name.endswith(end)),
        ("", 1.0),
    )
    if name.startswith("eval/"):
        held_out, _, rest = name.removeprefix("eval/").partition("/")
        return Words(f"{held_out}: {_plain(rest)}" if rest else held_out, unit, factor)
    # Of a metric of the loop itself the group says little; of those of plugins it says whose they are.
    _, _, rest = name.partition("/")
    return Words(_plain(rest or name), unit, factor)


def all_words(names: Iterable[str]) -> dict[str, tuple[str, str, float]]:
    """Name -> title, unit, factor."""
    return {name: ((found := words(name)).title, found.unit, found.factor) for name in names}


def _plain(name: str) -> str:
    return name.replace("_", " ").replace("/", ", ")
