"""Scorers for rewards defined in a test, called in the test's event loop."""

from __future__ import annotations

from pathlib import Path

from slime.plugin import RewardModel, RewardSpec
from slime.rollout.failures import Health
from slime.rollout.scoring import InLoopReward, Scorer, Term


def health(
    who: str,
    kind: str = "reward",
    *,
    error_budget: float = 1.0,
    rollout_samples: int = 50,
    run_dir: Path | None = None,
    slot: str | None = None,
) -> Health:
    """A component's health; its id is `tests/NAME` where `who` ends in NAME."""
    name = who.split()[-1]
    return Health(kind, f"tests/{name}", who, error_budget, rollout_samples, kind if slot is None else slot, run_dir)


def term(
    reward: RewardModel,
    spec: RewardSpec,
    who: str,
    *,
    key: str | None = None,
    weight: float = 1.0,
    error_budget: float = 1.0,
    rollout_samples: int = 50,
) -> Term:
    """One reward."""
    counted = health(who, error_budget=error_budget, rollout_samples=rollout_samples)
    return Term(spec, InLoopReward(reward, who, spec.timeout_s), counted, key, weight)


def scorer(reward: RewardModel, spec: RewardSpec, who: str) -> Scorer:
    """A scorer with one reward and no error budget."""
    return Scorer([term(reward, spec, who)])
