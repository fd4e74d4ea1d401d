"""The checks of tensors before they are compared with an engine."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from torch import Tensor

from slime.config.weight_options import SyncOptions
from slime.engine.control import EngineControl
from slime.errors import WeightSyncError
from slime.kit.models import attention_rules, embedding_rules
from slime.weights.shards import engine_shard
from slime.weights.transports import create_transport
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
    check = WeightCheck(read_architecture(folder), [1])
    list(check.observe(iter(weights.items())))
    with pytest.raises(WeightSyncError, match=r"did not send lm_head\.weight"):
        check.compare("http://engine:1", {"ranks": []})


def test_what_two_senders_sent_of_one_model_is_added_and_nothing_may_come_twice(folder: Path) -> None:
    weights, checks = load_file(folder / "model.safetensors"), []
    for names in (["lm_head.weight"], ["lm_head.weight"], weights.keys() - {"lm_head.weight"}):
        checks.append(WeightCheck(read_architecture(folder), [1]))
        list(checks[-1].observe((name, weights[name]) for name in names))
    first, again, rest = checks
    with pytest.raises(WeightSyncError, match=r"Two pipeline stages sent lm_head\.weight"):
        first.add(again.report())
    first.add(rest.report())
    assert first.report()["missing"] == []


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


def engine_of_experts(
    tensors: Mapping[str, Tensor], rank: int, size: int, groups: int, copies: int
) -> dict[str, Tensor]:
    """What rank `rank` of an engine holds of a Qwen3-MoE model of 3 layers and 8 experts."""
    held = {name: tensor for name, tensor in tensors.items() if "norm" in name or name.endswith("mlp.gate.weight")}
    of_size, of_rank = size // copies, rank % (size // copies)
    held["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].chunk(of_size)[of_rank]
    held["lm_head.weight"] = tensors["lm_head.weight"].chunk(size)[rank]
    parts = size // groups
    mine = range(8 * (rank // parts) // groups, 8 * (rank // parts + 1) // groups)
    for layer in ("model.layers.0", "model.layers.1", "model.layers.2"):
        attention, experts = f"{layer}.self_attn", f"{layer}.mlp.experts"
        of = {key: tensors[f"{attention}.{key}_proj.weight"] for key in "qkvo"}
        ways = {
            "q": of_size,
            "k": min(of_size, 2),
            "v": min(of_size, 2),
        }  # 2 key and value heads, which ranks may share
        joined = [of[key].chunk(count)[of_rank * count // of_size] for key, count in ways.items()]
        held[f"{attention}.qkv_proj.weight"] = torch.cat(joined)
        held[f"{attention}.o_proj.weight"] = of["o"].chunk(of_size, 1)[of_rank]
        gate, up, down = (
            torch.stack([tensors[f"{experts}.{number}.{key}_proj.weight"] for number in mine])
            for key in ("gate", "up", "down")
        )
        part = rank % parts
        held[f"{experts}.w13_weight"] = torch.cat([gate.chunk(parts, 1)[part], up.chunk(parts, 1)[part]], 1)
        held[f"{experts}.w2_weight"] = down.chunk(parts, 2)[part]
    return held


def answered(tensors: Mapping[str, Tensor], size: int, groups: int, copies: int = 1) -> dict[str, Any]:
    """An engine's answer to the weight check."""
    ranks = []
    for rank in range(size):
        held = engine_of_experts(tensors, rank, size, groups, copies)
        checksums = {
            name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
            for name, tensor in held.items()
        }
        ranks.append({"checksums": checksums, "parallelism_info": {"tp_rank": rank, "tp_size": size}})
    return {"ranks": ranks}


@pytest.mark.parametrize(
    ("size", "groups", "copies"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 4)]
)
def test_experts_are_compared_however_they_are_divided_and_in_whatever_order_they_come(
    size: int, groups: int, copies: int, model_folder: Folders
) -> None:
    folder = model_folder("qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    check = WeightCheck(read_architecture(folder), [size], ep_size=groups, dp_size=copies)
    for named in (list(weights.items()), list(weights.items())[::-1]):
        list(check.observe(iter(named)))
        check.compare("http://engine:1", answered(weights, size, groups, copies))
    two, five = (f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in (2, 5))
    weights[two], weights[five] = weights[five], weights[two]
    with pytest.raises(
        WeightSyncError, match=r"1 differ from the trainer's: \S+\.layers\.1\.mlp\.experts\.w13_weight\."
    ):
        check.compare("http://engine:1", answered(weights, size, groups, copies))


def test_a_transport_knows_how_its_engines_divide_experts(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3_moe")
    weights, engine = load_file(folder / "model.safetensors"), EngineControl("http://127.0.0.1:1", tp_size=2, ep_size=2)
    transport = create_transport(
        SyncOptions(check_weight_update_equal=True),
        [engine],
        model=read_architecture(folder),
        hf_folder=folder,
        scratch=tmp_path,
        on_gpu=False,
    )
    assert transport.check is not None
    list(transport.check.observe(iter(weights.items())))
    transport.check.compare(engine.url, answered(weights, 2, 2))


def test_experts_are_not_kept(model_folder: Folders) -> None:
    folder = model_folder("qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    sent: list[weakref.ref[Tensor]] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name in [rule_name for rule in read_architecture(folder).rules for rule_name in rule.hf]:
            tensor = weights[name].clone()
            sent.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    most = 0
    for _name, _tensor in WeightCheck(read_architecture(folder), [1]).observe(gathered()):
        most = max(most, sum(one() is not None for one in sent))
    assert most <= 5, "beside the tensors of one expert, all are released when they are sent"
