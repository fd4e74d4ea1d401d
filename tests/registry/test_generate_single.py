"""`generate_single` in a generate function: its requests, and what is trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.registry.local_runs import build, run_config, write

from slime.errors import EngineError, PluginContractError, SlimeError
from slime.kit.sessions import generate_single
from slime.plugin import Generation, Sample, SamplingParams, Status
from slime.registry.contracts import Snapshot, check_generated

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("probed_here")]

#: the documented function, with the policy's own answers
DOCUMENTED = """
    from slime.kit.sessions import build_loss_mask, generate_single

    def extract_tool_call(response):
        return response if response.startswith("look") else None

    async def execute_tool(tool_call):
        return "42"

    def compute_reward(sample):
        return float("42" in sample.response)

    async def custom_generate(args, samples, evaluation: bool = False):
        for sample in samples:
            conversation = sample.prompt if isinstance(sample.prompt, list) else [
                {"role": "user", "content": sample.prompt}
            ]

            for turn in range(args.max_turns):
                response = await generate_single(conversation)

                tool_call = extract_tool_call(response)
                if tool_call:
                    tool_result = await execute_tool(tool_call)
                    conversation.append({"role": "assistant", "content": response})
                    conversation.append({"role": "tool", "content": tool_result})
                else:
                    sample.response = response
                    break

            sample.reward = compute_reward(sample)
            sample.loss_mask = build_loss_mask(sample)

        return samples
