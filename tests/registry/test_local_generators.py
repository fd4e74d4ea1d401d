"""`--custom-generate-function-path`: both shapes, tokens, texts and rewards."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.registry.local_runs import Letters, build, run_config, write

from slime.errors import PluginContractError
from slime.plugin import Generation, Sample, SamplingParams, Status
from slime.registry.contracts import Snapshot, check_generated

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("probed_here")]

DOCUMENTED = '''
    async def generate_single(conversation):
        return "look" if len(conversation) == 1 else "found: " + conversation[-1]["content"]

    def extract_tool_call(response):
        return response if response == "look" else None

    async def execute_tool(tool_call):
        return "42"

    def compute_reward(sample):
        return float("42" in sample.response)

    def build_loss_mask(sample):
        return [1] * len(sample.response)

    async def custom_generate(args, samples, evaluation: bool = False):
        """Custom generation function for multi-turn interactions."""
        for sample in samples:
            conversation = sample.prompt if isinstance(sample.prompt, list) else [
                {"role": "user", "content": sample.prompt}
            ]

            for turn in range(args.max_turns):
                # Generate response
                response = await generate_single(conversation)

                # Check for tool call
                tool_call = extract_tool_call(response)
                if tool_call:
                    # Execute tool
                    tool_result = await execute_tool(tool_call)
                    conversation.append({"role": "assistant", "content": response})
                    conversation.append({"role": "tool", "content": tool_result})
                else:
                    # Final response
                    sample.response = response
                    break

            # Compute reward
            sample.reward = compute_reward(sample)
            # Set loss mask (1 for model tokens, 0 for tool responses)
            sample.loss_mask = build_loss_mask(sample)

        return samples
'''
BY_POLICY = """
    from slime.data import Sample

    async def generate(args, sample: Sample, sampling_params, policy, tokenizer, sampling, evaluation=False):
        assert sampling_params == {"max_new_tokens": 5, "temperature": 0.5, "top_p": 1.0, "top_k": -1}
        answer = await policy.generate(sample.tokens, sampling)
        sample.tokens = sample.tokens + answer.tokens
        sample.response_length = len(answer.tokens)
        sample.response = tokenizer.decode(answer.tokens)
        sample.rollout_log_probs = answer.log_probs
        sample.status = Sample.Status.COMPLETED
        sample.reward = float(evaluation)
        return sample
