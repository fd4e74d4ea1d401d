"""Conversations: tokens, mask and log-probs as the engine saw them, and the sample made from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime.kit.chat import Answers, ChatTemplate, Conversation
from slime.plugin import Generation, Sample, SpecInfo, Status
from slime.testing import make_tokenizer
from slime.testing.samples import CHARACTERS, START, STOP, encode

END = CHARACTERS.index(STOP)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(make_tokenizer())


def answer(text: str, *, end: bool = True, reason: str = "stop", version: str = "1", **meta: Any) -> Generation:
    tokens = [*encode(text), *([END] if end else [])]
    return Generation(tokens, [-0.5 - n for n in range(len(tokens))], reason, [version], meta)


def test_tokens_mask_and_log_probs_grow_together(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    assert talk.generated(answer("ab")) == "ab"
    talk.add([{"role": "tool", "content": "4"}])
    new = talk.response_length - 3
    talk.generated(answer("c", end=False))
    assert talk.loss_mask == [1, 1, 1] + [0] * new + [1]
    assert talk.log_probs == [-0.5, -1.5, -2.5] + [0.0] * new + [-0.5]
    assert talk.tokens[:4] == [*encode("qab"), END]
    assert talk.prompt_length == 1
    assert talk.last_answer == encode("c")


def test_messages_after_the_last_answer_are_left_out_of_the_sample(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    talk.generated(answer("ab"))
    talk.add([{"role": "tool", "content": "4"}])
    sample = talk.to_sample(Sample(prompt="q", index=3))
    assert sample.tokens == [*encode("qab"), END]
    assert sample.response_length == len(sample.loss_mask or []) == len(sample.rollout_log_probs or []) == 3
    assert sample.response == "ab"
    assert sample.metadata == {"messages": [{"role": "assistant", "content": "ab"}]}


def test_the_sample_holds_the_engines_reports_of_all_turns(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    counts = {"spec_num_correct_drafts": 2, "spec_num_proposed_drafts": 4, "completion_tokens": 3, "cached_tokens": 5}
    talk.generated(answer("ab", version="1", spec_verify_ct=1, **counts))
    talk.add([{"role": "tool", "content": "4"}])
    talk.generated(answer("c", version="2", spec_verify_ct=2, **counts))
    talk.add([{"role": "tool", "content": "5"}])
    talk.generated(answer("d", version="2", reason="length"))
    like = Sample(prompt="q", index=3, group_index=1, label="d", metadata={"row": 7}, metrics={"mine": 1.0})
    sample = talk.to_sample(like)
    assert sample.weight_versions == ["1", "2"]
    assert sample.spec_info == SpecInfo(4, 8, 3, 6)
    assert sample.metrics == {"mine": 1.0, "cached_tokens": 10.0}
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, "length")
    assert (sample.index, sample.group_index, sample.label, sample.metadata["row"]) == (3, 1, "d", 7)
    assert like.metrics == {"mine": 1.0}
    assert like.metadata == {"row": 7}


def test_routed_experts_have_one_row_for_each_computed_token(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("qq"))
    routed = np.arange(4 * 6, dtype=np.uint8).reshape(4, 3, 2)  # 4 computed tokens, 3 layers x 2 experts
    talk.generated(replace(answer("ab"), routed_experts=routed))
    assert np.array_equal(talk.to_sample(Sample()).rollout_routed_experts, routed)


def test_earlier_routed_experts_stay_when_later_answers_report_others(template: ChatTemplate) -> None:
    def reported(text: str, value: int) -> Generation:
        rows = len(talk.tokens) + len(text) - 1
        return replace(answer(text, end=False), routed_experts=np.full((rows, 1, 1), value, dtype=np.uint8))

    talk = Conversation(template, encode("qq"))
    talk.generated(reported("ab", 1))
    other = talk.fork()
    talk.add([{"role": "tool", "content": "4"}])
    begun = len(talk.tokens)
    talk.generated(reported("cde", 2))
    sample = talk.to_sample(Sample())
    assert sample.rollout_routed_experts is not None
    # The second request was the first in which an engine read the last token of the first answer.
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [1] * 3 + [2] * (begun + 3 - 1 - 3)
    assert np.array_equal(other.to_sample(Sample()).rollout_routed_experts, np.full((3, 1, 1), 1))


def test_routed_experts_of_later_tokens_are_added_where_they_belong(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("qq"))
    talk.generated(replace(answer("ab"), routed_experts=np.full((4, 1, 1), 1, np.uint8)))
    assert talk.answers.routed_tokens == 4
    talk.add([{"role": "tool", "content": "4"}])
    for start, known in ((4, 0), (2, 2)):  # exactly what is missing, and more
        branch = talk.fork()
        new = len(talk.tokens) + 3 - 1 - start
        rows = np.array([9] * known + [2] * (new - known), np.uint8).reshape(new, 1, 1)
        branch.generated(replace(answer("cd"), routed_experts=rows, routed_from=start))
        routed = branch.to_sample(Sample()).rollout_routed_experts
        assert routed is not None and routed[:, 0, 0].tolist() == [1] * 4 + [2] * (len(talk.tokens) + 3 - 1 - 4)


def test_a_sample_has_no_routed_experts_if_some_are_unknown(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("qq"))
    talk.generated(replace(answer("ab"), routed_experts=np.zeros((4, 1, 1), np.uint8)))
    talk.add([{"role": "tool", "content": "4"}])
    talk.generated(answer("c"))
    assert talk.to_sample(Sample()).rollout_routed_experts is None


@pytest.mark.parametrize(
    ("reason", "status", "failure"),
    [("abort", Status.ABORTED, "the engine aborted the request: too hot"), ("odd", Status.FAILED, "unknown finish")],
)
def test_an_answer_that_did_not_end_well_is_not_trained_on(
    template: ChatTemplate, reason: str, status: Status, failure: str
) -> None:
    talk = Conversation(template, encode("q"))
    talk.generated(answer("ab", reason=reason, finish_reason={"type": reason, "message": "too hot"}))
    sample = talk.to_sample(Sample())
    assert sample.status is status
    assert failure in (sample.failure or "")


def test_a_fork_is_independent_and_trains_only_on_its_own_answers(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    talk.generated(answer("ab"))
    other, both = talk.fork(), talk.fork(train_past=True)
    for branch, text in ((talk, "x"), (other, "y"), (both, "z")):
        branch.add([{"role": "user", "content": "?"}])
        branch.generated(answer(text, version=text))
    first, second, third = (branch.to_sample(Sample()) for branch in (talk, other, both))
    assert [sample.response for sample in (first, second, third)] == ["x", "y", "z"]
    assert first.loss_mask is not None and second.loss_mask is not None
    assert first.loss_mask[:3] == [1, 1, 1]
    assert second.loss_mask[:3] == [0, 0, 0]
    assert second.loss_mask[3:] == first.loss_mask[3:] == (third.loss_mask or [])[3:]
    assert (second.rollout_log_probs or [])[:3] == [0.0, 0.0, 0.0]
    assert third.loss_mask == first.loss_mask
    assert [sample.weight_versions for sample in (first, second)] == [["1", "x"], ["1", "y"]]


def test_the_sample_has_the_prompt_that_its_tokens_were_made_from(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"), prompt=[{"role": "user", "content": "Q"}])
    talk.generated(answer("a"))
    assert talk.to_sample(Sample(prompt="q")).prompt == [{"role": "user", "content": "Q"}]


def test_messages_and_samples_need_an_answer_first(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    with pytest.raises(ValueError, match="messages must follow an answer"):
        talk.add([{"role": "user", "content": "?"}])
    with pytest.raises(ValueError, match="sample 7: the policy has not answered"):
        talk.to_sample(Sample(index=7))
    talk.generated(answer("a"))
    talk.add([{"role": "user", "content": "?"}])
    with pytest.raises(ValueError, match="all messages of a turn in one call"):
        talk.add([{"role": "user", "content": "!"}])


def test_each_token_has_its_source(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    talk.generated(answer("ab"))
    talk.add([{"role": "tool", "content": "<|im_end|>"}])  # not the control token: its text
    talk.generated(answer("c", end=False))
    sample = talk.to_sample(Sample(prompt="q", index=3))
    # Of the template are the headers of both turns too, not only their control tokens.
    parts = [("ab" + STOP, 0), (f"\n{START}tool\n", 2), ("<|im_end|>", 1), (f"{STOP}\n{START}assistant\n", 2), ("c", 0)]
    text = "".join(CHARACTERS[token] for token in sample.tokens[1:])
    assert text == "".join(part for part, _ in parts)
    lengths = [len(part.replace(STOP, "!").replace(START, "!")) for part, _ in parts]
    lengths[2] = len("<|im_end|>")
    expected = [source for length, (_, source) in zip(lengths, parts, strict=True) for _ in range(length)]
    assert sample.columns["source"].tolist() == expected
    assert "weight_version" not in sample.columns


def test_an_answer_alone_needs_no_sources(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    talk.generated(answer("ab"))
    assert talk.to_sample(Sample(prompt="q")).columns == {}


def test_each_token_of_several_weight_versions_has_its_own(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    talk.generated(answer("a", version="3"))
    talk.add([{"role": "tool", "content": "4"}])
    between = talk.response_length - 2
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    last = replace(answer("bcd", end=False), weight_versions=["3", "4"], meta={"weight_versions": spans})
    talk.generated(last)
    versions = talk.to_sample(Sample(prompt="q")).columns["weight_version"]
    assert versions[:2].tolist() == [3, 3]
    assert np.isnan(versions[2 : 2 + between]).all()
    assert versions[2 + between :].tolist() == [3, 4, 4]


def test_versions_of_tokens_are_left_out_if_the_engine_does_not_tell_them(template: ChatTemplate) -> None:
    talk = Conversation(template, encode("q"))
    talk.generated(replace(answer("abc"), weight_versions=["3", "4"]))
    assert talk.to_sample(Sample(prompt="q")).columns == {}


def test_a_continued_response_keeps_the_versions_of_its_beginning() -> None:
    first = Answers()
    first.add(answer("ab", end=False, version="3"))
    sample = Sample(tokens=encode("qab"), response_length=2)
    first.fill(sample)
    assert sample.columns == {}
    for text, version in (("c", "4"), ("de", "6")):
        answers = Answers.of(sample)
        answers.add(answer(text, end=False, version=version))
        sample.tokens, sample.response_length = sample.tokens + encode(text), sample.response_length + len(text)
        answers.fill(sample)
    assert sample.columns["weight_version"].tolist() == [3, 3, 4, 6, 6]
