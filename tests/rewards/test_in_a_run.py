"""Faults of services, programs and labels in a run, with real worker processes and a scripted policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.registry.local_runs import plugins_for
from tests.support.http_services import serving
from tests.support.rewards import build
from tests.support.scoring import term

from slime.config.options import DataOptions, RewardOptions, RewardTerm, RolloutOptions
from slime.config.run_config import RunConfig
from slime.observe.timing import BusyClock
from slime.plugin import Generation, RewardSpec, SamplingParams
from slime.rollout.record import Rollout
from slime.rollout.scoring import Scorer
from slime.run.rollout_process import RolloutProcess
from slime.testing import make_sample, make_tokenizer
from slime.types import Sample, Status

pytestmark = pytest.mark.slow

PROMPTS = 8


class Echo:
    """Answers every prompt with the prompt itself."""

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,  # noqa: ARG002 - the contract's
        rid: str = "",  # noqa: ARG002 - the contract's
    ) -> Generation:
        said = list(tokens)[: sampling.max_new_tokens]
        return Generation(said, [-0.5] * len(said), "stop", ["1"])

    async def close(self) -> None:
        """Nothing to close."""


def rollout(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    reward: RewardOptions,
    options: dict[str, Any] | None = None,
    engine_url: str | None = None,
) -> Rollout:
    """One rollout of these rows, two samples each, without an error budget."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = RunConfig(
        data=DataOptions(prompt_data=str(path), label_key="label" if "label" in rows[0] else None),
        rollout=RolloutOptions(
            num_rollout=1, rollout_batch_size=len(rows), n_samples_per_prompt=2, rollout_max_response_len=400
        ),
        reward=reward,
        component_options={"reward": {"error_budget": 1.0, **options}} if options is not None else {},
    )

    async def main() -> Rollout:
        plugins = plugins_for(config)
        process = RolloutProcess(config, plugins, Echo(), folder, make_tokenizer(), engine_url=engine_url)
        await process.start()
        try:
            return await process.make_rollout(0)
        finally:
            await process.close()

    return asyncio.run(main())


def of(result: Rollout, prompt: str) -> list[Sample]:
    return [sample for group in result.groups for sample in group.samples if sample.prompt == prompt]


