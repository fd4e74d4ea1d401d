"""Samples of one prompt are packed with its tokens once; log-probs and gradients stay those of samples packed alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.model_folders import Folders
from tests.train.harness import RankLauncher, alone, make_batch, make_config, run_ranks
from tests.train.test_layouts import (
    LAYOUTS,
    TERMS,
    assert_close,
    put_gradients_in_weights,
    start_without_steps,
    untimed,
)

from slime.rollout.train_batch import Ragged, TrainBatch
from slime.train.attention import PackedAttention, PackedSequences, Prefix, plan_attention
from slime.train.micro_batches import PrefixGroup, can_share_prompts, group_by_prompt, plan_step
from slime.train.packing import PackingRule
from slime.train.predicting import PredictingModel

CPU = torch.device("cpu")
RULE = PackingRule(tensor_parallel_size=1, sequence_parallel=False, cp_size=1, cp_rank=0, device=CPU, tp_rank=0)
CONFIG = SimpleNamespace(kv_channels=8, context_parallel_size=1)


def shared_batch(samples: int = 9, **options: Any) -> TrainBatch:
    """Three samples of each prompt, which has 12 to 20 tokens."""
    return make_batch(samples=samples, group=3, prompt=(12, 20), same_prompts=True, **options)


def tokens_of(batch: TrainBatch) -> dict[int, float]:
    return {i: len(tokens) for i, tokens in enumerate(batch.tokens)}


# --- packing -----------------------------------------------------------------------------------------


def test_the_tokens_of_a_prompt_are_packed_once_and_each_row_predicts_the_same_as_alone() -> None:
    batch = shared_batch()
    prompt = len(batch.tokens[3]) - int(batch.response_lengths[3])
    unit = PrefixGroup((3, 4, 5), shared=prompt - 1)
    shared, plain = RULE.pack(batch, [unit, PrefixGroup((0,))]), RULE.pack(batch, alone([3, 4, 5, 0]))
    assert plain.tokens.numel() - shared.tokens.numel() == 2 * (prompt - 1)
    assert shared.samples == plain.samples == (3, 4, 5, 0)
    for name in ("targets", "sequence_ids", "places", "trained_indices"):
        assert torch.equal(getattr(shared, name), getattr(plain, name)), name
    for rows in ("tokens", "positions"):
        of_shared, of_plain = getattr(shared, rows)[0, shared.rows], getattr(plain, rows)[0, plain.rows]
        assert torch.equal(of_shared, of_plain), rows
    own = [int(batch.response_lengths[i]) for i in (3, 4, 5)]
    lengths = shared.packed.cu_seqlens_q.diff().tolist()
    assert lengths == [prompt - 1, *own, len(batch.tokens[0]) - 1]
    context = Prefix(0, prompt - 1)
    assert shared.packed.prefixes == (Prefix(), context, context, context, Prefix())
    assert shared.packed.max_seqlen_q == plain.packed.max_seqlen_q, "as many angles are needed"
    assert plain.packed.prefixes is None


# --- attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "owns"),
    [
        ([5], [[3, 3]]),
        ([6, 6, 9], [[4, 1, 9], [2, 2], [7, 30, 31, 5]]),
        ([40, 3], [[1, 1, 1], [1, 50]]),
        ([300, 200], [[1, 90], [90, 100]]),
    ],
    ids=str,
)
def test_attention_to_a_shared_prompt_equals_that_of_whole_sequences(prompts: list[int], owns: list[list[int]]) -> None:
    lengths, prefixes, wholes, start = [7], [Prefix()], [list(range(7))], 7
    for prompt, own in zip(prompts, owns, strict=True):
        first = list(range(start, start + prompt))
        lengths.append(prompt)
        prefixes.append(Prefix())
        wholes.append(first)
        start += prompt
        for length in own:
            lengths.append(length)
            prefixes.append(Prefix(first[0], prompt))
            wholes.append([*first, *range(start, start + length)])
            start += length
    q, k, v = (torch.randn(start, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    weight = torch.randn(start, 32)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed = PackedSequences(cu_seqlens_q=ends, prefixes=prefixes)
    ends.slime_positions = None  # type: ignore[attr-defined]  # nothing is rotated here
    out = PackedAttention(CONFIG)(q, k, v, None, packed_seq_params=packed)
    want = torch.zeros(start, 32)
    for whole, length in zip(wholes, lengths, strict=True):
        one = (t[whole].transpose(0, 1)[None] for t in (q, k, v))
        whole_out = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        rows = torch.tensor(whole[-length:])
        want = want.index_copy(0, rows, whole_out[-length:])
    assert (out - want).abs().max() < 1e-5
    got, expected = (torch.autograd.grad((one * weight).sum(), (q, k, v)) for one in (out, want))
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_prefixes_without_positions_are_refused() -> None:
    """Positions are kept on the tensor of ends; a copy of it has none, and everything would be rotated from 0 on."""
    packed = PackedSequences(cu_seqlens_q=torch.tensor([0, 3, 5]), prefixes=[Prefix(), Prefix(0, 3)])
    rows = torch.randn(5, 2, 8)
    with pytest.raises(AssertionError, match="count from 0"):
        PackedAttention(CONFIG)(rows, rows, rows, None, packed_seq_params=packed)


def test_samples_of_many_prompts_share_a_bucket_unless_their_masks_are_large() -> None:
    lengths, prefixes, start = [], [], 0
    for prompt in (20, 22, 24, 30):
        lengths += [prompt, 8, 8]
        prefixes += [Prefix(), Prefix(start, prompt), Prefix(start, prompt)]
        start += prompt + 16
    short = plan_attention(lengths, prefixes=prefixes, like=torch.empty(0))
    assert [(bucket.count, bucket.queries, bucket.keys) for bucket in short.buckets] == [(4, 30, 30), (8, 8, 38)]
    long = plan_attention(
        [1024, 900] * 2, prefixes=[Prefix(), Prefix(0, 1024), Prefix(), Prefix(1924, 1023)], like=torch.empty(0)
    )
    assert [bucket.count for bucket in long.buckets] == [2, 1, 1]
    assert all(bucket.mask is None or len(bucket.mask) == 1 for bucket in long.buckets)


# --- which samples -----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 999),
    group=st.integers(1, 6),
    part=st.sampled_from([0.05, 0.3, 1.0]),
    max_tokens=st.integers(20, 400),
    longest=st.integers(1, 40),
)
def test_every_sample_is_packed_once_with_those_of_its_prompt(
    seed: int, group: int, part: float, max_tokens: int, longest: int
) -> None:
    batch = make_batch(
        seed=seed, samples=12, group=group, prompt=(1, 30), response=(1, longest), same_prompts=True, masked=False
    )
    samples = [i for i in range(12) if i != seed % 12]
    max_cost = part * sum(tokens_of(batch)[i] for i in samples)
    found = group_by_prompt(batch, samples, tokens_of(batch), max_tokens=max_tokens, max_cost=max_cost)
    assert sorted(i for unit in found for i in unit.samples) == samples
    for unit in found:
        if not unit.shared:
            assert len(unit.samples) == 1
            continue
        first = batch.tokens[unit.samples[0]]
        for i in unit.samples:
            assert np.array_equal(batch.tokens[i][: unit.shared + 1], first[: unit.shared + 1])
            assert len(batch.tokens[i]) - int(batch.response_lengths[i]) == unit.shared + 1
        assert sum(tokens_of(batch)[i] for i in unit.samples) <= min(max_tokens, max_cost)


def whole_groups(batch: TrainBatch) -> list[PrefixGroup]:
    samples = range(len(batch.tokens))
    return group_by_prompt(batch, samples, tokens_of(batch), max_tokens=10**6, max_cost=10**6)


def test_prompts_are_shared_only_where_they_are_a_good_part_of_the_tokens() -> None:
    def shared(prompt: int, response: int) -> int:
        batch = make_batch(
            samples=4, group=2, prompt=(prompt, prompt), response=(response, response), same_prompts=True
        )
        return whole_groups(batch)[0].shared

    assert shared(64, 128) == 63
    assert shared(64, 1000) == 0, "attention with a mask would cost more than the other layers save"
    assert shared(1, 3) == 0, "the last token of a prompt belongs to each sample"
    assert shared(3000, 3000) == 0, "the mask would be too large"


def test_a_sample_with_too_large_a_mask_does_not_keep_others_from_sharing() -> None:
    batch = make_batch(samples=4, group=4, prompt=(600, 600), response=(500, 500), same_prompts=True)
    tokens, masks = list(batch.tokens), list(batch.loss_masks)
    tokens[2] = np.concatenate([tokens[2], np.full(4000, 9)])
    masks[2] = np.ones(len(masks[2]) + 4000)
    batch = replace(batch, tokens=Ragged.of(tokens, np.int32), loss_masks=Ragged.of(masks, np.float32))
    assert whole_groups(batch) == [PrefixGroup((2,)), PrefixGroup((0, 1, 3), 599)]


def test_groups_are_divided_where_ranks_would_be_out_of_balance() -> None:
    """Groups of 8, whose tokens are 39 of the prompt once and 10 for each sample."""

    def plan(groups: int, ranks: int) -> list[list[tuple[int, ...]]]:
        batch = make_batch(
            samples=8 * groups, group=8, prompt=(40, 40), response=(10, 10), same_prompts=True, masked=False
        )
        found = plan_step(
            batch,
            range(8 * groups),
            lambda tokens, _: float(tokens),
            share_prompts=True,
            num_ranks=ranks,
            max_tokens=10**6,
            micro_batch_size=None,
        )
        return [[unit.samples for [micro_batch] in [rank] for unit in micro_batch] for rank in found]

    assert plan(groups=2, ranks=2) == [[tuple(range(8))], [tuple(range(8, 16))]]
    assert plan(groups=1, ranks=2) == [[(0, 1, 2, 3)], [(4, 5, 6, 7)]]
    # Five whole groups on four ranks would be 238 tokens for one of them; parts of 5 and 3 are 227.
    sizes = [sorted(map(len, rank)) for rank in plan(groups=5, ranks=4)]
    assert sorted(sizes) == [[3, 3, 5], [3, 3, 5], [3, 5], [5, 5]]


def test_other_prompts_of_the_same_length_are_not_shared() -> None:
    batch = make_batch(samples=8, group=1, prompt=(9, 9))
    assert whole_groups(batch) == alone(range(8))


@pytest.mark.parametrize(
    ("change", "device"),
    [
        ({"context_parallel_size": 2}, "cpu"),
        ({"num_moe_experts": 4}, "cpu"),
        ({"use_transformer_engine": True}, "cpu"),
        ({"layer_specs": print}, "cpu"),
        ({}, "cuda"),
        (None, "cpu"),
    ],
    ids=str,
)
def test_prompts_are_not_shared_where_a_layer_knows_nothing_of_prefixes(
    change: dict[str, Any] | None, device: str
) -> None:
    transformer = SimpleNamespace(context_parallel_size=1, num_moe_experts=None)
    settings = SimpleNamespace(transformer=transformer, use_transformer_engine=False, layer_specs=None)
    for name, value in (change or {}).items():
        setattr(transformer if hasattr(transformer, name) else settings, name, value)
    assert can_share_prompts(settings, [], device) == (change is None)  # type: ignore[arg-type]  # only these fields are read


def test_prompts_are_not_shared_with_layers_that_predict_further_tokens() -> None:
    """Of a pipeline, only the last stage has them; no stage may share then."""
    settings = SimpleNamespace(
        transformer=SimpleNamespace(context_parallel_size=1, num_moe_experts=None),
        use_transformer_engine=False,
        layer_specs=None,
    )
    first_stage = PredictingModel.__new__(PredictingModel)
    assert not can_share_prompts(settings, [first_stage], "cpu")  # type: ignore[arg-type]  # only these fields are read


# --- with Megatron -----------------------------------------------------------------------------------


#: tokens that a rank computed, log-probs, metrics of a step and, on rank 0, its gradients
Step = tuple[int, Any, dict[str, float], dict[str, torch.Tensor]]


def one_step(launcher: RankLauncher, config: Any, batch: TrainBatch) -> Step:
    rank = start_without_steps(launcher, config)
    packed = rank.policy._micro_batches(batch, list(range(len(batch.tokens))))
    log_probs = rank.log_probs(batch)
    metrics = rank.train(batch)
    found = put_gradients_in_weights(rank)
    rank.close()
    return sum(one.tokens.numel() for one in packed), log_probs, untimed(metrics), found


def steps_of(folder: Path, layout: str, options: dict[str, Any], share: bool) -> list[Step]:
    """`one_step` on each rank."""
    world_size, sizes = LAYOUTS.get(layout, (1, {}))
    config = make_config(
        folder,
        world_size=world_size,
        megatron=sizes | {"use_distributed_optimizer": False} | options,
        max_tokens_per_gpu=100,
        share_prompts=share,
        **TERMS,
    )
    return run_ranks(one_step, world_size, config, shared_batch(rollout_log_probs=True))


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("llama", "one rank", {"recompute_activations": True}),
        ("qwen3", "one rank", FULL),
        ("qwen3", "tensor 2, sequence", {}),
        ("qwen3", "pipeline 2, virtual 2", {}),
        ("qwen3", "data 2", {}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_samples_packed_alone(
    family: str, layout: str, options: dict[str, Any], model_folder: Folders
) -> None:
    shared, alone_ = (
        steps_of(model_folder(family, num_hidden_layers=4), layout, options, share) for share in (True, False)
    )
    for (tokens, log_probs, metrics, _), (all_tokens, want, expected_metrics, _) in zip(shared, alone_, strict=True):
        assert tokens < 0.8 * all_tokens
        assert max(np.abs(a - b).max() for a, b in zip(log_probs, want, strict=True)) < 2e-6
        assert_close(metrics, expected_metrics, skip=("micro_batches",))
    for name, gradient in alone_[0][3].items():
        assert gradient.abs().max() > 1e-4, name
        assert (shared[0][3][name] - gradient).abs().max() < 1e-5, name


@pytest.mark.engine
def test_half_precision_is_as_near_to_single_precision_as_without(model_folder: Folders) -> None:
    folder = model_folder("qwen3", num_hidden_layers=4)
    [exact] = steps_of(folder, "one rank", {}, share=False)
    off = [steps_of(folder, "one rank", {"bf16": True}, share)[0] for share in (True, False)]

    def distance(one: Step) -> float:
        errors = [(one[3][name].float() - gradient).norm() / gradient.norm() for name, gradient in exact[3].items()]
        return float(torch.stack(errors).mean())

    assert off[0][0] < 0.8 * off[1][0]
    assert distance(off[0]) < 1.2 * distance(off[1])
