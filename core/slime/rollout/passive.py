"""The costlier rules on the first batches of a run (`--passive-checks`): what they find is told, and ends nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from slime.contracts.passive import check_samples_untouched, copy_samples
from slime.errors import PluginContractError
from slime.types import Sample

logger = logging.getLogger(__name__)

#: samples of one rollout that each component is checked on
SAMPLES = 8


class PassiveChecks:
    """Which components are to be looked at now, and what was found."""

    def __init__(self, rollouts: int = 0) -> None:
        """The first `rollouts` of a run are looked at."""
        self._rollouts = rollouts
        self._seen: Counter[str] = Counter()
        self._found: dict[str, str] = {}
        self._untold: list[str] = []

    def due(self, who: str, samples: int = 1) -> bool:
        """Whether to look at `who` while it works on so many samples; nobody is looked at again once found out."""
        if not self._rollouts or who in self._found or self._seen[who] >= SAMPLES:
            return False
        self._seen[who] += samples
        return True

    def found(self, who: str, error: PluginContractError) -> None:
        """Take note of the first thing that is wrong with `who`."""
        if who not in self._found:
            self._found[who] = f"{who} {error}"
            self._untold.append(self._found[who])
            logger.warning("%s", self._found[who])

    def copies(self, who: str, samples: Sequence[Sample]) -> list[Sample] | None:
        """Copies of what `who` is about to be shown, for `untouched`; None where it is not to be looked at."""
        return copy_samples(samples) if samples and self.due(who, len(samples)) else None

    def untouched(self, who: str, before: Sequence[Sample] | None, after: Sequence[Sample]) -> None:
        """Note where `who` wrote to the samples that it was shown."""
        if before is None:
            return
        try:
            check_samples_untouched(before, after)
        except PluginContractError as error:
            self.found(who, error)

    def rollout_done(self) -> list[str]:
        """What was found since the last rollout."""
        self._rollouts = max(0, self._rollouts - 1)
        self._seen.clear()
        told, self._untold = self._untold, []
        return told
