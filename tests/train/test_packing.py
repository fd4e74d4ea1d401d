"""Packed micro-batches: which position predicts which token, padding, and attention."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.train.harness import alone, make_batch

from slime.train.attention import PackedAttention, PackedSequences, plan_attention
from slime.train.layers import Norm, packed_positions, rms_norm, rotary_thd
from slime.train.packing import PackingRule
from slime.train.token_record import TokenRecord

CPU = torch.device("cpu")


def rule(tp: int = 1, cp: int = 1, cp_rank: int = 0, device: torch.device = CPU) -> PackingRule:
    return PackingRule(
        tensor_parallel_size=tp, sequence_parallel=tp > 1, cp_size=cp, cp_rank=cp_rank, device=device, tp_rank=0
    )


def test_each_row_predicts_its_response_token_and_nothing_is_padded() -> None:
    batch = make_batch(samples=5)
    packed = rule().pack(batch, alone([3, 0, 4]))
    assert packed.tokens.numel() == sum(len(batch.tokens[i]) - 1 for i in (3, 0, 4))
    expected = np.concatenate([batch.tokens[i][-int(batch.response_lengths[i]) :] for i in (3, 0, 4)])
    assert packed.targets.tolist() == expected.tolist()
    before = np.concatenate([batch.tokens[i][-int(batch.response_lengths[i]) - 1 : -1] for i in (3, 0, 4)])
    assert packed.tokens[0, packed.rows].tolist() == before.tolist()
    flat = np.concatenate([batch.tokens[i][-int(batch.response_lengths[i]) :] for i in range(5)])
    assert flat[packed.places.numpy()].tolist() == expected.tolist()
    assert packed.sequence_ids.bincount().tolist() == [int(batch.response_lengths[i]) for i in (3, 0, 4)]


def test_sequence_parallelism_pads_the_total_only() -> None:
    batch = make_batch(samples=5)
    plain, padded = rule().pack(batch, alone(range(5))), rule(tp=4).pack(batch, alone(range(5)))
    assert padded.tokens.numel() % 4 == 0
    assert 0 <= padded.tokens.numel() - plain.tokens.numel() < 4
    assert torch.equal(padded.rows, plain.rows)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (1, 2)])
def test_totals_of_all_ranks_are_equal_and_whole_chunks_where_they_must_be(tp: int, cp: int) -> None:
    batch, plan = make_batch(samples=5), [alone([0]), alone([1, 2, 3, 4])]
    own = replace(rule(tp, cp), equal_totals=True)
    longest = max(own.length(batch, one) for one in plan)
    few, many = (own.pack(batch, one, least=longest) for one in plan)
    assert few.tokens.numel() == many.tokens.numel()
    # of what a rank's layers see
    assert few.tokens.numel() // tp % 128 == 0 and few.tokens.numel() * cp - longest < 128 * tp * max(1, 2 * cp)
    plain = rule(tp, cp).pack(batch, plan[0])
    assert torch.equal(few.targets, plain.targets) and torch.equal(few.places, plain.places)
    assert few.routed.tokens == plain.routed.tokens


def test_routers_learn_the_part_of_the_step_that_a_micro_batch_is() -> None:
    batch = make_batch(samples=5)
    run = sum(len(batch.tokens[i]) - 1 for i in (3, 0))
    assert rule().pack(batch, alone([3, 0]), step_tokens=4 * run).routed.share == 0.25
    assert rule().pack(batch, alone([3, 0]), step_tokens=4 * run, counts=False).routed.share == 0.0
    assert rule().pack(batch, alone([3, 0])).routed.share == 0.0, "outside of training"


@pytest.mark.parametrize("samples", [[2], [3, 0]])
def test_recorded_routes_are_packed_as_the_tokens_and_padding_has_none(samples: list[int]) -> None:
    batch = make_batch(samples=5)
    routes = [np.full((len(tokens) - 1, 2, 3), i, dtype=np.uint8) for i, tokens in enumerate(batch.tokens)]
    ranks = [
        replace(rule(tp=4), tp_rank=rank).pack(batch, alone(samples), routes=[routes[i] for i in samples])
        for rank in range(4)
    ]
    found = torch.cat([rank.routed.routes for rank in ranks if rank.routed.routes is not None])
    lengths = [len(routes[i]) for i in samples]
    padding = -sum(lengths) % 4
    expected = np.repeat([*samples, -1], [*lengths, padding])
    assert found.shape[1:] == (2, 3) and (found == torch.from_numpy(expected)[:, None, None]).all()


def test_each_sequence_parallel_rank_learns_which_of_its_rows_pad() -> None:
    batch = make_batch(samples=5)
    samples = next([i] for i in range(5) if (len(batch.tokens[i]) - 1) % 4)
    run = len(batch.tokens[samples[0]]) - 1
    parts = [replace(rule(tp=4), tp_rank=rank).pack(batch, alone(samples)).routed.padding for rank in range(4)]
    rows = [row for part in parts if part is not None for row in part.tolist()]
    assert rows == [False] * run + [True] * (-run % 4)


def test_context_parallel_ranks_hold_every_row_once() -> None:
    batch = make_batch(samples=5)
    whole = rule().pack(batch, alone(range(5)))
    parts = [rule(cp=2, cp_rank=rank).pack(batch, alone(range(5))) for rank in range(2)]
    slots = torch.cat([part.slots for part in parts if part.slots is not None])
    targets = torch.cat([part.targets for part in parts])
    assert sorted(slots.tolist()) == list(range(whole.sequence_ids.numel()))
    assert torch.equal(targets[slots.argsort()], whole.targets)
    for rank, part in enumerate(parts):
        assert torch.equal(part.positions[0], packed_positions(part.packed.cu_seqlens_q, 2, rank))


class _Config:
    kv_channels, context_parallel_size = 8, 1
    normalization, layernorm_zero_centered_gamma = "RMSNorm", False
    params_dtype, sequence_parallel = torch.float32, False


@pytest.mark.parametrize("lengths", [[5], [7, 3, 40, 1, 38, 90, 12, 41], [6] * 9])
def test_packed_attention_equals_attention_sequence_by_sequence(lengths: list[int]) -> None:
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    weight = torch.randn(total, 32)
    packed = PackedSequences(cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0))
    out = PackedAttention(_Config())(q, k, v, None, packed_seq_params=packed)
    got = torch.autograd.grad((out * weight).sum(), (q, k, v))
    parts = []
    for a, b in itertools.pairwise(packed.cu_seqlens_q.tolist()):
        one = (t[a:b].transpose(0, 1)[None] for t in (q, k, v))
        parts.append(
            F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        )
    want = torch.cat(parts)
    assert (out - want).abs().max() < 1e-5
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), (q, k, v)), strict=True):
        assert (a - b).abs().max() < 1e-5


def test_many_similar_lengths_share_a_bucket_and_waste_stays_bounded() -> None:
    plan = plan_attention([20, 24, 19, 23, 22, 18], like=torch.empty(0))
    assert len(plan.buckets) == 1
    lengths = list(range(1, 400, 7))
    plan = plan_attention(lengths, like=torch.empty(0))
    assert len(plan.buckets) < 12
    slots = sum(bucket.count * bucket.queries for bucket in plan.buckets)
    assert slots < 1.25 * sum(lengths)


def test_zigzag_positions_split_a_sequence_into_balanced_halves() -> None:
    assert packed_positions(torch.tensor([0, 8]), 2, 0).tolist() == [0, 1, 6, 7]
    assert packed_positions(torch.tensor([0, 8]), 2, 1).tolist() == [2, 3, 4, 5]


def test_rotary_embedding_uses_positions_within_each_sequence() -> None:
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    angle = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.1])
    freqs = torch.cat([angle, angle], -1)[:, None, None, :]
    t = torch.randn(5, 2, 6, requires_grad=True)  # the last two of six are not rotated
    out = rotary_thd(t, ends, freqs)
    positions = [0, 1, 2, 0, 1]
    for row, position in enumerate(positions):
        for pair in range(2):
            cos, sin = angle[position, pair].cos(), angle[position, pair].sin()
            a, b = t[row, :, pair], t[row, :, pair + 2]
            assert torch.allclose(out[row, :, pair], a * cos - b * sin, atol=1e-6)
            assert torch.allclose(out[row, :, pair + 2], a * sin + b * cos, atol=1e-6)
    assert torch.equal(out[..., 4:], t[..., 4:])
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad((out * weight).sum(), t)
    (numeric,) = torch.autograd.functional.jvp(lambda x: (rotary_thd(x, ends, freqs) * weight).sum(), t, grad)[1:]
    assert numeric.item() == pytest.approx(grad.square().sum().item(), rel=1e-4)


@pytest.mark.parametrize("kind", [{}, {"rotary_interleaved": True}, {"multi_latent_attention": True, "mscale": 1.3}])
def test_every_kind_of_rotary_embedding_equals_megatron(kind: dict[str, Any]) -> None:
    # Not above: slime.train must be imported before megatron.core.
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    ends = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    angle = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    halves = torch.cat([angle, angle], -1)
    freqs = (angle.repeat_interleave(2, -1) if kind.get("rotary_interleaved") else halves)[:, None, None, :]
    t = torch.randn(9, 2, 8, requires_grad=True)
    weight = torch.randn(9, 2, 8)
    got = rotary_thd(t, ends, freqs, **kind)
    parts = [t[a:b].unsqueeze(1) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    want = torch.cat([_apply_rotary_pos_emb_bshd(part, freqs[: len(part)], **kind).squeeze(1) for part in parts])
    assert (got - want).abs().max() < 1e-6
    ours, theirs = (torch.autograd.grad((out * weight).sum(), t, retain_graph=True)[0] for out in (got, want))
    assert (ours - theirs).abs().max() < 1e-6


def test_nothing_that_the_device_has_is_waited_for() -> None:
    """On torch's device without memory, an operation whose result the host must know is an error."""
    nowhere = torch.device("meta")
    batch, record = make_batch(samples=5), TokenRecord(len(make_batch(samples=5).loss_masks.flat), nowhere)
    packed = rule(device=nowhere).pack(batch, alone(range(5)))
    tokens = packed.tokens.numel()
    query, key, value = (torch.empty(tokens, heads, 16, device=nowhere, requires_grad=True) for heads in (4, 2, 2))
    freqs = torch.empty(64, 1, 1, 16, device=nowhere)
    turned = [rotary_thd(t, packed.packed.cu_seqlens_q, freqs) for t in (query, key)]
    out = PackedAttention(_Config())(*turned, value, None, packed_seq_params=packed.packed)
    out.sum().backward()
    assert query.grad is not None and out.shape == (tokens, 64)
    mask = torch.ones(packed.sequence_ids.numel(), device=nowhere)
    record.add(packed, mask, {"logprob": mask})
    with pytest.raises(RuntimeError, match="meta"):
        packed.tokens.tolist()