async def remote_faults(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
    """A service that scores 1, or does what the prompt of the only sample says."""
    [sample] = content["samples"]
    mischief = sample["prompt"]
    if mischief == "500":
        return web.Response(status=500, text="out of memory")
    if mischief == "hangs":
        await asyncio.sleep(60)
    if mischief == "late":
        await asyncio.sleep(5)
    if mischief == "few":
        return {"rewards": []}
    if mischief == "nan":
        return web.Response(text='{"rewards": [NaN]}', content_type="application/json")
    return {"rewards": ["much"]} if mischief == "text" else {"rewards": [1.0]}


@pytest.mark.parametrize(
    ("reasons", "limits", "timeouts"),
    [
        (
            {
                "500": "answered 500 out of memory, 2 times",
                "few": "got 0 rewards from",
                "nan": "returned value = nan, expected a finite number",
                "text": "returned value = nan, expected a finite number",
            },
            {},
            0,
        ),
        ({"hangs": "did not answer within 2 s, 2 times"}, {"request_timeout_s": 2.0}, 0),
        ({"late": "no score after 3 s (timeout_s)"}, {"timeout_s": 3.0}, 2),
    ],
    ids=["wrong answers", "no answer", "a late answer"],
)
def test_service_errors_fail_only_the_samples_of_their_requests(
    reasons: dict[str, str], limits: dict[str, float], timeouts: int, tmp_path: Path
) -> None:
    prompts = [*reasons, *(f"good {n}" for n in range(PROMPTS - len(reasons)))]
    rows = [{"prompt": prompt, "label": "x"} for prompt in prompts]
    with serving(remote_faults) as service:
        options = {
            "url": service.url,
            "batch_size": 1,
            "backoff_s": 0.01,
            "retries": 1,
            "request_timeout_s": 30.0,
            "timeout_s": 60.0,
            **limits,
        }
        result = rollout(tmp_path, rows, RewardOptions(reward="remote"), options)
    for prompt, reason in reasons.items():
        for sample in of(result, prompt):
            assert sample.status is Status.FAILED and sample.reward is None
            assert (sample.failure or "").startswith("reward rewards/remote") and reason in (sample.failure or "")
    assert [sample.reward for sample in of(result, "good 0")] == [1.0, 1.0]
    failed = 2 * len(reasons)
    assert result.metrics["plugin/reward/rewards/remote/failed"] == result.metrics["rollout/failed"] == failed
    assert result.metrics.get("plugin/reward/rewards/remote/timeouts", 0) == timeouts


def test_a_judge_without_score_fails_its_samples(tmp_path: Path) -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        said = "I pass" if "bad" in content["messages"][0]["content"] else "Score: 8"
        return {"choices": [{"message": {"content": said}}]}

    rows = [{"prompt": "bad"}, {"prompt": "good"}]
    with serving(answer) as service:
        result = rollout(tmp_path, rows, RewardOptions(reward="llm_judge"), {"url": service.url})
    assert [sample.status for sample in of(result, "bad")] == [Status.FAILED] * 2
    assert "the judge wrote no score from 0 to 10 in 2 attempts, but 'I pass'" in (of(result, "bad")[0].failure or "")
    assert [sample.reward_value for sample in of(result, "good")] == [0.8, 0.8]
    assert result.metrics["plugin/reward/rewards/llm_judge/failed"] == 2


def test_a_worker_process_gets_the_address_of_the_engines(tmp_path: Path) -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return {"choices": [{"message": {"content": "Score: 10"}}]}

    with serving(answer) as service:
        result = rollout(tmp_path, [{"prompt": "x"}], RewardOptions(reward="llm_judge"), engine_url=service.url)
    assert [sample.reward_value for sample in of(result, "x")] == [1.0, 1.0]
    assert set(service.paths) == {"/v1/chat/completions"}


def test_samples_without_label_or_tests_fail_and_the_others_are_scored(tmp_path: Path) -> None:
    program = "def f(n): return 2 * n"
    loop = "def f(n):\n  while True: pass"
    tests = {"fn_name": "f", "inputs": [[2]], "outputs": [4]}
    rows = [
        {"prompt": program, "metadata": {"tests": tests}},
        {"prompt": loop, "metadata": {"tests": tests}},
        {"prompt": "no tests"},
        {"prompt": "bad tests", "metadata": {"tests": {"inputs": 3}}},
    ]
    result = rollout(tmp_path, rows, RewardOptions(reward="code"), {"cpu_s": 1.0, "wall_s": 20.0})
    assert [sample.reward_value for sample in of(result, program)] == [1.0, 1.0]
    assert [sample.reward_value for sample in of(result, loop)] == [0.0, 0.0]
    for prompt, reason in (
        ("no tests", "has no label to compare with"),
        ("bad tests", "has no tests that can be read"),
    ):
        for sample in of(result, prompt):
            assert sample.status is Status.FAILED and reason in (sample.failure or "")
            assert f"sample {sample.index}" in (sample.failure or "")
    assert result.metrics["plugin/reward/rewards/code/failed"] == 4
    assert result.metrics["rollout/reward/timeout"] == 0.5


def test_an_endless_computation_is_wrong_at_once(tmp_path: Path) -> None:
    rows = [{"prompt": "$100000000000!$", "label": "3"}, {"prompt": "it is $1+2$", "label": "3"}]
    result = rollout(tmp_path, rows, RewardOptions(reward="math"))
    assert [sample.reward_value for sample in of(result, "it is $1+2$")] == [1.0, 1.0]
    assert [sample.reward_value for sample in of(result, "$100000000000!$")] == [0.0, 0.0]
    assert result.metrics.get("plugin/reward/rewards/math/timeouts", 0) == 0


@pytest.mark.row("G6")
def test_math_format_and_length_are_added_up_by_weight(tmp_path: Path) -> None:
    terms = [
        RewardTerm(name="math", weight=1.0, options={"tag": "answer"}),
        RewardTerm(name="format", weight=0.2),
        RewardTerm(name="length", weight=0.5, options={"shape": "overlong", "free": 40, "limit": 60}),
    ]
    said = "<think>two halves</think><answer>$\\frac{2}{2}$</answer>"  # 55 tokens
    rows = [{"prompt": said, "label": "1"}, {"prompt": "<answer>2</answer>", "label": "1"}]
    result = rollout(tmp_path, rows, RewardOptions(terms=terms))
    length = -(len(said) - 40) / 20
    assert of(result, said)[0].reward == pytest.approx(
        {
            "score": 1.0 + 0.2 + 0.5 * length,
            "math": 1.0,
            "math/parsed": 1.0,
            "format": 1.0,
            "format/tags": 1.0,
            "length": length,
        }
    )
    assert of(result, "<answer>2</answer>")[0].reward_value == 0.0
    assert result.metrics["rollout/reward/math"] == 0.5


def test_a_part_of_a_reward_may_be_the_score(tmp_path: Path) -> None:
    rows = [{"prompt": "<answer>4</answer>"}, {"prompt": "nothing"}]
    result = rollout(tmp_path, rows, RewardOptions(reward="format", reward_key="tags"))
    assert of(result, "<answer>4</answer>")[0].reward == {"score": 0.5, "tags": 0.5, "value": 0.0}
    assert of(result, "nothing")[0].reward_value == 0.0


def test_a_missing_part_fails_the_samples() -> None:
    one = replace(term(build("format"), RewardSpec(name="format", factory="a:B"), "reward format"), part="tag")
    sample = make_sample()
    asyncio.run(Scorer([one]).score([sample], BusyClock()))
    assert sample.status is Status.FAILED
    assert sample.failure == "reward format gave no part 'tag' (--reward-key); its parts: tags"


def test_an_entry_of_a_functions_dictionary_may_be_the_score(tmp_path: Path) -> None:
    path = tmp_path / "rm.py"
    path.write_text("def reward_func(args, sample): return {'acc': 1.0, 'len': len(sample.response)}")
    result = rollout(tmp_path, [{"prompt": "abc"}], RewardOptions(reward=f"{path}:reward_func", reward_key="acc"))
    assert of(result, "abc")[0].reward == {"score": 1.0, "len": 3.0}
