"""Which metrics are shown first, in the page and in the terminal, and the phases of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime.observe.metrics import eval_set_names
from slime_viewer.run_files import Metrics


@dataclass(frozen=True)
class Panel:
    """Curves that share an axis."""

    title: str
    metrics: tuple[str, ...]
    #: what it is about: "learning", "answers" or "speed"
    theme: str
    #: a metric with this name and `/low` and `/high` has a band
    band: bool = False


@dataclass(frozen=True)
class Lane:
    """Seconds of each step that one part of the run spent on one thing."""

    title: str
    metric: str
    #: "work", or "wait" for another part of the run
    kind: str


#: means and maxima have panels of their own: on one axis the maximum would flatten the mean
_PANELS = (
    Panel("Reward", ("rollout/reward_mean",), "learning"),
    Panel("KL to the reference", ("train/kl",), "learning"),
    Panel("Entropy", ("train/entropy",), "learning"),
    Panel("Log-prob gap", ("train/logprob_gap_mean",), "learning"),
    Panel("Largest log-prob gap", ("train/logprob_gap_max",), "learning"),
    Panel("Loss", ("train/loss",), "learning"),
    Panel("Gradient norm", ("train/grad_norm",), "learning"),
    Panel("Learning rate", ("train/lr",), "learning"),
    Panel("Clipped tokens", ("train/clip_fraction",), "learning"),
    Panel("Answer length", ("rollout/response_length_mean",), "answers"),
    Panel("Longest answer", ("rollout/response_length_max",), "answers"),
    Panel("Answers cut off", ("rollout/truncated_ratio",), "answers"),
    Panel("Groups of equal reward", ("rollout/zero_std_ratio",), "answers"),
    Panel("Failed samples", ("rollout/failed",), "answers"),
    Panel("Time of a step", ("time/step",), "speed"),
    Panel("Generated", ("rollout/tokens_per_s",), "speed"),
    Panel("Staleness", ("train/staleness_mean",), "speed"),
    Panel("Largest staleness", ("train/staleness_max",), "speed"),
    Panel(
        "Ledger of prompts", ("ledger/in_flight", "ledger/buffered", "ledger/dropped", "ledger/regenerated"), "speed"
    ),
)
#: the phases of a step in their order; the engines' own, which may overlap the trainer's, come last
LANES = (
    Lane("trainer waits for rollouts", "time/wait_rollout", "wait"),
    Lane("log-probs", "time/ref_log_probs", "work"),
    Lane("log-probs before the step", "time/old_log_probs", "work"),
    Lane("values", "time/values", "work"),
    Lane("forward and backward", "time/forward_backward", "work"),
    Lane("optimizer", "time/optimizer", "work"),
    Lane("weight sync", "time/sync_weights", "work"),
    Lane("sync waits for evaluation", "time/wait_evaluation", "wait"),
    Lane("checkpoint", "time/save", "work"),
    Lane("switch of devices", "time/colocate", "work"),
    Lane("engines generate", "time/engine", "work"),
    Lane("engines wait for the trainer", "time/engines_idle", "wait"),
)


def panels(metrics: Metrics) -> list[Panel]:
    """The panels of which a run has metrics: those of every run, its reward's parts, its evaluations, its memory."""
    known = metrics.names
    evaluations = tuple(f"eval/{name}" for name in eval_set_names(known))
    parts = tuple(name for name in known if name.startswith("rollout/reward/"))
    memory = tuple(name for name in known if name.startswith("memory/"))
    first, *others = _PANELS
    found = [
        first,
        Panel("Evaluation, with 95 % intervals", evaluations, "learning", band=True),
        Panel("Parts of the reward", parts, "learning"),
        *others,
        Panel("Memory", memory, "speed"),
    ]
    kept = (replace(one, metrics=tuple(name for name in one.metrics if name in known)) for one in found)
    return [one for one in kept if one.metrics]
