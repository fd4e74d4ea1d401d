"""What the rollout actor hands to the trainer, and what it writes for a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.checkpoint.rollout_part import read_rollout_part
from slime.cluster.rollout_process import RolloutActor
from slime.rollout.manager import Rollout
from slime.types import Group, Sample, Status


def sample(group: int, index: int, reward: float | None) -> Sample:
    status = Status.FAILED if reward is None else Status.COMPLETED
    return Sample(group, index, tokens=[1, 2], response_length=1, reward=reward, status=status, rollout_id=index)


class Manager:
    """Stands where the rollout manager is: one batch with a group from an earlier rollout."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.loaded: Any = None

    def trained(self, done: int) -> None:
        self.done.append(done)

    async def generate(self, number: int) -> Rollout:
        groups = [
            Group(3, [sample(3, 6, 1.0), sample(3, 7, None)], age=2),
            Group(9, [sample(9, 18, 0.0), sample(9, 19, 1.0)]),
        ]
        return Rollout(number, groups, {}, 0.0, rewards=[5.0, -1.0, 0.5])

    def state(self, done: int) -> dict[str, Any]:
        return {"trained": done, "groups": [{"index": 1}]}

    def load_state(self, state: Any) -> None:
        self.loaded = state


def actor(tmp_path: Path) -> RolloutActor:
    made = RolloutActor.__new__(RolloutActor)
    made._config, made._run_dir = SimpleNamespace(steps_per_rollout=1), tmp_path
    made._taken, made._turns, made._manager = None, asyncio.Condition(), Manager()
    return made


def test_the_batch_has_the_post_processed_rewards_in_the_places_of_the_trainable_samples(tmp_path: Path) -> None:
    async def generate() -> Any:
        return await actor(tmp_path).generate(4, None, 4)

    _, batch = asyncio.run(generate())
    assert batch.rewards.tolist() == [5.0, -1.0, 0.5]
    assert batch.group_ids.tolist() == [3, 9, 9]
    assert batch.rollout_ids.tolist() == [6, 18, 19]


def test_the_rollout_part_is_written_and_read_by_the_actor(tmp_path: Path) -> None:
    async def save_and_load() -> Any:
        made = actor(tmp_path)
        await made.save(tmp_path / "rollout", 7)
        await made.load(tmp_path / "rollout")
        return made._manager.loaded

    assert asyncio.run(save_and_load()) == {"trained": 7, "groups": [{"index": 1}]}
    assert read_rollout_part(tmp_path / "rollout")["trained"] == 7
