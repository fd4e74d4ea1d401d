"""The curriculum: the prompts of each level, and how the level follows the pass rate."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slime.config.options import DataOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.errors import CheckpointError, DataError
from slime.plugin import Group, Status
from slime.registry.plugin_set import survey_plugins
from slime.rollout.boundaries import CheckedSource
from slime.testing import make_context

ROWS = 40


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Builds the source over forty prompts of difficulty 0 to 9, easy and hard ones mixed."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1), "metadata": {"hard": n * 7 % 10}} for n in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return _builder(path, tmp_path)


def _builder(path: Path, run_dir: Path) -> Any:
    config = RunConfig(
        data=DataOptions(prompt_data=[str(path)]),
        rollout=RolloutOptions(num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_response_len=8),
    )
    context = make_context(run_dir=run_dir, config=config)

    def build(**options: Any) -> Any:
        plugins = survey_plugins()
        return plugins.build("datasource", "curriculum", {"difficulty_key": "hard", "pool": 36} | options, context)

    return build


@pytest.fixture
def make_many(tmp_path: Path) -> Any:
    """Builds the source over a thousand shuffled prompts, a quarter of each difficulty from 0 to 3."""
    path = tmp_path / "many.jsonl"
    rows = [
        {
            "prompt": f"{n}+1=",
            "label": str(n + 1),
            "metadata": {"hard": n % 4, "more": {"hard": n % 4}, "sparse": (1, 5)[n % 2]},
        }
        for n in range(1000)
    ]
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return _builder(path, tmp_path)


def levels(groups: list[Group]) -> list[int]:
    return [group.samples[0].metadata["hard"] for group in groups]


def scored(groups: list[Group], reward: float | None) -> list[Group]:
    for sample in (sample for group in groups for sample in group.samples):
        sample.reward, sample.status = reward, Status.FAILED if reward is None else Status.COMPLETED
    return groups


def test_the_easiest_prompts_come_first_and_each_once_per_epoch(make: Any) -> None:
    source = make()
    assert levels(source.take(4)) == [0, 0, 0, 0]
    source = make(pool=0)
    assert sorted(group.samples[0].prompt for group in source.take(ROWS)) == sorted(f"{n}+1=" for n in range(ROWS))


def test_the_level_follows_the_pass_rate_within_known_difficulties(make: Any) -> None:
    source = make(window=8, step=3, pool=200)
    seen = []
    for reward in (1.0, 1.0, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0):
        groups = source.take(4)
        seen.append(levels(groups)[0])
        source.generated(scored(groups, reward))
    assert seen == [0, 3, 6, 9, 9, 9, 6, 3, 0]
    assert source.metrics()["curriculum/level"] == 0
    assert source.metrics()["curriculum/pass_rate"] == 0


def test_the_level_stays_between_the_rates_and_during_a_window(make: Any) -> None:
    source = make(window=8, start=5)
    source.generated(scored(source.take(3), 1.0))
    assert source.metrics()["curriculum/level"] == 5
    source.generated(scored(source.take(1), 0.0))
    assert source.metrics()["curriculum/level"] == 6, "6 of 8 passed"
    source.generated(scored(source.take(2), 1.0) + scored(source.take(2), 0.0))
    assert source.metrics()["curriculum/level"] == 6, "half passed"


def test_failed_samples_do_not_count_in_the_pass_rate(make: Any) -> None:
    source = make(window=2, start=5)
    source.generated(scored(source.take(4), None))
    assert source.metrics()["curriculum/level"] == 5
    assert "curriculum/pass_rate" not in source.metrics()


def test_without_a_key_the_length_of_the_prompt_is_its_difficulty(make: Any) -> None:
    assert {len(group.samples[0].tokens) for group in make(difficulty_key=None).take(8)} == {4}


def test_by_length_no_prompt_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "spread.jsonl"
    rows = [{"prompt": "x" * (1 + n * 37 % 400), "label": ""} for n in range(400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = _builder(path, tmp_path)(difficulty_key=None, pool=16)
    taken = [len(group.samples[0].prompt) for _ in range(100) for group in source.take(4)]
    assert source.metrics()["curriculum/passed_over"] == 0
    assert len(set(taken)) > 380, "each prompt comes once an epoch, except those still in the pool"
    assert taken[:4] == sorted(1 + n * 37 % 400 for n in range(20))[:4]


@pytest.mark.parametrize(("bad", "where"), [(0, 1), (37, 38)])
def test_the_check_at_the_start_reads_blocks(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, where: int
) -> None:
    monkeypatch.setattr("slime.kit.readers.prompt_file.PromptFile.__getitem__", None)
    make()
    path = tmp_path / "prompts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[bad] = lines[bad].replace("hard", "soft")
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=rf"prompts\.jsonl:{where} has no 'hard' in its metadata"):
        make()


def test_a_row_without_difficulty_is_named_before_the_first_prompt_is_taken(make: Any) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl:1 has no 'had' in its metadata .* Did you mean hard\?"):
        make(difficulty_key="had")


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 5, 8])
@pytest.mark.parametrize("options", [{}, {"pool": 20}, {"difficulty_key": "more.hard"}])
def test_over_many_rollouts_the_prompts_are_of_the_level(make_many: Any, count: int, options: dict[str, Any]) -> None:
    """A quarter of the prompts is of each level; what stays in the pool must not crowd out the others."""
    source = make_many(start=2, raise_above=1.0, lower_below=0.0, **options)
    for rollout in range(60):
        taken = source.take(count)
        assert levels(taken) == [2] * count, rollout
        assert source.metrics()["curriculum/difficulty"] == source.metrics()["curriculum/level"] == 2
        assert len(source.state_dict()["pool"]) == options.get("pool", 36)
    assert source.metrics()["curriculum/passed_over"] > 0


def test_the_prompts_follow_a_level_that_moves(make_many: Any) -> None:
    source = make_many(start=0, window=16, pool=24)
    for rewards, level in ((1.0, 1), (1.0, 2), (1.0, 3), (1.0, 3), (0.0, 2), (0.0, 1), (1.0, 2)):
        source.generated(scored(source.take(8), rewards))
        for _ in range(5):
            assert levels(source.take(8)) == [level] * 8


def test_a_level_without_prompts_takes_the_nearest_and_reads_a_bounded_number(make_many: Any) -> None:
    source = make_many(start=2, step=0.5, difficulty_key="sparse", pool=16)
    for _ in range(20):
        before = source.metrics()["curriculum/passed_over"]
        assert {group.samples[0].metadata["sparse"] for group in source.take(4)} == {1}
        assert source.metrics()["curriculum/passed_over"] - before <= 8 * (16 + 4) + 4


def test_a_state_of_before_the_metrics_resumes(make: Any) -> None:
    source = make()
    source.take(4)
    state = json.loads(json.dumps(source.state_dict()))
    old = {key: value for key, value in state.items() if key not in ("difficulty", "passed_over")} | {"format": 1}
    resumed = make()
    resumed.load_state_dict(old)
    assert "curriculum/difficulty" not in resumed.metrics()
    assert resumed.metrics()["curriculum/passed_over"] == 0
    assert resumed.take(6) == source.take(6)
    with pytest.raises(CheckpointError, match="has format 3, expected 2"):
        make().load_state_dict(state | {"format": 3})


def test_a_resumed_run_restores_level_window_and_pool(make: Any) -> None:
    source = CheckedSource(make(window=8), "curriculum", 2)
    source.generated(scored(source.take(4), 1.0))
    source.generated(scored(source.take(3), 1.0))
    state = json.loads(json.dumps(source.state()))
    resumed = CheckedSource(make(window=8), "curriculum", 2)
    resumed.load(state)
    for one in (source, resumed):
        one.generated(scored(one.take(1), 1.0))
    assert source.take(6) == resumed.take(6)
    assert source.state() == resumed.state()
