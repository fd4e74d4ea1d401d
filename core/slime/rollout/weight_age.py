"""How old the weights are that made a sample: its staleness, and what is too stale to train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slime.errors import PluginContractError
from slime.types import Group, Sample, Status

#: why a group's responses were thrown away
STALE = "stale"
#: how often a prompt is generated again because its responses became stale, before it is given up. A response that
#: takes longer than the bound allows would otherwise start over for ever.
MAX_REGENERATIONS = 3


@dataclass(kw_only=True, eq=False)
class WeightAges:
    """The staleness of samples: rollouts trained on since the oldest weights that made one of their tokens.

    Rollout n is trained on after n others, so the staleness is known as soon as a batch is selected: n minus the
    number of rollouts that the oldest weights had been trained on.
    """

    #: the generator that returned the samples, for messages
    generator: str = "?"
    #: the largest staleness to train on (`--max-staleness`); None: any
    bound: int | None = None
    #: whether samples above the bound are dropped; otherwise they are trained on with a correction
    drops: bool = True
    #: weight version -> rollouts it had been trained on, for every version that the engines have had
    _trained: dict[int, int] = field(default_factory=dict, init=False)

    def add(self, trained_at: Mapping[int, int]) -> None:
        """Remember how many rollouts these weight versions had been trained on; before any engine uses them."""
        self._trained.update(trained_at)

    def staleness(self, sample: Sample, rollout: int) -> int | None:
        """Staleness of `sample` in the batch of `rollout`; None if it records no numeric version.

        Raises:
            PluginContractError: No engine ever had its version.
        """
        versions = [int(version) for version in sample.weight_versions if version.isdecimal()]
        if not versions:
            return None
        oldest = min(versions)
        if oldest not in self._trained:
            known = f"{min(self._trained)} to {max(self._trained)}" if self._trained else "none"
            raise PluginContractError(
                f"generator {self.generator} returned a sample with weight version {oldest}, and the engines had"
                f" versions {known}; expected Sample.weight_versions to be those of its Generations"
            )
        return rollout - self._trained[oldest]

    def too_stale(self, group: Group, rollout: int) -> bool:
        """Whether a sample of `group`, complete or not, is to be dropped from the batch of `rollout`.

        Samples that failed are not looked at: they are not trained on.

        Raises:
            PluginContractError: There is a bound, and a sample does not say which weights made it.
        """
        if self.bound is None or not self.drops:
            return False
        ages = []
        for sample in group.samples:
            if not sample.trainable and sample.status is not Status.PENDING:
                continue
            age = self.staleness(sample, rollout)
            if age is None and sample.trainable:
                raise PluginContractError(
                    f"generator {self.generator} returned a sample with weight_versions {sample.weight_versions}, and"
                    " --max-staleness needs them to be numbers: fill in those of the Generations that it is made of,"
                    " or drop --max-staleness"
                )
            ages.append(age or 0)
        return max(ages, default=0) > self.bound

    def metrics(self, groups: Sequence[Group], rollout: int, *, histogram: bool) -> dict[str, float]:
        """`train/staleness_max` of the samples to train on; with `histogram` their mean and distribution too.

        `train/staleness/N` is the number of samples of staleness N. Empty if no sample records its weights.
        """
        if not self._trained:  # a run without engines
            return {}
        samples = [sample for group in groups for sample in group.samples if sample.trainable]
        ages = [age for sample in samples if (age := self.staleness(sample, rollout)) is not None]
        if not ages:
            return {}
        metrics = {"train/staleness_max": float(max(ages))}
        if histogram:
            counts = Counter(ages)
            metrics["train/staleness_mean"] = sum(ages) / len(ages)
            metrics |= {f"train/staleness/{age}": float(counts[age]) for age in range(max(ages) + 1)}
        if self.bound is not None:
            metrics["train/staleness_over"] = float(sum(age > self.bound for age in ages))
        return metrics