"""
ONE = "from slime.kit.sessions import *\nasync def generate(args, sample):\n"
SAMPLING = SamplingParams(max_new_tokens=60, temperature=0.5, sampling_seed=7)


class Turns:
    """A tokenizer with one token per character and a template that closes turns."""

    eos_token_id = ord(";")
    chat_template = "turns"
    all_special_ids = (ord(";"),)
    all_special_tokens = (";",)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(one) for one in ids if one != self.eos_token_id or not skip_special_tokens)

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        turns = "".join(f"{message['role'][0]}:{message['content'].strip()};" for message in messages)
        return turns + ("a:" if add_generation_prompt else "")


class Scripted:
    """Returns these answers in order, and records the requests."""

    def __init__(self, *answers: str, error: Exception | None = None, finish: str = "stop") -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.error, self.finish = error, finish

    async def generate(self, tokens: list[int], *_: object, **__: object) -> Generation:
        if self.error is not None:
            raise self.error
        self.asked.append("".join(map(chr, tokens)))
        answer = [ord(letter) for letter in self.answers.pop(0)]
        return Generation(answer, [-0.5] * len(answer), self.finish, ["3"])


def generate(folder: Path, source: str, policy: Scripted, prompt: Any = "q", **rollout: Any) -> list[Sample]:
    path = write(folder, "custom_generate.py", source)
    config = run_config(rollout={"custom_generate_function_path": str(path), "max_turns": 3, **rollout})
    generator = build(config, "generator", folder, tokenizer=Turns())
    text = f"u:{prompt};a:" if isinstance(prompt, str) else Turns().apply_chat_template(prompt) + "a:"
    sample = Sample(group_index=3, index=7, prompt=prompt, tokens=[ord(letter) for letter in text], label="42")
    asked = Snapshot.of(sample)
    return check_generated(asyncio.run(generator.generate(sample, SAMPLING, policy)), asked)


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q"}]])
def test_the_documented_function_trains_only_on_the_policys_tokens(tmp_path: Path, prompt: Any) -> None:
    # Rendering the answer again would trim its leading white space.
    policy = Scripted("look  ;", "it is 42;")
    [done] = generate(tmp_path, DOCUMENTED, policy, prompt)
    assert policy.asked == ["u:q;a:", "u:q;a:look  ;t:42;a:"]
    assert "".join(map(chr, done.tokens)) == "u:q;a:look  ;t:42;a:it is 42;"
    written = "".join(chr(token) for token, mask in zip(done.tokens[6:], done.loss_mask or [], strict=True) if mask)
    assert written == "look  ;it is 42;"
    assert (done.response, done.reward, done.status) == ("it is 42", 1.0, Status.COMPLETED)
    assert (done.weight_versions, done.prompt, done.rollout_id) == (["3"], prompt, 7)
    assert done.rollout_log_probs == [-0.5 if mask else 0.0 for mask in done.loss_mask or []]


def test_a_new_conversation_is_a_separate_sample(tmp_path: Path) -> None:
    source = ONE + (
        "    first = await generate_single('one')\n    sample.response = await generate_single('two')\n"
        "    sample.reward = 1.0\n    return sample"
    )
    first, second = generate(tmp_path, source, Scripted("x;", "y;"))
    assert ["".join(map(chr, sample.tokens)) for sample in (first, second)] == ["u:one;a:x;", "u:two;a:y;"]
    assert (first.response, second.response) == ("x", "y")
    assert {first.reward, second.reward, first.rollout_id, second.rollout_id} == {1.0, 7}


def test_a_conversation_without_room_is_truncated_and_kept(tmp_path: Path) -> None:
    source = ONE + (
        "    talk = [{'role': 'user', 'content': 'q'}]\n    sample.reward = 0.25\n    while True:\n"
        "        talk.append({'role': 'assistant', 'content': await generate_single(talk)})\n"
        "        talk.append({'role': 'user', 'content': 'go on'})"
    )
    [done] = generate(tmp_path, source, Scripted("x" * 40 + ";", "y" * 9 + ";"))
    assert (done.status, done.reward, done.response_length) == (Status.TRUNCATED, 0.25, 41 + 10 + 10)


def test_a_new_conversation_without_room_is_truncated_too(tmp_path: Path) -> None:
    source = ONE + (
        "    sample.reward = 0.25\n    await generate_single('q')\n    await generate_single('a question' * 20)"
    )
    [done] = generate(tmp_path, source, Scripted("x;"), rollout_max_context_len=40)
    assert (done.status, done.reward, done.response_length) == (Status.TRUNCATED, 0.25, 2)


def test_a_first_request_without_room_fails_with_the_reason(tmp_path: Path) -> None:
    source = ONE + "    await generate_single('q')"
    with pytest.raises(SlimeError, match="generate_single: the conversation has 6 tokens"):
        generate(tmp_path, source, Scripted("x;"), rollout_max_context_len=6)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sample.loss_mask = [1]", "loss_mask of 1 entries for a conversation of 2 tokens"),
        ("return [sample, Sample(response='y', status=Status.COMPLETED)]", "2 samples without tokens"),
    ],
)
def test_changes_that_contradict_the_recording_are_refused(tmp_path: Path, line: str, words: str) -> None:
    source = (
        "from slime.plugin import Sample, Status\n"
        + ONE
        + (f"    sample.response = await generate_single('q')\n    sample.reward = 1.0\n    {line}\n    return sample")
    )
    with pytest.raises(PluginContractError, match=words):
        generate(tmp_path, source, Scripted("x;"))


def test_a_custom_mask_may_only_remove_tokens(tmp_path: Path) -> None:
    source = DOCUMENTED.replace("build_loss_mask(sample)", "[0] * 12 + [1] * 9")
    [done] = generate(tmp_path, source, Scripted("look;", "it is 42;"))
    assert done.loss_mask == [0] * 12 + [1] * 9
    source = DOCUMENTED.replace("build_loss_mask(sample)", "[1] * 21")
    with pytest.raises(PluginContractError, match="is 1 on 7 tokens that the policy did not generate"):
        generate(tmp_path, source, Scripted("look;", "it is 42;"))


def test_engine_errors_are_not_attributed_to_the_function(tmp_path: Path) -> None:
    source = ONE + "    sample.response = await generate_single('q')\n    return sample"
    with pytest.raises(EngineError, match="gone"):
        generate(tmp_path, source, Scripted(error=EngineError("gone")))
    swallowed = ONE + (
        "    try:\n        await generate_single('q')\n    except Exception:\n        sample.response = 'no'\n"
        "    return sample"
    )
    with pytest.raises(EngineError, match="gone"):
        generate(tmp_path, swallowed, Scripted(error=EngineError("gone")))


def test_a_malformed_message_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SlimeError, match=r"generate_single: messages\[0\].role is 'robot'"):
        generate(tmp_path, ONE + "    await generate_single([{'role': 'robot', 'content': ''}])", Scripted())


def test_outside_a_generate_function_the_error_explains_its_use() -> None:
    with pytest.raises(SlimeError, match="outside of a generate function"):
        asyncio.run(generate_single("q"))


def test_an_aborted_answer_aborts_the_sample(tmp_path: Path) -> None:
    class Aborts:
        async def generate(self, *_: object, **__: object) -> Generation:
            return Generation([65], [-0.5], "abort", ["1"])

    [done] = generate(tmp_path, ONE + "    sample.response = await generate_single('q')\n    return sample", Aborts())
    assert done.status is Status.ABORTED
    assert done.failure == "the engine aborted the request: no reason given"
