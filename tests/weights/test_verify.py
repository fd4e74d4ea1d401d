"""The checks of tensors before they are compared with an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.families import read_architecture
from tests.support.model_folders import Folders

from slime.errors import WeightSyncError
from slime.kit.models import attention_rules, embedding_rules
from slime.weights.shards import engine_shard
from slime.weights.transports import own_address
from slime.weights.verify import WeightCheck


@pytest.fixture
def folder(model_folder: Folders) -> Path:
    return model_folder("llama")


def test_tensors_pass_unchanged(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    passed = dict(WeightCheck(read_architecture(folder), [1]).observe(iter(weights.items())))
    assert passed.keys() == weights.keys()
    assert all(passed[name] is weights[name] for name in weights)


def test_a_name_outside_the_table_is_an_error(folder: Path) -> None:
    check = WeightCheck(read_architecture(folder), [1])
    with pytest.raises(WeightSyncError, match=r"model\.norm\.bias"):
        list(check.observe(iter({"model.norm.bias": torch.zeros(2)}.items())))


def test_a_missing_tensor_is_an_error(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    with pytest.raises(WeightSyncError, match=r"did not send lm_head\.weight"):
        list(WeightCheck(read_architecture(folder), [1]).observe(iter(weights.items())))


def test_an_answer_without_checksums_is_an_error(folder: Path) -> None:
    with pytest.raises(WeightSyncError, match="without checksums"):
        WeightCheck(read_architecture(folder), [1]).compare("http://engine:1", {"success": True})


@pytest.mark.parametrize("draft", [False, True], ids=["one model", "with a draft model"])
def test_an_engine_of_unexpected_size_is_an_error(draft: bool, folder: Path) -> None:
    check = WeightCheck(read_architecture(folder), [1])
    info = {"tp_rank": 0, "tp_size": 4}
    ranks = [{"checksums": {}, "parallelism_info": [info, {"tp_rank": 0, "tp_size": 1}] if draft else info}]
    with pytest.raises(WeightSyncError, match="tensor-parallel size 4"):
        check.compare("http://engine:1", {"ranks": ranks})


def test_more_engine_ranks_than_key_value_heads_share_them() -> None:
    rule = next(rule for rule in attention_rules(0, hidden=8, heads=4, groups=2, head_dim=3) if rule.layout == "qkv")
    query, key, value = torch.arange(12), torch.arange(100, 106), torch.arange(200, 206)
    shards = [engine_shard(rule, [query, key, value], rank, 4).tolist() for rank in range(4)]
    assert shards == [
        [0, 1, 2, 100, 101, 102, 200, 201, 202],
        [3, 4, 5, 100, 101, 102, 200, 201, 202],
        [6, 7, 8, 103, 104, 105, 203, 204, 205],
        [9, 10, 11, 103, 104, 105, 203, 204, 205],
    ]


@pytest.mark.parametrize(("tp_size", "rows"), [(1, 128), (2, 64), (3, 64)])
def test_vocabularies_are_padded_like_in_the_engine(tp_size: int, rows: int) -> None:
    rule = next(embedding_rules(100, 2, tied=True))
    shards = [engine_shard(rule, [torch.ones(100, 2)], rank, tp_size) for rank in range(tp_size)]
    assert [shard.shape for shard in shards] == [(rows, 2)] * tp_size
    assert sum(shard.sum().item() for shard in shards) == 200


def test_engines_on_this_host_reach_the_trainer_over_loopback() -> None:
    assert own_address(["http://127.0.0.1:3000", "http://localhost:3001"]) == "127.0.0.1"
