"""The arithmetic of shards, without ranks: what each reads, and the whole tensors that they make."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime.errors import ConfigError
from slime.plugin.architecture import Rule
from slime.weights.shards import buckets, check_shard, engine_shard, read_shard, saved_places, to_hf

#: a rule, and the shape of Megatron's tensor over all ranks
LAYOUTS: dict[str, tuple[Rule, tuple[int, ...]]] = {
    "whole": (Rule("w", {"a": (6, 4)}, "w"), (6, 4)),
    "rows": (Rule("w", {"gate": (8, 3), "up": (8, 3)}, "w", parallel_dim=0), (16, 3)),
    "rows of two parts": (Rule("w", {"gate_up": (16, 3)}, "w", parallel_dim=0, parts=2), (16, 3)),
    "columns": (Rule("w", {"a": (3, 8)}, "w", parallel_dim=1), (3, 8)),
    "padded vocabulary": (Rule("w", {"a": (10, 3)}, "w", "vocab", parallel_dim=0), (12, 3)),
    "query groups": (Rule("w", {"q": (12, 5), "k": (6, 5), "v": (6, 5)}, "w", "qkv", 0, groups=2), (24, 5)),
    "biases of query groups": (Rule("w", {"q": (12,), "k": (6,), "v": (6,)}, "w", "qkv", 0, groups=2), (24,)),
}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_shards_of_all_ranks_make_the_tensors_that_they_were_read_from(layout: str, tp_size: int) -> None:
    rule, total = LAYOUTS[layout]
    tensors = {name: torch.randn(shape) for name, shape in rule.hf.items()}
    shape = tuple(n // tp_size if dim == rule.parallel_dim else n for dim, n in enumerate(total))

    def read(name: str, dim: int, start: int, stop: int) -> Tensor:
        assert 0 <= start <= stop <= tensors[name].shape[dim]
        return tensors[name].narrow(dim, start, stop - start)

    check_shard(rule, shape, tp_size)
    shards = [read_shard(rule, shape, rank, read) for rank in range(tp_size)]
    assert {tuple(shard.shape) for shard in shards} == {shape}
    if rule.parallel_dim is None:
        assert all(torch.equal(shard, shards[0]) for shard in shards)
        shards = shards[:1]
    found = dict(to_hf(rule, shards))
    assert list(found) == list(rule.hf)
    assert all(torch.equal(found[name], tensors[name]) for name in rule.hf)
    if rule.layout == "vocab":
        assert not torch.cat(shards)[10:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [(0, -1), (1, 1)], ids=["fewer", "wider"])
def test_a_tensor_that_config_json_does_not_explain_is_refused(layout: str, change: tuple[int, int]) -> None:
    rule, total = LAYOUTS[layout]
    dim, more = change
    shape = list(total)
    if dim == len(shape):
        shape.append(1)
    shape[dim] += more * 3
    with pytest.raises(ConfigError, match="does not fit"):
        check_shard(rule, tuple(shape), 1)


def test_each_rank_holds_its_share_of_each_part() -> None:
    rule, _ = LAYOUTS["rows of two parts"]
    whole = torch.arange(16.0).repeat(3, 1).T.contiguous()
    second = read_shard(rule, (8, 3), 1, lambda _, dim, start, stop: whole.narrow(dim, start, stop - start))
    assert second[:, 0].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(engine_shard(rule, [whole], 1, 2), second)


def test_an_engine_rank_holds_its_rows_of_each_joined_tensor_or_its_columns() -> None:
    gate, up = torch.arange(8).view(4, 2), torch.arange(100, 108).view(4, 2)
    joined = engine_shard(Rule("w", {"gate": (4, 2), "up": (4, 2)}, "w", parallel_dim=0), [gate, up], 1, 2)
    assert joined[:, 0].tolist() == [4, 6, 104, 106]
    columns, whole = (Rule("w", {"a": (4, 2)}, "w", parallel_dim=dim) for dim in (1, None))
    assert engine_shard(columns, [gate], 1, 2).tolist() == [[1], [3], [5], [7]]
    assert torch.equal(engine_shard(whole, [gate], 1, 2), gate)


def test_a_bucket_may_be_exactly_full_and_holds_one_type() -> None:
    sizes = [2, 2, 1, 3, 4, 9, 1]  # numbers of 4 bytes
    tensors = [(size, torch.zeros(size)) for size in sizes]
    found = [[size for size, _ in bucket] for bucket in buckets(tensors, 16)]
    assert found == [[2, 2], [1, 3], [4], [9], [1]]
    mixed = [("a", torch.zeros(1)), ("b", torch.zeros(1, dtype=torch.bfloat16)), ("c", torch.zeros(1))]
    assert [len(bucket) for bucket in buckets(mixed, 16, same_dtype=True)] == [1, 1, 1]
    assert [len(bucket) for bucket in buckets(mixed, 16)] == [3]


def test_a_saved_weight_may_be_alone_or_stacked_with_its_layer_and_expert() -> None:
    assert list(saved_places("embedding.word_embeddings.weight")) == [("embedding.word_embeddings.weight", ())]
    assert list(saved_places("decoder.layers.3.input_layernorm.weight")) == [
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", ()),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (3,)),
        ("decoder.layers.3.input_layernorm.weight", ()),
        ("decoder.layers.input_layernorm.weight", (3,)),
    ]
    assert list(saved_places("decoder.layers.5.mlp.experts.local_experts.7.linear_fc1.weight")) == [
        ("decoder.layers.5.mlp.experts.experts.linear_fc1.weight", (7,)),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (5, 7)),
    ]
    inside = "mtp.layers.0.transformer_layer.mlp.experts"  # is not stacked with decoder layers
    assert list(saved_places(f"{inside}.local_experts.2.linear_fc2.weight")) == [
        (f"{inside}.experts.linear_fc2.weight", (2,))
    ]
