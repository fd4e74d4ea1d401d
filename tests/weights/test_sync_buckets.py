"""The buckets in which weights are sent."""

from __future__ import annotations

import pytest
import torch
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from torch import Tensor

from slime.weights.transports.transport import joined_by_engines, sync_buckets

JOINED = [("a", "d"), ("e", "f")]


def tensors(names: str) -> list[tuple[str, Tensor]]:
    """One tensor of 8 bytes for each letter."""
    return [(name, torch.zeros(2)) for name in names]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (100, ["bcadgef"]),
        (16, ["bc", "ad", "g", "ef"]),
        (8, ["b", "c", "ad", "g", "ef"]),  # a set may be larger than the limit
    ],
)
def test_a_set_is_in_one_bucket(limit: int, expected: list[str]) -> None:
    found = sync_buckets(iter(tensors("abcdegf")), limit, JOINED)
    assert ["".join(name for name, _ in bucket) for bucket in found] == expected


def test_parts_of_an_incomplete_set_are_sent() -> None:
    assert ["".join(name for name, _ in bucket) for bucket in sync_buckets(iter(tensors("ab")), 100, JOINED)] == ["ba"]


def test_no_tensors_need_no_bucket() -> None:
    assert list(sync_buckets(iter([]), 100, JOINED)) == []


@pytest.mark.parametrize(("family", "count"), [("deepseek_v3", 3), ("moonlight", 0), ("qwen3_moe", 0)])
def test_what_an_engine_joins_is_sent_together(family: str, count: int, model_folder: Folders) -> None:
    sets = joined_by_engines(read_architecture(model_folder(family)))
    assert len(sets) == count
    for layer, names in enumerate(sets):
        attention = f"model.layers.{layer}.self_attn"
        assert names == (f"{attention}.q_a_proj.weight", f"{attention}.kv_a_proj_with_mqa.weight")