"""
SAMPLING = SamplingParams(max_new_tokens=5, temperature=0.5)


class Policy:
    async def generate(self, *_: object, **__: object) -> Generation:
        return Generation([65, 66], [-0.5, -0.25], "stop", ["1"])


def pending(prompt: Any = "ab", text: str = "ab") -> Sample:
    return Sample(group_index=3, index=7, prompt=prompt, tokens=[ord(letter) for letter in text], label="42")


def generate(folder: Path, source: str, sample: Sample, sampling: SamplingParams = SAMPLING, **more: Any) -> Any:
    path = write(folder, "custom_generate.py", source)
    rollout = {"custom_generate_function_path": str(path), "max_turns": 3}
    generator = build(run_config(rollout=rollout, **more), "generator", folder)
    return asyncio.run(generator.generate(sample, sampling, Policy()))


def test_the_documented_function_works_and_its_text_is_tokenized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sample = pending()
    asked = Snapshot.of(sample)
    with caplog.at_level(logging.WARNING):
        [done] = check_generated(generate(tmp_path, DOCUMENTED, sample), asked)
    assert (done.response, done.reward, done.status) == ("found: 42", 1.0, Status.COMPLETED)
    assert done.tokens == Letters().encode("abfound: 42", add_special_tokens=False)
    assert (done.response_length, done.rollout_log_probs) == (9, None)
    assert "returns text without tokens" in caplog.text


def test_a_response_without_text_is_complete(tmp_path: Path) -> None:
    """The text of an end token alone is empty, and the function may leave the status to slime."""
    source = BY_POLICY.replace("tokenizer.decode(answer.tokens)", '""').replace(
        "sample.status = Sample.Status.COMPLETED", "sample.metadata = {**sample.metadata, 'seen': True}"
    )
    sample = pending()
    asked = Snapshot.of(sample)
    [done] = check_generated(generate(tmp_path, source, sample), asked)
    assert (done.status, done.response, done.response_length) == (Status.COMPLETED, "", 2)


def test_the_conversation_so_far_is_the_prompt_of_the_last_answer(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}]
    sample = pending(chat, "user:q;")
    asked = Snapshot.of(sample)
    [done] = check_generated(generate(tmp_path, DOCUMENTED, sample, data={"apply_chat_template": True}), asked)
    assert chat == [{"role": "user", "content": "q"}]
    assert Letters().decode(done.tokens) == "user:q;assistant:look;tool:42;found: 42"
    assert done.response_length == len("found: 42")


def test_a_function_with_the_policy_keeps_tokens_and_log_probs(tmp_path: Path) -> None:
    sample = pending()
    asked = Snapshot.of(sample)
    [done] = check_generated(generate(tmp_path, BY_POLICY, sample), asked)
    assert (done.tokens, done.rollout_log_probs, done.reward) == ([97, 98, 65, 66], [-0.5, -0.25], 0.0)


def test_the_function_gets_the_evaluation_flag(tmp_path: Path) -> None:
    sampling = SamplingParams(max_new_tokens=5, temperature=0.5, evaluation=True)
    [done] = generate(tmp_path, BY_POLICY, pending(), sampling)
    assert done.reward == 1.0


@pytest.mark.parametrize(
    "algorithm",
    [
        {"use_rollout_logprobs": True},
        {"use_tis": True},
        {"true_on_policy_mode": True},
        {"off_policy_sequence_delta": 0.1},
    ],
)
def test_texts_are_refused_if_the_run_needs_engine_log_probs(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    with pytest.raises(PluginContractError, match=r"text without tokens, and --.* needs the engine's log-probs"):
        generate(tmp_path, DOCUMENTED, pending(), algorithm=algorithm)


def test_a_sample_without_any_reward_is_refused(tmp_path: Path) -> None:
    source = "async def generate(args, sample):\n    sample.response = 'x'\n    return sample"
    with pytest.raises(PluginContractError, match="without a reward, and the run has no reward component"):
        generate(tmp_path, source, pending())
    [done] = generate(tmp_path, source, pending(), reward={"reward": "exact_match"})
    assert done.reward is None


@pytest.mark.parametrize("reward", ["float('nan')", "'1'", "{'accuracy': 1.0}", "{'score': float('inf')}"])
def test_a_reward_set_by_the_function_must_be_finite(tmp_path: Path, reward: str) -> None:
    source = f"async def generate(args, sample):\n    sample.response, sample.reward = 'x', {reward}\n    return sample"
    with pytest.raises(PluginContractError, match=r"returned a sample with reward .*, expected a finite number"):
        generate(tmp_path, source, pending())
    [done] = generate(tmp_path, source.replace(reward, "{'score': 2, 'accuracy': 1.0}"), pending())
    assert done.reward_value == 2.0


def test_supervised_samples_need_no_reward(tmp_path: Path) -> None:
    source = "async def generate(args, sample):\n    sample.response = 'x'\n    return sample"
    [done] = generate(tmp_path, source, pending(), algorithm={"loss_type": "sft_loss"})
    assert done.reward is None


def test_an_empty_answer_is_refused(tmp_path: Path) -> None:
    source = "async def generate(sample):\n    sample.status = sample.Status.COMPLETED\n    return [sample]"
    with pytest.raises(PluginContractError, match="without a response, neither as tokens nor as text"):
        generate(tmp_path, source, pending())


def test_failed_samples_and_invalid_results_are_passed_to_the_kernel(tmp_path: Path) -> None:
    [failed] = generate(
        tmp_path,
        "async def generate(sample):\n    sample.status = sample.Status.FAILED\n    return [sample]",
        pending(),
    )
    assert failed.status is Status.FAILED
    assert generate(tmp_path, "async def generate(sample): return None", pending()) is None
