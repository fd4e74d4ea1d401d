"""The arithmetic of shards, without ranks: what each reads, and the whole tensors that they make."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime.errors import ConfigError
from slime.weights.mapping import Rule, Sizes
from slime.weights.shards import buckets, engine_shard, hf_shapes, read_shard, to_hf

SIZES = Sizes(vocab=10, heads=4, groups=2, head_dim=3)
#: a rule, the shapes of its Hugging Face tensors, and the shape of Megatron's tensor over all ranks
LAYOUTS: dict[str, tuple[Rule, list[tuple[int, ...]], tuple[int, ...]]] = {
    "whole": (Rule("w", ("a",), "w"), [(6, 4)], (6, 4)),
    "rows": (Rule("w", ("gate", "up"), "w", parallel_dim=0), [(8, 3), (8, 3)], (16, 3)),
    "columns": (Rule("w", ("a",), "w", parallel_dim=1), [(3, 8)], (3, 8)),
    "padded vocabulary": (Rule("w", ("a",), "w", "vocab", parallel_dim=0), [(10, 3)], (12, 3)),
    "query groups": (Rule("w", ("q", "k", "v"), "w", "qkv", 0), [(12, 5), (6, 5), (6, 5)], (24, 5)),
}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_shards_of_all_ranks_make_the_tensors_that_they_were_read_from(layout: str, tp_size: int) -> None:
    rule, shapes, total = LAYOUTS[layout]
    tensors = {name: torch.randn(shape) for name, shape in zip(rule.hf, shapes, strict=True)}
    shape = tuple(n // tp_size if dim == rule.parallel_dim else n for dim, n in enumerate(total))

    def read(name: str, dim: int, start: int, stop: int) -> Tensor:
        assert 0 <= start <= stop <= tensors[name].shape[dim]
        return tensors[name].narrow(dim, start, stop - start)

    shards = [read_shard(rule, shape, rank, read, SIZES) for rank in range(tp_size)]
    assert {tuple(shard.shape) for shard in shards} == {shape}
    if rule.parallel_dim is None:
        assert all(torch.equal(shard, shards[0]) for shard in shards)
        shards = shards[:1]
    found = dict(to_hf(rule, shards, SIZES))
    assert list(found) == list(rule.hf)
    assert all(torch.equal(found[name], tensors[name]) for name in rule.hf)
    assert hf_shapes(rule, shape, tp_size, SIZES) == shapes
    if rule.layout == "vocab":
        assert not torch.cat(shards)[SIZES.vocab :].any()


@pytest.mark.parametrize("layout", ["padded vocabulary", "query groups"])
def test_a_tensor_that_the_sizes_do_not_explain_is_refused(layout: str) -> None:
    rule, *_ = LAYOUTS[layout]
    with pytest.raises(ConfigError, match="does not fit"):
        hf_shapes(rule, (4, 3), 2, SIZES)


def test_an_engine_rank_holds_its_rows_of_each_joined_tensor_or_its_columns() -> None:
    gate, up = torch.arange(8).view(4, 2), torch.arange(100, 108).view(4, 2)
    joined = engine_shard(LAYOUTS["rows"][0], [gate, up], 1, 2, SIZES)
    assert joined[:, 0].tolist() == [4, 6, 104, 106]
    assert engine_shard(LAYOUTS["columns"][0], [gate], 1, 2, SIZES).tolist() == [[1], [3], [5], [7]]
    assert torch.equal(engine_shard(LAYOUTS["whole"][0], [gate], 1, 2, SIZES), gate)


def test_a_bucket_may_be_exactly_full_and_holds_one_type() -> None:
    sizes = [2, 2, 1, 3, 4, 9, 1]  # numbers of 4 bytes
    tensors = [(size, torch.zeros(size)) for size in sizes]
    found = [[size for size, _ in bucket] for bucket in buckets(tensors, 16)]
    assert found == [[2, 2], [1, 3], [4], [9], [1]]
    mixed = [("a", torch.zeros(1)), ("b", torch.zeros(1, dtype=torch.bfloat16)), ("c", torch.zeros(1))]
    assert [len(bucket) for bucket in buckets(mixed, 16, same_dtype=True)] == [1, 1, 1]
    assert [len(bucket) for bucket in buckets(mixed, 16)] == [3]
