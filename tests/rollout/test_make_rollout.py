"""Rollouts: batches, positions and evaluation, with slime's own plugins and a scripted policy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.conftest import ScriptedPolicy

from slime.config.eval_options import EvalOptions
from slime.config.options import DataOptions, RewardOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.errors import EngineError, SlimeError
from slime.plugin import Context, Generation, NoOptions, Reward, RewardSpec, Sample, SamplingParams
from slime.registry.component import Component
from slime.registry.plugin_set import PluginSet, load_plugins
from slime.rollout.batch_in_progress import sampling_seed
from slime.rollout.evaluation import EvalReport
from slime.rollout.record import Rollout
from slime.run.rollout_process import RolloutProcess

#: a run whose reward may fail every sample
FAULTY = {"reward": RewardOptions(reward="faulty"), "component_options": {"reward": {"error_budget": 1}}}


class FaultyReward:
    """Raises for every sample."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        pass

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        raise ValueError(f"no verdict on {len(samples)}")


class HalfFaultyReward(FaultyReward):
    """Raises for every second sample."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        if samples[0].index is None or samples[0].index % 2:
            raise ValueError("no verdict on odd ones")
        return [Reward(1.0) for _ in samples]


def with_faulty_reward(plugins: PluginSet) -> PluginSet:
    """`plugins` and the rewards `faulty` and `half_faulty` beside slime's own."""
    found = plugins.find("reward", "exact_match").found
    classes = {"faulty": FaultyReward, "half_faulty": HalfFaultyReward}
    components = [
        Component(
            "reward", RewardSpec(name=name, factory=f"{__name__}:{made.__name__}", isolation="none"), found, "here"
        )
        for name, made in classes.items()
    ]
    return dataclasses.replace(plugins, registered=(*plugins.registered, *components))


@pytest.fixture
def config(prompt_file: Path) -> RunConfig:
    return RunConfig(
        data=DataOptions(prompt_data=str(prompt_file)),
        rollout=RolloutOptions(num_rollout=4, rollout_batch_size=3, n_samples_per_prompt=4, rollout_max_response_len=8),
        reward=RewardOptions(reward="exact_match"),
        evaluation=EvalOptions(
            eval_prompt_data=[("sums", str(prompt_file))], eval_interval=1, n_samples_per_eval_prompt=2
        ),
    )


def process_of(config: RunConfig, tokenizer: Any, run_dir: Path, policy: Any = None, **more: Any) -> RolloutProcess:
    plugins = with_faulty_reward(load_plugins(config.plugins))
    return RolloutProcess(
        config, plugins, ScriptedPolicy(tokenizer) if policy is None else policy, run_dir, tokenizer, **more
    )


def prompts(rollout: Rollout) -> list[Any]:
    return [group.samples[0].prompt for group in rollout.groups]


