"""The rollout process with filters and custom functions from the configuration, saved and resumed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.conftest import ScriptedPolicy

from slime.compat.functions import place_functions
from slime.config.options import DataOptions, RewardOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.registry.plugin_set import load_plugins
from slime.rollout.record import Rollout
from slime.run.checkpoint.files import read_rollout_part, write_rollout_part
from slime.run.rollout_process import RolloutProcess

FUNCTIONS = """
def sample_filter(args, groups):
    for samples in groups:
        samples[0].remove_sample = len(samples) == args.n_samples_per_prompt


def reward_post_process(args, samples):
    raw = [sample.reward for sample in samples]
    return raw, [10 * value + place for place, value in enumerate(raw)]
"""

CURIOUS = """
from pathlib import Path
from slime.data import RolloutDataSource


class Mine(RolloutDataSource):
    def add_samples(self, samples):
        with (Path(__file__).parent / "seen").open("a") as file:
            print(*(sample.index for sample in samples if sample.reward is not None), file=file)
"""


@pytest.fixture
def config(prompt_file: Path) -> RunConfig:
    return RunConfig(
        data=DataOptions(prompt_data=[str(prompt_file)]),
        rollout=RolloutOptions(
            num_rollout=4,
            rollout_batch_size=3,
            n_samples_per_prompt=2,
            rollout_max_response_len=8,
            sampling_filter="nonzero_variance",
        ),
        reward=RewardOptions(reward="exact_match"),
    )


async def rollouts(
    config: RunConfig,
    tokenizer: Any,
    run_dir: Path,
    numbers: range,
    load: Path | None = None,
    save: Path | None = None,
    policy: ScriptedPolicy | None = None,
) -> list[Rollout]:
    policy = policy or ScriptedPolicy(tokenizer)
    placed = place_functions(config)
    plugins = load_plugins(config.plugins, placed.components)
    process = RolloutProcess(placed.config, plugins, policy, run_dir, tokenizer)
    await process.start()
    try:
        if load is not None:
            process.load_state(read_rollout_part(load))
        done = [await process.make_rollout(number) for number in numbers]
        if save is not None:
            write_rollout_part(save, process.state(numbers.stop))
        return done
    finally:
        await process.close()


def test_add_samples_gets_every_generated_sample_once(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "curious.py"
    file.write_text(CURIOUS)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"data_source": f"{file}", "data_source_path": None})}
    )
    done = asyncio.run(rollouts(config, tokenizer, tmp_path, range(2)))
    shown = [[int(word) for word in line.split()] for line in (tmp_path / "seen").read_text().splitlines()]
    trained = {sample.index for rollout in done for group in rollout.groups for sample in group.samples}
    assert len(shown) == 2
    assert sorted(index for batch in shown for index in batch) == list(range(sum(map(len, shown))))
    assert trained < {index for batch in shown for index in batch}, "groups that were dropped are shown as well"


def test_a_resumed_run_trains_on_the_same_groups(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    over = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(
                update={"over_sampling_batch_size": 5, "buffer_filter": "newest_first"}
            )
        }
    )  # something is left in the buffer
    whole = asyncio.run(rollouts(over, tokenizer, tmp_path, range(4)))
    first = asyncio.run(rollouts(over, tokenizer, tmp_path, range(2), save=tmp_path / "rollout"))
    assert len((tmp_path / "rollout" / "groups.jsonl").read_text().splitlines()) >= 1
    second = asyncio.run(rollouts(over, tokenizer, tmp_path, range(2, 4), load=tmp_path / "rollout"))
    assert [r.groups for r in first + second] == [r.groups for r in whole]


def test_custom_functions_mark_samples_and_rewrite_rewards(config: RunConfig, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    path = str(tmp_path / "functions.py")
    own = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"rollout_sample_filter_path": path}),
            "reward": config.reward.model_copy(update={"custom_reward_post_process_path": path}),
        }
    )
    [rollout] = asyncio.run(rollouts(own, tokenizer, tmp_path, range(1)))
    samples = [sample for group in rollout.groups for sample in group.samples]
    assert [sample.remove_sample for sample in samples] == [True, False] * 3
    assert rollout.metrics["rollout/removed"] == 3.0
    assert rollout.batch.rewards.tolist() == [
        10 * (sample.reward_value or 0) + place for place, sample in enumerate(samples)
    ]
    assert rollout.metrics["rollout/raw_reward"] == rollout.metrics["rollout/reward_mean"] == 0.5
