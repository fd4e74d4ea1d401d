"""`--custom-rm-path` with reward functions written for TRL and for verl."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.registry.local_runs import build, plugins_for, run_config, scores, write

from slime.compat.functions import find_function
from slime.errors import PluginContractError, PluginLoadError
from slime.plugin import Sample, Status

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("probed_here")]


def finished(*responses: str, chat: bool = False, label: str = "4", **metadata: Any) -> list[Sample]:
    """Finished samples of one prompt, with one token for each character of prompt and response."""
    prompt: Any = [{"role": "user", "content": "2+2="}] if chat else "2+2="
    return [
        Sample(
            group_index=0,
            index=index,
            prompt=prompt,
            label=label,
            response=response,
            tokens=[ord(letter) for letter in "2+2=" + response],
            response_length=len(response),
            metadata=dict(metadata),
            status=Status.COMPLETED,
        )
        for index, response in enumerate(responses)
    ]


def reward_of(reference: str | Path, folder: Path, **data: Any) -> tuple[Any, Any]:
    """(the reward of a run with this reference, its component)."""
    config = run_config(reward={"custom_rm_path": str(reference)}, data=data)
    return build(config, "reward", folder), plugins_for(config).resolve(config)["reward"].component


def test_a_function_for_trl_gets_lists_of_texts_and_columns(tmp_path: Path) -> None:
    source = """
        def accuracy(prompts, completions, completion_ids, answer, level, **kwargs):
            assert prompts == ["2+2="] * len(completions)
            assert completion_ids == [list(map(ord, text)) for text in completions]
            assert kwargs["label"] == answer and kwargs["source"] == ["gsm8k"] * len(completions)
            return [float(text == right) * weight for text, right, weight in zip(completions, answer, level)]
    """
    path = write(tmp_path, "rewards.py", source)
    reward, component = reward_of(path, tmp_path, label_key="answer")
    assert component.spec.scope == "group" and component.id.endswith("rewards.py:accuracy")
    assert scores(reward, finished("4", "55", level=3, source="gsm8k")) == [3.0, 0.0]


def test_completions_of_a_conversation_are_messages(tmp_path: Path) -> None:
    source = """
        def short(completions, **kwargs):
            assert all(len(one) == 1 and one[0]["role"] == "assistant" for one in completions)
            return [-len(one[0]["content"]) for one in completions]
    """
    reward, _ = reward_of(write(tmp_path, "rewards.py", source), tmp_path)
    assert scores(reward, finished("4", "four", chat=True)) == [-1.0, -4.0]


def test_an_async_function_for_trl_and_one_that_returns_none(tmp_path: Path) -> None:
    source = """
        async def only_math(completions, task, **kwargs):
            return [1.0 if one == "math" else None for one in task]
    """
    reward, _ = reward_of(write(tmp_path, "rewards.py", source), tmp_path)
    assert scores(reward, finished("4", task="math")) == [1.0]
    assert scores(reward, finished("4", task="code")) == [0.0]


def test_a_column_that_no_sample_has_is_named(tmp_path: Path) -> None:
    reward, _ = reward_of(write(tmp_path, "rewards.py", "def right(completions, solution): return [0.0]"), tmp_path)
    with pytest.raises(PluginContractError, match=r"has the parameter solution, and the samples have no such column"):
        scores(reward, finished("4", level=3))


def test_a_wrong_number_of_rewards_is_refused(tmp_path: Path) -> None:
    reward, _ = reward_of(write(tmp_path, "rewards.py", "def right(completions): return [0.0]"), tmp_path)
    with pytest.raises(PluginContractError, match="returned 1 rewards for 2 samples"):
        scores(reward, finished("4", "5"))


def test_a_function_for_verl_gets_source_response_label_and_extra(tmp_path: Path) -> None:
    source = """
        def helper(x): return x

        def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="strict"):
            assert (data_source, extra_info, method) == ("openai/gsm8k", {"split": "train", "index": 3}, "strict")
            return {"score": 1.0 if solution_str == ground_truth else -1.0, "acc": solution_str == ground_truth}
    """
    reward, component = reward_of(write(tmp_path, "score.py", source), tmp_path)
    assert component.spec.scope == "sample" and component.id.endswith("score.py:compute_score")
    samples = finished("4", "5", data_source="openai/gsm8k", extra_info={"split": "train", "index": 3})
    assert [(one.value, one.parts) for one in reward.score(samples)] == [(1.0, {"acc": 1.0}), (-1.0, {"acc": 0.0})]


def test_all_metadata_are_the_extra_info_of_rows_without_one(tmp_path: Path) -> None:
    source = """
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            return float(extra_info["level"]) if data_source is None else 0
    """
    reward, _ = reward_of(write(tmp_path, "score.py", source), tmp_path)
    assert scores(reward, finished("4", level=2)) == [2.0]


def test_an_async_function_for_verl_that_exits_fails_its_call_and_leaves_the_event_loop(tmp_path: Path) -> None:
    source = """
        import sys

        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            sys.exit(f"no score for {solution_str}")
    """
    reward, _ = reward_of(write(tmp_path, "score.py", source), tmp_path)

    async def tried() -> str:
        with pytest.raises(SystemExit, match="no score for 4"):
            await reward.score(finished("4", "5"))
        return "the loop goes on"

    assert asyncio.run(tried()) == "the loop goes on"


def test_a_parameter_that_verl_does_not_pass_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "score.py", "def compute_score(solution_str, ground_truth, tokenizer): return 0.0")
    with pytest.raises(PluginLoadError, match="slime has no value for the parameter tokenizer"):
        find_function("reward", f"{path}:compute_score")


def test_a_file_that_imports_the_original_slime_is_told_where_to_read(tmp_path: Path) -> None:
    source = "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\ndef reward_func(sample): return 0.0"
    with pytest.raises(PluginLoadError, match=r"needs slime\.rollout\.filter_hub.*docs/migrating\.md"):
        find_function("reward", str(write(tmp_path, "rm.py", source)))


def test_functions_of_trl_and_verl_give_what_they_give_there(tmp_path: Path) -> None:
    from trl.rewards.format_rewards import think_format_reward
    from verl.utils.reward_score.gsm8k import compute_score

    texts = ("<think>\nhm\n</think>\n$4$", r"\boxed{4}", "<think>hm 5", "so\n#### 4", "#### 5")
    expected = {
        "trl.rewards.format_rewards:think_format_reward": think_format_reward([[{"content": text}] for text in texts]),
        "verl.utils.reward_score.gsm8k:compute_score": [compute_score(text, "4") for text in texts],
    }
    for reference, values in expected.items():
        reward, _ = reward_of(reference, tmp_path)
        assert scores(reward, finished(*texts, chat=True)) == values, reference
        assert 0.0 in values and 1.0 in values
