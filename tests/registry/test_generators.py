"""slime's generators: the samples they return, for every finish reason."""

# ruff: noqa: ARG002 - stand-ins for a policy keep the contract's signature
from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.plugin import Context, Generation, NoOptions, PolicyClient, Sample, SamplingParams, SpecInfo, Status
from slime.registry.contracts import Snapshot, check_generated
from slime.testing.samples import make_tokenizer
from slime_generators.options import SupervisedOptions
from slime_generators.single_turn import SingleTurn
from slime_generators.supervised import Supervised

SAMPLING = SamplingParams(max_new_tokens=8)
EOS = 0


class Letters:
    """A tokenizer of one id per character, and an end-of-sequence token 0."""

    eos_token_id: int | None = EOS

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i == EOS))


class Scripted:
    """A policy that returns one prepared answer and records the requests."""

    def __init__(self, reason: str = "stop", meta: Mapping[str, Any] | None = None) -> None:
        self.answer = Generation([52, 50, EOS], [-0.5, -0.25, -0.125], reason, ["3", "4"], meta or {})
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        self.asked.append((list(tokens), sampling))
        return self.answer


class Unasked:
    """A policy that must not be called."""

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        raise AssertionError("asked")


def context(tokenizer: Any = None) -> Context:
    return Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"), tokenizer=tokenizer or Letters())


def pending(**fields: Any) -> Sample:
    return Sample(
        **{"group_index": 1, "index": 5, "prompt": "6*7=", "tokens": [54, 42, 55, 61], "label": "42", **fields}
    )


def single_turn(policy: PolicyClient, sample: Sample) -> Sample:
    asked = Snapshot.of(sample)
    made = asyncio.run(SingleTurn(NoOptions(), context()).generate(sample, SAMPLING, policy))
    [checked] = check_generated(made, asked)
    return checked


def supervised(sample: Sample, *, limit: int = 8, **options: Any) -> Sample:
    asked = Snapshot.of(sample)
    generator = Supervised(SupervisedOptions(**options), context())
    made = asyncio.run(generator.generate(sample, SamplingParams(max_new_tokens=limit), Unasked()))
    [checked] = check_generated(made, asked)
    return checked


def test_single_turn_calls_the_policy_once_with_the_prompts_tokens() -> None:
    policy = Scripted()
    single_turn(policy, pending())
    assert policy.asked == [([54, 42, 55, 61], SAMPLING)]


def test_the_answer_is_kept_token_for_token() -> None:
    sample = single_turn(Scripted(), pending())
    assert sample.tokens == [54, 42, 55, 61, 52, 50, EOS]
    assert (sample.response, sample.response_length) == ("42", 3)
    assert sample.rollout_log_probs == [-0.5, -0.25, -0.125]
    assert sample.loss_mask == [1, 1, 1]
    assert sample.weight_versions == ["3", "4"]
    assert (sample.finish_reason, sample.status, sample.failure) == ("stop", Status.COMPLETED, None)
    assert (sample.group_index, sample.index, sample.prompt, sample.label) == (1, 5, "6*7=", "42")
    assert sample.spec_info == SpecInfo()


def test_an_answer_at_the_length_limit_is_truncated() -> None:
    sample = single_turn(Scripted("length"), pending())
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, "length")


def test_an_abort_keeps_the_partial_tokens_and_the_engines_reason() -> None:
    meta = {"finish_reason": {"type": "abort", "message": "weights are being updated"}}
    sample = single_turn(Scripted("abort", meta), pending())
    assert sample.status is Status.ABORTED
    assert sample.failure == "the engine aborted the request: weights are being updated"
    assert sample.response_length == 3