@pytest.mark.parametrize("cp", [1, 2])
def test_the_host_knows_lengths_and_positions(cp: int) -> None:
    packed = rule(cp=cp, cp_rank=cp - 1).pack(make_batch(samples=5), alone(range(5))).packed
    assert [*packed.lengths] == packed.cu_seqlens_q.diff().tolist()
    assert packed.max_seqlen_q == max(packed.lengths)
    assert torch.equal(packed.cu_seqlens_q.slime_positions, packed_positions(packed.cu_seqlens_q, cp, cp - 1))


def test_values_may_have_another_size_than_keys() -> None:
    ends = torch.tensor([0, 5, 7], dtype=torch.int32)
    query, key, value = torch.randn(7, 4, 24), torch.randn(7, 4, 24), torch.randn(7, 4, 16)
    attention = PackedAttention(_Config(), k_channels=24)
    out = attention(query, key, value, None, packed_seq_params=PackedSequences(cu_seqlens_q=ends))
    for a, b in ((0, 5), (5, 7)):
        q, k, v = (x[a:b].transpose(0, 1) for x in (query, key, value))
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        assert (out[a:b] - want).abs().max() < 1e-6


def test_rms_norm_equals_torch_in_value_and_gradient() -> None:
    x, weight, scale = (
        torch.randn(9, 3, 16, requires_grad=True),
        torch.randn(16, requires_grad=True),
        torch.randn(9, 3, 16),
    )
    got, want = rms_norm(x, weight, 1e-5), F.rms_norm(x, (16,), weight, 1e-5)
    assert (got - want).abs().max() < 1e-6
    for a, b in zip(*(torch.autograd.grad((y * scale).sum(), (x, weight)) for y in (got, want)), strict=True):
        assert (a - b).abs().max() < 1e-5


def test_norm_marks_its_weight_for_sequence_parallel_reduction() -> None:
    config = _Config()
    config.sequence_parallel, config.layernorm_zero_centered_gamma = True, True
    norm = Norm(config, 16)
    assert norm.weight.sequence_parallel is True
    x = torch.randn(4, 16)
    assert torch.allclose(norm(x), F.rms_norm(x, (16,), torch.ones(16), 1e-5), atol=1e-6)
