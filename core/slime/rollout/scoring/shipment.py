"""Samples on their way to a worker, pickled once however many rewards and attempts want them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

from slime.types import Sample


class Shipment:
    """Samples to score together."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self._payload: bytes | None = None

    @property
    def payload(self) -> bytes:
        """The samples, pickled.

        Without `rollout_routed_experts` and `multimodal_train_inputs`, which are for the trainer and may outweigh all
        the rest.  Raises what pickle raises for values that cannot be sent.
        """
        if self._payload is None:
            self._payload = pickle.dumps([_as_sent(sample) for sample in self.samples], protocol=5)
        return self._payload


def _as_sent(sample: Sample) -> Sample:
    if sample.rollout_routed_experts is None and sample.multimodal_train_inputs is None:
        return sample
    sent = copy.copy(sample)
    sent.rollout_routed_experts = sent.multimodal_train_inputs = None
    return sent
