"""The code on docs/plugins/testing.md runs, and the page names everything in `slime.testing`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import slime.testing
from slime.plugin import Advantages, EstimatorBatch, Reward, Sample, TokenBatch
from slime_estimators.grpo import GRPO
from slime_estimators.options import GRPOOptions

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "testing.md").read_text(encoding="utf-8")


def test_the_page_names_everything() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(slime.testing.__all__)


class Exact:
    """A reward."""

    def score(self, samples: list[Sample]) -> list[Reward]:
        return [Reward(float(sample.response == sample.label)) for sample in samples]


class Estimator:
    """An estimator with an objective of its own."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        assert batch.reward_parts["format"].tolist() == [1, 0, 1, 1]
        assert batch.metadata == [{"level": 1}] * 4
        return GRPO(GRPOOptions(), slime.testing.make_context()).advantages(batch)

    def objective(self, tokens: TokenBatch) -> tuple[Any, dict[str, Any]]:
        return -tokens.log_ratio.exp() * tokens.advantages, {}


def weather(city: str, days: int = 1) -> str:
    """The weather.

    Args:
        city: where
        days: how many
    """
    assert city
    return f"sunny for {days} days"


@pytest.mark.parametrize("number", range(4))
def test_the_code_on_the_page_runs(number: int) -> None:
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    tests = [made for name, made in names.items() if name.startswith("test_")]
    assert len(tests) == 4
    arguments = (Exact(), Estimator(), Estimator(), weather)
    tests[number](arguments[number])
