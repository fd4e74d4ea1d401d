"""Evaluation sets with their own settings, rewards and generators, during training and separately."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tests.registry.local_runs import plugins_for
from tests.rollout.conftest import ScriptedPolicy

from slime.config import RunConfig, config_from_toml
from slime.errors import SlimeError
from slime.rollout.evaluation import EvalReport, pending_groups
from slime.rollout.pipeline import SampleGenerator
from slime.run.rollout_process import RolloutProcess
from slime.types import Sample

REWARDS = """
async def half(args, sample, **kwargs):
    return 0.5
"""


def config(prompts: Path, more: str = "") -> RunConfig:
    rewards = prompts.parent / "rewards.py"
    rewards.write_text(REWARDS)
    return config_from_toml(
        f"""
        [rollout]
        rollout_batch_size = 3
        n_samples_per_prompt = 4
        rollout_max_response_len = 8
        num_rollout = 4
        [data]
        prompt_data = "{prompts}"
        [reward]
        name = "exact_match"
        [evaluation]
        eval_interval = 1
        [[evaluation.sets]]
        name = "plain"
        path = "{prompts}"
        [[evaluation.sets]]
        name = "own"
        path = "{prompts}"
        n_samples = 4
        temperature = 0.7
        top_p = 0.9
        top_k = 5
        stop = ["!"]
        max_response_len = 2
        pass_threshold = 0.5
        reward = "{rewards}:half"
        [[evaluation.sets]]
        name = "same_reward"
        path = "{prompts}"
        reward = "{rewards}:half"
        {more}
        """
    )


def evaluate(
    run: RunConfig, tokenizer: Any, folder: Path, policy: ScriptedPolicy, *, evaluates_only: bool = True
) -> EvalReport:
    async def main() -> EvalReport:
        process = RolloutProcess(run, plugins_for(run), policy, folder, tokenizer, evaluates_only=evaluates_only)
        await process.start()
        try:
            return await process.evaluate(5)
        finally:
            await process.close()

    return asyncio.run(main())


@pytest.mark.slow
def test_in_a_deterministic_run_no_set_shares_the_engines_with_another(
    prompt_file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    policy = ScriptedPolicy(tokenizer)
    evaluate(config(prompt_file, "[run]\n        deterministic = true"), tokenizer, tmp_path, policy)
    asked = [(temperature, len(list(same))) for temperature, same in groupby(s.temperature for _, s in policy.requests)]
    assert asked == [(0.0, 12), (0.7, 48), (0.0, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("evaluates_only", [False, True])
@pytest.mark.row("E1")
def test_every_set_has_its_own_sampling_and_reward(
    evaluates_only: bool, prompt_file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    policy = ScriptedPolicy(tokenizer)
    report = evaluate(config(prompt_file), tokenizer, tmp_path, policy, evaluates_only=evaluates_only)
    asked = Counter((s.temperature, s.top_p, s.top_k, s.stop, s.max_new_tokens) for _, s in policy.requests)
    assert asked == {(0.0, 1.0, -1, (), 8): 24, (0.7, 0.9, 5, ("!",), 2): 48}
    assert all(sampling.evaluation for _, sampling in policy.requests)
    metrics = report.metrics
    assert (metrics["eval/plain"], metrics["eval/own"], metrics["eval/same_reward"]) == (1.0, 0.5, 0.5)
    assert (metrics["eval/own/pass@1"], metrics["eval/own/pass@4"], metrics["eval/same_reward/pass@1"]) == (1, 1, 0)
    assert report.weight_versions == ["3"]
    rows = [json.loads(line) for line in report.files["own"].read_text().splitlines()]
    assert [(row["group"], row["attempt"], row["passed"]) for row in rows[:5]] == [
        (0, 0, True), (0, 1, True), (0, 2, True), (0, 3, True), (1, 0, True),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("evaluates_only", [False, True])
@pytest.mark.parametrize("sets", [slice(None), slice(3, 4)])
def test_every_generator_is_closed_once(
    evaluates_only: bool,
    sets: slice,
    prompt_file: Path,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking = prompt_file.parent / "asking.py"
    asking.write_text("async def ask(args, sample, sampling_params):\n    return sample\n")
    more = f"""
        [[evaluation.sets]]
        name = "asked"
        path = "{prompt_file}"
        generator = "{asking}:ask"
    """
    run = config(prompt_file, more)
    evaluation = run.evaluation.model_copy(update={"sets": run.evaluation.sets[sets]})
    closed: list[object] = []

    async def close(generator: SampleGenerator) -> None:
        closed.append(generator._generator)

    async def main() -> None:
        made = run.model_copy(update={"evaluation": evaluation})
        process = RolloutProcess(
            made, plugins_for(made), ScriptedPolicy(tokenizer), tmp_path, tokenizer, evaluates_only=evaluates_only
        )
        await process.start()
        await process.close()

    monkeypatch.setattr(SampleGenerator, "close", close)
    asyncio.run(main())
    assert len(closed) == len(set(map(id, closed))) == 2


def test_changes_to_a_prompt_do_not_reach_other_attempts() -> None:
    row = Sample(prompt=[{"role": "user", "content": "2+1="}], tokens=[1], metadata={"tests": ["a"]})
    [first, second] = pending_groups([row], attempts=2)[0].samples
    for changed in (first, second):
        assert isinstance(changed.prompt, list)
        assert (len(changed.prompt), changed.metadata) == (1, {"tests": ["a"]})
        changed.prompt.append({"role": "assistant", "content": "3"})
        changed.metadata["tests"].append("b")
    [again, _] = pending_groups([row], attempts=2)[0].samples
    assert (len(again.prompt), again.metadata) == (1, {"tests": ["a"]})


def test_an_evaluation_gets_slots_while_a_rollout_wants_all_of_them(
    prompt_file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """A rollout of 120 samples holds both slots; the 12 samples of the evaluation then get every second slot."""
    run = config(prompt_file)
    few = run.rollout.model_copy(update={"rollout_concurrency": 2, "n_samples_per_prompt": 40})
    sets = run.evaluation.model_copy(update={"sets": run.evaluation.sets[:1]})
    run = run.model_copy(update={"rollout": few, "evaluation": sets})
    policy = ScriptedPolicy(tokenizer, {f"{n}+1=": 0.002 for n in range(12)})

    async def main() -> None:
        process = RolloutProcess(run, plugins_for(run), policy, tmp_path, tokenizer)
        await process.start()
        rollout = asyncio.ensure_future(process.make_rollout(0))
        while len(policy.requests) < 2:  # the rollout holds both slots
            await asyncio.sleep(0)
        await process.evaluate(0)
        assert not rollout.done()
        await rollout
        await process.close()

    asyncio.run(main())
    order = [sampling.evaluation for _, sampling in policy.requests]
    last = max(place for place, evaluation in enumerate(order) if evaluation)
    assert last < 60 and len(order) == 132  # neither waits for the other's 120 or 12
    assert sum(not evaluation for evaluation in order[: last + 1]) >= 6


@pytest.mark.slow
def test_an_unscored_set_fails_the_evaluation_and_is_named(prompt_file: Path, tokenizer: Any, tmp_path: Path) -> None:
    broken = prompt_file.parent / "broken.py"
    broken.write_text("async def judge(args, sample, **kwargs):\n    raise ValueError('no verdict')\n")
    reward = f'{{ name = "{broken}:judge", error-budget = 1 }}'
    more = f'[[evaluation.sets]]\nname = "bad"\npath = "{prompt_file}"\nreward = {reward}\n'
    with pytest.raises(SlimeError, match="evaluation set bad: none of its 12 samples has a reward"):
        evaluate(config(prompt_file, more), tokenizer, tmp_path, ScriptedPolicy(tokenizer))


@pytest.mark.slow
def test_the_error_budget_message_of_a_set_shows_where_to_set_it(
    prompt_file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    broken = prompt_file.parent / "broken.py"
    broken.write_text("async def judge(args, sample, **kwargs):\n    raise ValueError('no verdict')\n")
    reward = f'{{ name = "{broken}:judge", error-budget = 0 }}'
    more = f'[[evaluation.sets]]\nname = "bad"\npath = "{prompt_file}"\nreward = {reward}\n'
    with pytest.raises(SlimeError, match=r"error_budget in the reward of its \[\[evaluation.sets\]\] table"):
        evaluate(config(prompt_file, more), tokenizer, tmp_path, ScriptedPolicy(tokenizer))
