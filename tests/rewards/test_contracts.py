"""Rewards that use a service or a model keep the contract, with real ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_services import serving
from tests.support.reward_models import make_tiny_reward_model
from tests.support.rewards import build

from slime.plugin import RewardSpec
from slime.testing import assert_reward_contract, make_sample

RIGHT, WRONG = make_sample("1+1=", "2", label="2"), make_sample("1+1=", "it is 3", label="2")


def spec(name: str) -> RewardSpec:
    return RewardSpec(name=name, factory="module:Class", deterministic=False, timeout_s=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["batch", "single"])
def test_a_remote_service(protocol: str) -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        await asyncio.sleep(0.01)
        if protocol == "single":
            return float(content["response"] == content["label"])
        return {"rewards": [float(one["response"] == one["label"]) for one in content["samples"]]}

    with serving(answer) as service:
        reward = build("remote", url=service.url, protocol=protocol)
        assert_reward_contract(reward, spec=spec("remote"), good=[RIGHT], bad=[WRONG])


def test_a_judge() -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        said = content["messages"][-1]["content"].split("Answer to judge:\n")[1].split("\n")[0]
        return {"choices": [{"message": {"content": f"Score: {9 if said == '2' else 1}"}}]}

    with serving(answer) as service:
        reward = build("llm_judge", url=service.url)
        assert_reward_contract(reward, spec=spec("llm_judge"), good=[RIGHT], bad=[WRONG])


@pytest.mark.slow
@pytest.mark.parametrize("output", ["logit", "sigmoid"])
def test_a_reward_model(output: str, tmp_path: Path) -> None:
    reward = build("reward_model", model_path=str(make_tiny_reward_model(tmp_path)), output=output, max_tokens=128)
    assert_reward_contract(reward, spec=spec("reward_model"))


@pytest.mark.slow
def test_code_that_is_compared() -> None:
    """Made-up samples have labels that assert nothing, so the kit gets its own."""
    samples = [
        make_sample("f", f"def f(x):\n    return x + {n % 2}", label=f"assert f({n}) == {n}", index=n) for n in range(4)
    ]
    code = RewardSpec(name="code", factory="module:Class", timeout_s=60.0)
    assert_reward_contract(build("code"), spec=code, samples=samples, good=samples[::2], bad=samples[1::2])