def test_an_interrupted_response_continues_up_to_its_limit() -> None:
    first, then = Scripted("abort", {"spec_verify_ct": 1, "spec_num_correct_drafts": 2}), Scripted("length")
    sample = single_turn(first, pending())
    sample.status, sample.failure = Status.PENDING, None
    sample.loss_mask = [0, 0, 0]
    then.answer.weight_versions.append("5")
    sample = single_turn(then, sample)
    assert then.asked[0][0] == [54, 42, 55, 61, 52, 50, EOS]
    assert then.asked[0][1].max_new_tokens == SAMPLING.max_new_tokens - 3
    assert sample.tokens == [54, 42, 55, 61, 52, 50, EOS, 52, 50, EOS]
    assert (sample.response, sample.response_length, sample.status) == ("4242", 6, Status.TRUNCATED)
    assert sample.loss_mask == [0, 0, 0, 1, 1, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, -0.125] * 2
    assert sample.weight_versions == ["3", "4", "5"]
    assert sample.spec_info.spec_accept_token_num == 2


def test_a_continued_response_keeps_the_routed_experts_of_its_beginning() -> None:
    first, then = Scripted("abort"), Scripted("length")
    prompt = len(pending().tokens)
    first.answer = replace(first.answer, routed_experts=np.full((prompt + 3 - 1, 1, 1), 1, np.uint8))
    then.answer = replace(then.answer, routed_experts=np.full((prompt + 6 - 1, 1, 1), 2, np.uint8))
    sample = single_turn(first, pending())
    sample.status, sample.failure = Status.PENDING, None
    sample = single_turn(then, sample)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [1] * (prompt + 2) + [2] * 3


def test_a_response_over_a_lowered_limit_is_truncated_without_a_request() -> None:
    sample = pending(tokens=[54, 42, *range(70, 78)], response_length=8, rollout_log_probs=[-1.0] * 8)
    assert single_turn(Unasked(), sample).status is Status.TRUNCATED


def test_an_unknown_finish_reason_is_visible_and_not_trained_on() -> None:
    sample = single_turn(Scripted("asteroid"), pending())
    assert (sample.status, sample.failure) == (Status.FAILED, "unknown finish reason 'asteroid'")


def test_speculative_decoding_is_recorded_if_the_engine_reports_it() -> None:
    meta = {
        "spec_verify_ct": 2,
        "spec_num_correct_drafts": 5,
        "spec_num_proposed_drafts": 6,
        "completion_tokens": 3,
    }
    assert single_turn(Scripted("stop", meta), pending()).spec_info == SpecInfo(5, 6, 2, 3)


def test_supervised_responds_with_the_label_and_the_end_token() -> None:
    sample = supervised(pending())
    assert sample.tokens == [54, 42, 55, 61, 52, 50, EOS]
    assert (sample.response, sample.response_length, sample.loss_mask) == ("42", 3, [1, 1, 1])
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "stop")
    assert sample.rollout_log_probs is None and sample.weight_versions == []


def test_supervised_may_omit_the_end_token() -> None:
    assert supervised(pending(), append_eos=False).tokens[4:] == [52, 50]


def test_supervised_truncates_long_labels() -> None:
    sample = supervised(pending(label="12345"), limit=3)
    assert (sample.response, sample.response_length) == ("123", 3)
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, "length")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"label": None}, "sample 5 has no label"), ({"tokens": []}, "sample 5 has no prompt tokens")],
)
def test_supervised_refuses_samples_without_label_or_prompt(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        supervised(pending(**fields))


def test_single_turn_refuses_a_sample_without_prompt_tokens() -> None:
    with pytest.raises(ValueError, match="sample 5 has no prompt tokens"):
        single_turn(Scripted(), pending(tokens=[]))


@pytest.mark.parametrize("label", ["42", " 6 * 7\n", "ünknown ☃", ""])
def test_a_supervised_label_has_the_tokens_that_transformers_gives(label: str) -> None:
    tokenizer = make_tokenizer()
    generator = Supervised(SupervisedOptions(), context(tokenizer))
    [sample] = asyncio.run(generator.generate(pending(label=label), SamplingParams(max_new_tokens=16), Unasked()))
    told = [*tokenizer.encode(label, add_special_tokens=False), tokenizer.eos_token_id]
    assert sample.tokens[-sample.response_length :] == told


def test_supervised_needs_an_end_token_by_default() -> None:
    endless = Letters()
    endless.eos_token_id = None
    with pytest.raises(ValueError, match="no end-of-sequence token; set append_eos to false"):
        Supervised(SupervisedOptions(), context(endless))
    Supervised(SupervisedOptions(append_eos=False), context(endless))
