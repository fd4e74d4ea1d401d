"""`--custom-rm-path`: every shape of reward function and class."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from tests.registry.local_runs import answered, build, plugins_for, run_config, scores, write

from slime.errors import ConfigError, PluginContractError

pytestmark = pytest.mark.usefixtures("probed_here")

DOCUMENTED = '''
    # custom_rm.py
    from slime.data import Sample

    async def reward_func(args, sample: Sample, **kwargs) -> float:
        """
        Compute reward for a single sample.
        Args:
            args: Training arguments
            sample: Sample object with response
        Returns:
            Reward score (float)
        """
        response = sample.response
        ground_truth = sample.label or sample.metadata.get("answer", "")

        # Example: exact match reward
        if response.strip() == ground_truth.strip():
            return 1.0
        return 0.0

    # For batched processing (more efficient)
    async def batched_custom_rm(args, samples: list[Sample]) -> list[float]:
        """Batch reward computation."""
        rewards = []
        for sample in samples:
            reward = await reward_func(args, sample)
            rewards.append(reward)
        return rewards
'''


def reward_of(folder: Path, source: str, options: dict[str, Any] | None = None, **reward: Any) -> tuple[Any, Any]:
    """(the reward, its component) of a file with the source."""
    path = write(folder, "custom_rm.py", source)
    more = {"component_options": {"reward": options}} if options else {}
    config = run_config(reward={"custom_rm_path": str(path), **reward}, **more)
    component = plugins_for(config).resolve(config)["reward"].component
    return build(config, "reward", folder), component


@pytest.mark.row("G3")
def test_the_documented_function_scores_samples(tmp_path: Path) -> None:
    reward, component = reward_of(tmp_path, DOCUMENTED)
    assert component.id == f"{tmp_path}/custom_rm.py:reward_func"
    assert component.spec.scope == "sample"
    assert scores(reward, answered("4", "5", " 4 ")) == [1.0, 0.0, 1.0]


@pytest.mark.row("G4")
def test_with_group_rm_the_documented_batch_function_scores_groups(tmp_path: Path) -> None:
    reward, component = reward_of(tmp_path, DOCUMENTED, group_rm=True)
    assert component.id.endswith(":batched_custom_rm")
    assert component.spec.scope == "group"
    assert scores(reward, answered("4", "5")) == [1.0, 0.0]


@pytest.mark.row("G5")
def test_the_documented_reward_model_gets_its_path_prompts_and_responses(tmp_path: Path) -> None:
    reward, component = reward_of(
        tmp_path,
        """
        def load_model(path):
            return lambda inputs: __import__("numpy").array([len(p) + len(r) + len(path) for p, r in inputs])

        class CustomRewardModel:
            def __init__(self, model_path):
                self.model = load_model(model_path)

            def tokenize(self, prompts, responses):
                return list(zip(prompts, responses))

            def compute_reward(self, prompts, responses):
                inputs = self.tokenize(prompts, responses)
                scores = self.model(inputs)
                return scores.tolist()
        """,
        options={"model_path": "abc"},
    )
    assert scores(reward, answered("4", "55")) == [4 + 1 + 3, 4 + 2 + 3]
    assert component.spec.scope == "group"
    assert not inspect.iscoroutinefunction(reward.score)


def test_a_reward_model_that_needs_a_path_is_refused_without_one(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "rm.py",
        """
        class CustomRewardModel:
            def __init__(self, model_path): ...
            def compute_reward(self, prompts, responses): ...
        """,
    )
    config = run_config(reward={"custom_rm_path": str(path)})
    with pytest.raises(ConfigError, match=r"'model_path' is required: write --reward\.model-path"):
        plugins_for(config).resolve(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "plain"),
    [
        ("def reward_func(args, sample): return 2", True),
        ("def reward_func(sample): return 2", True),
        ("def reward_func(sample, /, args, *, power=1, **kwargs): return 2 * power", True),
        ("async def reward_func(args, sample, **kwargs): return 2", False),
        ("def reward_func(args, sample): return __import__('numpy').float32(2)", True),
        ("def reward_func(args, sample): return {'score': 2, 'length': 7, 'answer': 'x'}", True),
        ("def score_all(args, samples, **kwargs): return [2 for _ in samples]", True),
        ("def score_all(samples): return __import__('numpy').full(len(samples), 2.0)", True),
        ("async def score_all(args, samples): return tuple({'score': 2} for _ in samples)", False),
        (
            "class Model:\n    async def compute_reward(self, prompts, responses, labels): return [2 for _ in labels]",
            False,
        ),
    ],
)
def test_every_signature_works_and_plain_functions_stay_plain(tmp_path: Path, source: str, plain: bool) -> None:
    reward, _ = reward_of(tmp_path, source)
    assert scores(reward, answered("a", "b")) == [2.0, 2.0]
    assert inspect.iscoroutinefunction(reward.score) is not plain


def test_the_other_numbers_of_a_dictionary_are_parts(tmp_path: Path) -> None:
    source = "def reward_func(args, sample): return {'acc': 1, 'length': 7, 'answer': 'x'}"
    reward, _ = reward_of(tmp_path, source, options={"reward_key": "acc"})
    [one] = reward.score(answered("a"))
    assert (one.value, one.parts) == (1.0, {"length": 7.0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward_func(args, sample): return {'acc': 1, 'n': 2}", "keys 'acc', 'n', expected 'score' among them"),
        ("def reward_func(args, sample): return None", r"returned None \(NoneType\), expected a number"),
        ("def reward_func(args, sample): return '1'", r"returned '1' \(str\), expected a number"),
        ("def score_all(args, samples): return [1]", "returned 1 rewards for 2 samples"),
        ("def score_all(args, samples): return 1", "expected a list with one reward for each sample"),
        (
            "async def _go(): ...\ndef reward_func(args, sample): return _go()",
            "returned an awaitable, and the function is a plain",
        ),
    ],
)
def test_results_that_are_not_rewards_are_named(tmp_path: Path, source: str, message: str) -> None:
    reward, _ = reward_of(tmp_path, source)
    with pytest.raises(PluginContractError, match=message):
        scores(reward, answered("a", "b"))


def test_args_are_the_runs_options(tmp_path: Path) -> None:
    reward, _ = reward_of(tmp_path, "def reward_func(args, sample): return args.rollout_batch_size")
    assert scores(reward, answered("a")) == [4.0]


def test_several_functions_are_added_up_as_terms(tmp_path: Path) -> None:
    path = write(tmp_path, "a.py", "def one(args, sample): return 1\ndef two(args, sample): return 2")
    terms = [{"name": f"{path}:one"}, {"name": f"{path}:two", "weight": 0.5}]
    config = run_config(reward={"terms": terms})
    assert [scores(build(config, f"reward[{n}]", tmp_path), answered("x")) for n in (0, 1)] == [[1.0], [2.0]]
