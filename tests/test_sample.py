"""Samples as dictionaries, as the saved states of data sources hold them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slime.types import Sample, SpecInfo, Status
from slime.utils.types import Sample as FamiliarSample


def test_a_sample_survives_json() -> None:
    sample = Sample(
        group_index=3,
        index=12,
        prompt=[{"role": "user", "content": "1+1="}],
        tokens=[4, 5, 6],
        response="2é",
        response_length=2,
        reward={"score": 1.0, "format": 0.5},
        loss_mask=[1, 0],
        status=Status.TRUNCATED,
        metadata={"k": [1]},
        weight_versions=["1", "2"],
        rollout_log_probs=[-0.1234567, -2.0],
        spec_info=SpecInfo(1, 2, 3, 4),
        rollout_id=12,
    )
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def test_routed_experts_survive_json() -> None:
    for kind in (np.uint8, np.int16):
        routed = np.arange(24, dtype=kind).reshape(4, 3, 2)
        again = Sample.from_dict(json.loads(json.dumps(Sample(rollout_routed_experts=routed).to_dict())))
        assert again.rollout_routed_experts is not None and again.rollout_routed_experts.dtype == kind
        assert np.array_equal(again.rollout_routed_experts, routed)


@pytest.mark.row("D3")
def test_both_import_paths_name_the_same_class() -> None:
    assert FamiliarSample is Sample