def test_a_rollout_is_one_batch_in_data_order(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    policy = ScriptedPolicy(tokenizer, {"0+1=": 0.05, "1+1=": 0.02})
    rollout = asyncio.run(process_of(config, tokenizer, tmp_path, policy).make_rollout(0))
    assert prompts(rollout) == ["0+1=", "1+1=", "2+1="]
    assert [len(group.samples) for group in rollout.groups] == [4, 4, 4]
    assert [s.index for g in rollout.groups for s in g.samples] == list(range(12))
    for sample in (s for g in rollout.groups for s in g.samples):
        right = sampling_seed(config.data.rollout_seed, sample.index or 0) % 2 == 0
        assert sample.reward == float(right)
        assert sample.response == (sample.label if right else "?")
        assert sample.rollout_log_probs == [-0.5] * sample.response_length
        assert (sample.weight_versions, sample.finish_reason) == (["3"], "stop")
        assert sample.tokens == tokenizer.encode(f"{sample.prompt}{sample.response}", add_special_tokens=False)


def test_a_rollout_has_metrics(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    rollout = asyncio.run(process_of(config, tokenizer, tmp_path).make_rollout(0))
    rewards = [s.reward_value for g in rollout.groups for s in g.samples]
    metrics = rollout.metrics
    assert metrics["rollout/reward_mean"] == pytest.approx(sum(r or 0.0 for r in rewards) / 12)
    assert (metrics["rollout/samples"], metrics["rollout/failed"], metrics["rollout/aborted"]) == (12, 0, 0)
    assert (metrics["rollout/response_length_mean"], metrics["rollout/tokens"]) == (1.0, 12)
    assert metrics["rollout/weight_version_min"] == 3
    assert 0 < metrics["time/engine"] <= metrics["time/generate"]
    assert metrics["rollout/tokens_per_s"] == pytest.approx(12 / metrics["time/generate"])
    assert rollout.failures == [] and len(rollout.examples) in (1, 2)


def test_a_batch_without_trainable_samples_ends_the_run_with_the_reasons(
    config: RunConfig, tokenizer: Any, tmp_path: Path
) -> None:
    faulty = config.model_copy(update=FAULTY)
    with pytest.raises(
        SlimeError,
        match=r"none of its 12 samples can be trained on: 12x reward \S+/faulty \(slime-rl \S+\):"
        r" \S+test_make_rollout\.py:\d+: ValueError:",
    ):
        asyncio.run(process_of(faulty, tokenizer, tmp_path).make_rollout(0))


def test_lost_samples_stay_visible_in_their_groups(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    class OneRefusal(ScriptedPolicy):
        """Refuses the requests of one prompt."""

        async def generate(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
            if tokenizer.decode(tokens) == "1+1=":
                raise ValueError("request refused")
            return await super().generate(tokens, sampling)

    tolerant = config.model_copy(update={"component_options": {"generator": {"error_budget": 0.5}}})
    rollout = asyncio.run(process_of(tolerant, tokenizer, tmp_path, OneRefusal(tokenizer)).make_rollout(0))
    assert [[s.trainable for s in g.samples] for g in rollout.groups] == [[True] * 4, [False] * 4, [True] * 4]
    assert rollout.metrics["rollout/failed"] == 4
    [reason] = rollout.failures
    assert reason.startswith("4x generator ") and reason.endswith("ValueError: request refused")


def test_dead_engines_end_generation_and_evaluation(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    class DeadPolicy(ScriptedPolicy):
        """No engine answers."""

        async def generate(self, *_: object, **__: object) -> Generation:
            raise EngineError("no connection in 4 attempts")

    async def main() -> None:
        run = process_of(config, tokenizer, tmp_path, DeadPolicy(tokenizer))
        with pytest.raises(EngineError, match="no connection"):
            await run.make_rollout(0)
        with pytest.raises(EngineError, match="no connection"):
            await run.evaluate(0)

    asyncio.run(main())


def test_progress_is_that_of_the_oldest_rollout(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Looking(ScriptedPolicy):
        """Checks the progress before every answer."""

        async def generate(self, *args: Any, **options: Any) -> Generation:
            seen.append(await run.progress())
            return await super().generate(*args, **options)

    run = process_of(config, tokenizer, tmp_path, Looking(tokenizer))

    async def two() -> None:
        await asyncio.gather(run.make_rollout(0), run.make_rollout(1))

    asyncio.run(two())
    assert len(seen) == 24
    assert {total for _, total in seen} == {12}
    assert asyncio.run(run.progress()) == (0, 0)


def test_evaluation_samples_every_prompt_greedily_and_writes_every_sample(
    config: RunConfig, tokenizer: Any, tmp_path: Path
) -> None:
    policy = ScriptedPolicy(tokenizer)
    report = asyncio.run(process_of(config, tokenizer, tmp_path, policy).evaluate(7))
    assert report.rollout == 7
    assert report.metrics == {
        "eval/sums": 1.0,
        "eval/sums/low": 1.0,
        "eval/sums/high": 1.0,
        **{f"eval/sums/pass@{k}{end}": 1.0 for k in (1, 2) for end in ("", "/low", "/high")},
        "eval/sums/prompts": 12,
        "eval/sums/attempts": 2,
        "eval/sums/weight_version": 3,
        "eval/sums/samples": 24,
        "eval/sums/failed": 0,
        "eval/sums/aborted": 0,
        "eval/sums/response_length_mean": pytest.approx((9 * 1 + 3 * 2) / 12),
        "eval/sums/response_length_max": 2,
        "eval/sums/response_length_min": 1,
        "eval/sums/truncated_ratio": 0.0,
    }
    assert len(policy.requests) == 24
    assert all((s.temperature, s.top_p, s.top_k) == (0, 1.0, -1) for _, s in policy.requests)
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "eval_sums_000007.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows[::2]] == [f"{n}+1=" for n in range(12)]
    assert {row["reward"] for row in rows} == {1.0}


def test_evaluation_does_not_use_training_prompts(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    async def main() -> tuple[Rollout, Rollout]:
        run = process_of(config, tokenizer, tmp_path)
        before = await run.make_rollout(0)
        await run.evaluate(0)
        await run.evaluate(1)
        return before, await run.make_rollout(1)

    _, after = asyncio.run(main())
    assert prompts(after) == ["3+1=", "4+1=", "5+1="]


def test_an_evaluation_without_scores_fails_with_the_reason(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    faulty = config.model_copy(update=FAULTY)
    with pytest.raises(SlimeError, match="evaluation set sums: none of its 24 samples has a reward: 24x reward"):
        asyncio.run(process_of(faulty, tokenizer, tmp_path).evaluate(0))


def test_evaluation_failures_are_counted_separately_by_component(
    config: RunConfig, tokenizer: Any, tmp_path: Path
) -> None:
    half = config.model_copy(update=FAULTY | {"reward": RewardOptions(reward="half_faulty")})

    async def main() -> tuple[EvalReport, Rollout]:
        run = process_of(half, tokenizer, tmp_path)
        return await run.evaluate(0), await run.make_rollout(0)

    report, rollout = asyncio.run(main())
    assert report.metrics["eval/sums/failed"] == report.metrics["eval/plugin/reward/rewards/half_faulty/failed"] == 12
    assert rollout.metrics["plugin/reward/rewards/half_faulty/failed"] == 6


def test_supervised_samples_need_neither_engine_nor_reward(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    from slime.config.options import AlgorithmOptions

    supervised = config.model_copy(
        update={"algorithm": AlgorithmOptions(loss_type="sft_loss"), "reward": RewardOptions(reward=None)}
    )
    plugins = load_plugins(supervised.plugins)
    rollout = asyncio.run(RolloutProcess(supervised, plugins, None, tmp_path, tokenizer).make_rollout(0))
    samples = [s for g in rollout.groups for s in g.samples]
    assert all(s.trainable and s.reward is None and s.response == s.label for s in samples)
    assert "rollout/reward_mean" not in rollout.metrics
    assert rollout.metrics["time/engine"] == 0
