"""The contracts of both components, and credits by hand."""

import asyncio
import math

import numpy as np
from slime_credit_by_turn import ByTurn, JudgedTurns, slime_register_estimators, slime_register_rewards

from slime.kit.chat import ChatTemplate, Conversation
from slime.plugin import Generation, Group, NoOptions, Reward, Sample, Status
from slime.plugin.columns import check_columns
from slime.rollout.train_batch import TrainBatch
from slime.testing import (
    assert_estimator_contract,
    assert_light_import,
    assert_reward_contract,
    make_batch,
    make_context,
    make_tokenizer,
)
from slime.testing.samples import CHARACTERS, STOP, encode, make_sample
from slime.train.advantages import estimate

NAN = math.nan


def conversation(answer: str, *heard: str) -> Sample:
    """`40 gets 3 pays 1=`, with one token a turn and two between turns."""
    source = [0, 1, 1] * len(heard) + [0]
    messages = [
        message
        for text in heard
        for message in ({"role": "assistant", "content": "call"}, {"role": "tool", "content": text})
    ]
    sample = make_sample(response="x" * len(source), label="42")
    sample.response = answer
    sample.metadata = {
        "start": 40,
        "changes": [3, -1],
        "messages": [*messages, {"role": "assistant", "content": answer}],
    }
    sample.columns = {"source": np.array(source, dtype=np.float32)} if heard else {}
    return sample


def credits_of(reward: Reward) -> list[float]:
    return [float(value) for value in reward.columns["credit"] if not math.isnan(value)]


def test_each_turn_is_judged_by_what_it_could_know() -> None:
    cases = {
        "guessed": (conversation("42"), 1.0, [0.0]),
        "all right": (conversation("42", "43", "42"), 1.0, [1.0, 1.0, 1.0]),
        "ignored the result": (conversation("41", "43", "42"), 0.0, [1.0, 1.0, 0.0]),
        "only the first step wrong": (conversation("36", "37", "36"), 0.0, [0.0, 1.0, 1.0]),
        "only the second step wrong": (conversation("44", "43", "44"), 0.0, [1.0, 0.0, 1.0]),
        "a call that failed": (conversation("39", "error: no", "39"), 0.0, [0.0, 1.0, 1.0]),
        "a fraction": (conversation("39", "0.5", "39"), 0.0, [0.0, 1.0, 1.0]),
        "stopped too early": (conversation("43", "43"), 0.0, [1.0, 0.0]),
        "one step too many": (conversation("42", "43", "42", "42"), 1.0, [1.0, 1.0, 0.0, 1.0]),
    }
    judge = JudgedTurns(NoOptions(), make_context())
    for what, (sample, value, credits) in cases.items():
        [reward] = asyncio.run(judge.score([sample]))
        assert (reward.value, credits_of(reward)) == (value, credits), what


def test_a_turn_is_compared_with_the_same_turn_of_its_siblings() -> None:
    credit = [[0.0, NAN, NAN], [1.0, NAN, 0.0], [1.0, NAN, 1.0], [1.0, NAN, 1.0]]
    masks = [[1, 0, 0], [1, 0, 1], [1, 0, 1], [1, 0, 1]]
    batch = make_batch([[0.0, 0.0, 1.0, 1.0]], masks=masks, columns={"credit": credit})
    found = ByTurn(NoOptions(), make_context()).advantages(batch).advantages
    # first turns: mean 3/4, std 1/2; second ones: mean 2/3, std sqrt(1/3)
    third = math.sqrt(1 / 3)
    expected = [[-1.5, 0, 0], *([0.5, 0, (c - 2 / 3) / third] for c in (0, 1, 1))]
    assert np.allclose([row.tolist() for row in found], expected, atol=1e-5)


def test_conversations_of_the_engine_are_credited_turn_by_turn() -> None:
    """From a conversation, as `tool_loop` keeps it, to the advantage of each token."""
    template = ChatTemplate(make_tokenizer())

    def said(text: str) -> Generation:
        tokens = [*encode(text), CHARACTERS.index(STOP)]
        return Generation(tokens, [-0.5] * len(tokens), "stop", ["1"])

    def talk(index: int, *turns: str) -> Sample:
        """Turns of the model and of the tool alternate; the last is an answer."""
        conversation = Conversation(template, encode("40+2="))
        for number, text in enumerate(turns):
            if number % 2:
                conversation.add([{"role": "tool", "content": text}])
            else:
                conversation.generated(said(text))
        facts = {"start": 40, "changes": [2]}
        sample = Sample(prompt="40+2=", label="42", index=index, group_index=0, metadata=facts, status=Status.PENDING)
        return conversation.to_sample(sample)

    samples = [talk(0, "41"), talk(1, "40+2", "42", "42"), talk(2, "40+2", "42", "40")]
    rewards = asyncio.run(JudgedTurns(NoOptions(), make_context()).score(samples))
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward, sample.columns = (
            reward.value,
            sample.columns | check_columns(reward.columns, sample.response_length),
        )
    batch = TrainBatch.from_groups([Group(0, samples)], rollout=0, num_steps=1)
    found = estimate(ByTurn(NoOptions(), make_context()), batch, needs={"credit"}, passive=True).advantages
    first = [float(part[0]) for part in found]
    assert np.allclose(first, [-1.154699, 0.577350, 0.577350], atol=1e-5)
    assert np.allclose([float(part[-1]) for part in found[1:]], [0.707106, -0.707106], atol=1e-5)
    for part, mask in zip(found, batch.loss_masks, strict=True):
        assert ((part != 0).numpy() == (mask > 0)).all()


def test_equal_credits_teach_nothing() -> None:
    batch = make_batch([[0.0, 1.0]], columns={"credit": [[0.3, NAN], [0.3, NAN]]})
    assert not any(part.any() for part in ByTurn(NoOptions(), make_context()).advantages(batch).advantages)


def test_contracts() -> None:
    [reward], [estimator] = slime_register_rewards(), slime_register_estimators()
    assert_reward_contract(JudgedTurns(NoOptions(), make_context()), spec=reward)
    assert_estimator_contract(ByTurn(NoOptions(), make_context()), spec=estimator)


def test_import_is_light() -> None:
    assert_light_import("slime_credit_by_turn")
