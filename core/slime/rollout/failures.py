"""Failures of components: written on samples, counted, and limited by an error budget.

Every reward and generator may fail the share `error_budget` of the samples of one rollout; the first failure above that
ends the run. A budget of 0 allows none, a budget of 1 any number. If more samples are generated than a rollout trains
on, the share is of the generated ones. In a small rollout the share is of `SMALL_ROLLOUT` samples, so that two unlucky
samples do not end the run; what always ends it is a rollout in which every sample failed. Evaluations are counted
separately, by the same rule; their size is not known in advance, so the share is of at least `EVALUATION_SAMPLES`.

The costlier contract rules are checked on the first rollouts of a run (`--passive-checks`): they report and end
nothing.

An error that ends a rollout leaves no coroutine of it running unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from slime.errors import ErrorBudgetError, PluginContractError
from slime.errors.raised import Raised, log_of_this_process
from slime.observe.samples import write_failed
from slime.registry.contracts import check_samples_untouched, copy_samples
from slime.types import Sample, Status

T = TypeVar("T")

#: characters of one reason
REASON_LENGTH = 300
#: samples of a rollout, at least, of which a component may fail its share. With the default budget of a quarter, 5
#: failures are allowed: a component that fails one sample in ten by chance has more in 1 of 300 rollouts of 16 samples.
SMALL_ROLLOUT = 20
#: samples of an evaluation, at least, of which a component may fail its share
EVALUATION_SAMPLES = 50
#: failed samples kept for the file that is written when a component is over its budget
KEPT = 50
#: reasons in the message that ends a run
REASONS = 3
#: places in a component's code whose traceback is logged
PLACES = 20
#: characters of a prompt in it
PROMPT_LENGTH = 80
#: seconds cancelled tasks may take to end before they are left behind
CANCEL_TIMEOUT_S = 10.0


class Cause(Enum):
    """How a component failed."""

    RAISED = "raised"
    HUNG = "hung"  #: no answer by the deadline
    DIED = "died"  #: its process ended
    CONTRACT = "contract"  #: the answer breaks the contract


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a component failed a sample."""

    cause: Cause
    #: one line that names the component
    reason: str
    #: what it raised; the reason has its place and message
    raised: Raised | None = field(default=None, compare=False)


def raised_fault(component_name: str, raised: Raised) -> Fault:
    """The fault of a component that raised."""
    return Fault(Cause.RAISED, shorten(f"{component_name}: {raised}"), raised)


def fault_of(component_name: str, error: BaseException, hung: str | None = None) -> Fault:
    """The fault of a component that raised `error`.

    Args:
        component_name: The component, for the reason.
        error: What left the component's code. A cancellation that came from outside is raised again.
        hung: If the deadline has expired, what the component failed to do.
    """
    if isinstance(error, PluginContractError):
        return Fault(Cause.CONTRACT, shorten(f"{component_name} {error}"))
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
        return Fault(Cause.RAISED, f"{component_name}: cancelled itself")
    if hung is not None:
        return Fault(Cause.HUNG, f"{component_name}: {hung}")
    return raised_fault(component_name, Raised.of(error))


def shorten(reason: str) -> str:
    """At most `REASON_LENGTH` characters."""
    return reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 1] + "…"


def mark(samples: Iterable[Sample], status: Status, reason: str) -> None:
    """Set status and reason on every sample, so that none of them is trained on."""
    for sample in samples:
        sample.status = status
        sample.failure = reason


def common_reasons(samples: Iterable[Sample]) -> list[str]:
    """`12x REASON` of the three most frequent reasons."""
    reasons = Counter(sample.failure or sample.status.value for sample in samples if not sample.trainable)
    return [f"{count}x {reason}" for reason, count in reasons.most_common(3)]


def count_status(samples: Sequence[Sample], status: Status) -> int:
    """How many samples have `status`."""
    return sum(1 for sample in samples if sample.status is status)


