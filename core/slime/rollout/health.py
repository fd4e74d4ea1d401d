"""How one component fares: what it failed, counted and named, and when that is too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.errors import ErrorBudgetError
from slime.observe.rollout_files import write_failed
from slime.rollout.budget import ErrorBudget
from slime.rollout.failures import Cause, Fault
from slime.types import Sample

#: failed samples kept for the file that is written when a component is over its budget
KEPT = 50
#: reasons in the message that ends a run
REASONS = 3
#: characters of a prompt in it
PROMPT_LENGTH = 80


@dataclass(frozen=True)
class Watched:
    """Who is watched, and what it is allowed."""

    #: "reward" or "generator"
    kind: str
    #: `PLUGIN/NAME`
    id: str
    #: for messages: `reward math/boxed (slime-reward-math 0.3.1)`
    title: str
    #: share of its samples that it may fail
    error_budget: float
    #: samples of one rollout
    rollout_samples: int
    #: where the option stands: "reward", "generator" or "reward[1]"
    slot: str
    #: where its failed samples are written; None: nowhere
    run_dir: Path | None = None

    def option(self, name: str) -> str:
        """How the user states one of its limits."""
        if self.slot == self.kind:
            return f"--{self.kind}.{name.replace('_', '-')}"
        if "[eval." in self.slot:
            return f"{name} in the {self.kind} of its [[evaluation.sets]] table"
        return f"{name} in its [[reward.terms]] table"


@dataclass
class _Counts:
    """Since the metrics were last asked for."""

    samples: int = 0
    calls: int = 0
    seconds: float = 0.0
    causes: Counter[Cause] = field(default_factory=Counter)


class Health:
    """Counts a component's samples and ends the run when too many fail (see `slime.rollout.budget`)."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self._budget = ErrorBudget(watched.error_budget, watched.rollout_samples)
        self._counts = _Counts()
        self._answered = self._failed = 0
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, Sample] = {}
        self._kept: list[Sample] = []

    def fresh(self) -> Health:
        """Another count of the same component, for work that is judged apart."""
        return Health(self.watched)

    def called(self, seconds: float) -> None:
        """One call was answered after `seconds`."""
        self._counts.calls += 1
        self._counts.seconds += seconds

    def record(self, sample: Sample, fault: Fault | None) -> None:
        """One sample's outcome.  Raises `ErrorBudgetError` when it is one failure too many."""
        self._counts.samples += 1
        self._answered += 1
        if fault is not None:
            self._failed += 1
            self._counts.causes[fault.cause] += 1
            self._reasons[fault.reason] += 1
            self._examples.setdefault(fault.reason, sample)
            if len(self._reasons) > 10 * KEPT:  # reasons that hold a number each: keep what repeats
                self._reasons = Counter(dict(self._reasons.most_common(KEPT)))
                self._examples = {reason: self._examples[reason] for reason in self._reasons}
            self._kept = [*self._kept[-KEPT + 1 :], sample]
        if self._budget.record(failed=fault is not None):
            raise ErrorBudgetError(self._verdict())

    def metrics(self) -> dict[str, float]:
        """`plugin/KIND/PLUGIN/NAME/...` since the last call; counts of what did not happen are left out."""
        counts, self._counts = self._counts, _Counts()
        tag = f"plugin/{self.watched.kind}/{self.watched.id}"
        told = {
            "failed": counts.causes.total(),
            "timeouts": counts.causes[Cause.HUNG],
            "died": counts.causes[Cause.DIED],
        }
        metrics = {f"{tag}/{name}": float(count) for name, count in told.items() if count}
        if counts.calls:
            metrics[f"{tag}/seconds_mean"] = counts.seconds / counts.calls
        return metrics

    def _verdict(self) -> str:
        watched, budget = self.watched, self._budget
        lines = [
            f"{watched.title} is over its error budget: {budget.failed} of its latest {budget.seen} samples failed"
            f" ({self._failed} of {self._answered} in all); a share of {budget.share:g} may"
            f" ({watched.option('error_budget')}).",
            *(f"  {count}x {reason} {self._example(reason)}" for reason, count in self._reasons.most_common(REASONS)),
        ]
        where = self._write()
        if where is not None:
            logs = where.parents[1] / "logs"
            output = f"; {logs}/{watched.kind}*.log has the output of its processes" if _has_logs(logs, watched) else ""
            lines.append(f"  {where} has failed samples{output}.")
        lines.append(
            f"  Repair the {watched.kind}, give it more time ({watched.option('timeout_s')}), or let it fail more"
            f" ({watched.option('error_budget')}, 1 = all)."
        )
        return "\n".join(lines)

    def _example(self, reason: str) -> str:
        sample = self._examples[reason]
        return f"(sample {sample.index}, prompt {_excerpt(sample.prompt)!r})"

    def _write(self) -> Path | None:
        watched = self.watched
        if watched.run_dir is None:
            return None
        try:
            return write_failed(watched.run_dir, f"{watched.kind}_{watched.id.replace('/', '_')}", self._kept)
        except OSError:  # the run ends with a message either way
            return None


def _excerpt(prompt: str | Sequence[dict[str, object]]) -> str:
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""
    text = " ".join(text.split())
    return text if len(text) <= PROMPT_LENGTH else text[: PROMPT_LENGTH - 1] + "…"


def _has_logs(folder: Path, watched: Watched) -> bool:
    return next(folder.glob(f"{watched.kind}*.log"), None) is not None