@dataclass
class _Counts:
    """The counts of one rollout."""

    samples: int = 0
    calls: int = 0
    seconds: float = 0.0
    causes: Counter[Cause] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    #: a sample and its fault for each reason
    examples: dict[str, tuple[Sample, Fault]] = field(default_factory=dict)
    #: the latest failed samples
    kept: list[tuple[Sample, Fault]] = field(default_factory=list)

    def fail(self, sample: Sample, fault: Fault) -> None:
        self.causes[fault.cause] += 1
        self.reasons[fault.reason] += 1
        self.examples.setdefault(fault.reason, (sample, fault))
        if len(self.reasons) > 10 * KEPT:  # reasons that all differ, by a number for example: keep the frequent ones
            self.reasons = Counter(dict(self.reasons.most_common(KEPT)))
            self.examples = {reason: self.examples[reason] for reason in self.reasons}
        self.kept = [*self.kept[-KEPT + 1 :], (sample, fault)]


def over_budget(failed: int, samples: int, error_budget: float) -> bool:
    """Whether a component failed more of the `samples` of a rollout than its share of them, or all of them."""
    return (failed == samples and error_budget < 1) or failed > error_budget * max(samples, SMALL_ROLLOUT)


@dataclass
class Health:
    """Counts the samples of one component, rollout by rollout, and ends the run when too many of them fail."""

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
    #: the option that chose it: "reward", "generator" or "reward[1]"
    slot: str
    #: the run folder, where failed samples are written; None: they are not
    run_dir: Path | None = None
    _counts: _Counts = field(default_factory=_Counts, init=False)
    #: the places whose traceback is in the log, and what the terminal has not shown of them
    _logged: set[str] = field(default_factory=set, init=False)
    _tracebacks: list[str] = field(default_factory=list, init=False)

    def option(self, name: str) -> str:
        """How the user sets one of its limits."""
        if self.slot == self.kind:
            return f"--{self.kind}.{name.replace('_', '-')}"
        if "[eval." in self.slot:
            return f"{name} in the {self.kind} of its [[evaluation.sets]] table"
        return f"{name} in its [[reward.terms]] table"

    def for_evaluation(self) -> Health:
        """A separate count of the same component, for evaluations."""
        return replace(self, rollout_samples=EVALUATION_SAMPLES)

    def called(self, seconds: float) -> None:
        """Count a call that took `seconds`."""
        self._counts.calls += 1
        self._counts.seconds += seconds

    def record(self, sample: Sample, fault: Fault | None) -> None:
        """Count one sample.

        Args:
            sample: The sample.
            fault: Why the component failed it; None if it did not.

        Raises:
            ErrorBudgetError: If this failure exceeds the error budget.
        """
        counts = self._counts
        counts.samples += 1
        if fault is None:
            return
        counts.fail(sample, fault)
        self._log(fault)
        if over_budget(counts.causes.total(), max(self.rollout_samples, counts.samples), self.error_budget):
            raise ErrorBudgetError(self._verdict())

    def _log(self, fault: Fault) -> None:
        """Log the traceback of the first fault at each place of the component's code."""
        if (raised := fault.raised) is None:
            return
        place = raised.where or raised.error
        if place not in self._logged and len(self._logged) < PLACES:
            self._logged.add(place)
            raised.log(self.title)
            self._tracebacks.append(raised.explained(self.title))

    def tracebacks(self) -> list[str]:
        """What the component raised at places where it had not raised before, since the last call; for people."""
        new, self._tracebacks = self._tracebacks, []
        return new

    def metrics(self) -> dict[str, float]:
        """`plugin/KIND/PLUGIN/NAME/...` of the rollout, without zeros. Starts the count of the next one."""
        counts, self._counts = self._counts, _Counts()
        tag = f"plugin/{self.kind}/{self.id}"
        faults = {
            "failed": counts.causes.total(),
            "timeouts": counts.causes[Cause.HUNG],
            "died": counts.causes[Cause.DIED],
        }
        metrics = {f"{tag}/{name}": float(count) for name, count in faults.items() if count}
        if counts.calls:
            metrics[f"{tag}/seconds_mean"] = counts.seconds / counts.calls
        return metrics

    def _verdict(self) -> str:
        counts = self._counts
        failed = counts.causes.total()
        small = f" (counted as {SMALL_ROLLOUT}), but not all," if self.rollout_samples < SMALL_ROLLOUT else ""
        reasons = counts.reasons.most_common(REASONS)
        raised = counts.examples[reasons[0][0]][1].raised
        lines = [
            f"{self.title} is over its error budget: {failed} of the {counts.samples} samples of this rollout so far"
            f" failed; a share of {self.error_budget:g} of a rollout's {self.rollout_samples} samples{small} may fail"
            f" ({self.option('error_budget')}).",
            *(f"  {count}x {reason} {self._example(reason)}" for reason, count in reasons),
        ]
        if raised is not None:
            lines.append(f"  The last lines of the first traceback:\n{raised.tail()}")
        path = self._write()
        if path is not None:
            logs = path.parents[1] / "logs"
            has_logs = next(logs.glob(f"{self.kind}*.log"), None) is not None
            output = f"; {logs}/{self.kind}*.log has the output of its processes" if has_logs else ""
            log = log_of_this_process()
            traces = "" if raised is None or log is None else f"; {log} has the whole traceback"
            lines.append(f"  {path} has failed samples{traces}{output}.")
        more = f"let it fail more ({self.option('error_budget')}, 1 = all)."
        if raised is None:
            lines.append(f"  Repair the {self.kind}, give it more time ({self.option('timeout_s')}), or {more}")
        else:
            lines.append(f"  {raised.remedy} Or {more}")
        return "\n".join(lines)

    def _example(self, reason: str) -> str:
        sample, _ = self._counts.examples[reason]
        return f"(sample {sample.index}, prompt {_excerpt(sample.prompt)!r})"

    def _write(self) -> Path | None:
        if self.run_dir is None:
            return None
        try:
            name = f"{self.kind}_{self.id.replace('/', '_')}"
            rows = ((sample, fault.raised.traceback if fault.raised else None) for sample, fault in self._counts.kept)
            return write_failed(self.run_dir, name, rows)
        except OSError:  # the run ends with a message either way
            return None


def _excerpt(prompt: str | Sequence[dict[str, object]]) -> str:
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""
    text = " ".join(text.split())
    return text if len(text) <= PROMPT_LENGTH else text[: PROMPT_LENGTH - 1] + "…"


logger = logging.getLogger(__name__)

#: samples of one rollout that each component is checked on
PASSIVE_SAMPLES = 8


class PassiveChecks:
    """Decides which components to check more closely, and keeps the findings."""

    def __init__(self, rollouts: int = 0) -> None:
        """Check the first `rollouts` rollouts."""
        self._rollouts = rollouts
        self._checked: Counter[str] = Counter()
        self._findings: dict[str, str] = {}
        self._unreported: list[str] = []

    def due(self, component_name: str, samples: int = 1) -> bool:
        """Whether to check a component on this many samples. One with a finding is not checked again."""
        if not self._rollouts or component_name in self._findings or self._checked[component_name] >= PASSIVE_SAMPLES:
            return False
        self._checked[component_name] += samples
        return True

    def found(self, component_name: str, error: PluginContractError) -> None:
        """Keep and log the first rule that a component breaks."""
        if component_name not in self._findings:
            finding = self._findings[component_name] = f"{component_name} {error}"
            self._unreported.append(finding)
            logger.warning("%s", finding)

    @contextmanager
    def untouched(self, component_name: str, samples: Sequence[Sample]) -> Iterator[bool]:
        """Check that a component, called in the body, does not change these samples; yields whether it is checked."""
        before = copy_samples(samples) if samples and self.due(component_name, len(samples)) else None
        yield before is not None
        if before is not None:
            try:
                check_samples_untouched(before, samples)
            except PluginContractError as error:
                self.found(component_name, error)

    def rollout_done(self) -> list[str]:
        """What was found since the last rollout."""
        self._rollouts = max(0, self._rollouts - 1)
        self._checked.clear()
        findings, self._unreported = self._unreported, []
        return findings


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error, or a cancellation, cancels the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel(tasks)
        raise


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what is still running and wait for it, at most `CANCEL_TIMEOUT_S`. Errors of tasks are dropped."""
    tasks = list(tasks)
    if running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_TIMEOUT_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # asyncio would log it as never retrieved
