"""Scores held-out prompts under the current policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slime.errors import SlimeError
from slime.observe.rollout_files import write_eval
from slime.rollout.eval_sets import EvalSet
from slime.rollout.failures import common_reasons, count_status
from slime.rollout.metrics import reported_metrics, response_metrics
from slime.rollout.pipeline import Pipeline
from slime.rollout.sampling import Sampling
from slime.types import Sample, Status


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation found: one mean reward per set, and how it came about."""

    #: rollouts trained on before
    rollout: int
    #: `eval/NAME`: mean reward, lost samples counting 0; `eval/NAME/...`: counts and lengths
    metrics: dict[str, float]
    #: why samples were lost, most frequent reason first
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Evaluator:
    """Every prompt of every set, `samples_per_prompt` times; the sets one after the other."""

    def __init__(
        self,
        sets: Sequence[EvalSet],
        pipeline: Pipeline,
        sampling: Sampling,
        samples_per_prompt: int,
        run_dir: Path,
    ) -> None:
        self._sets = list(sets)
        self._pipeline = pipeline
        self._sampling = sampling
        self._samples_per_prompt = samples_per_prompt
        self._run_dir = run_dir

    async def evaluate(self, rollout: int) -> EvalReport:
        """Score all sets and write every sample to `rollouts/eval_NAME_ROLLOUT.jsonl`.

        Raises `SlimeError` when no sample of a set could be scored, `EngineError` when the engines are gone.
        """
        started = time.monotonic()
        metrics: dict[str, float] = {}
        everything: list[Sample] = []
        for eval_set in self._sets:
            finished = await self._pipeline.finish(eval_set.groups(self._samples_per_prompt), self._sampling)
            samples = [sample for group in finished.groups for sample in group.samples]
            await asyncio.to_thread(write_eval, self._run_dir, rollout, eval_set.name, samples)
            metrics |= set_metrics(eval_set.name, samples)
            everything += samples
        return EvalReport(rollout, metrics, common_reasons(everything), time.monotonic() - started)


def set_metrics(name: str, samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics of one set.

    The mean reward is over all samples: one that failed or was aborted counts as reward 0, so losing the hard
    prompts never looks like progress.  Lost samples are counted beside it too; lengths are of finished ones.
    Raises `SlimeError` when no sample has a reward.
    """
    tag = f"eval/{name}"
    finished = [sample for sample in samples if sample.trainable]
    scored = [value for sample in finished if (value := sample.reward_value) is not None]
    if not scored:
        reasons = "; ".join(common_reasons(samples)) or "no reward scored them"
        raise SlimeError(f"evaluation set {name}: none of its {len(samples)} samples has a reward: {reasons}")
    return {
        tag: float(np.mean(scored + [0.0] * (len(samples) - len(finished)))),
        f"{tag}/samples": float(len(samples)),
        f"{tag}/failed": float(count_status(samples, Status.FAILED)),
        f"{tag}/aborted": float(count_status(samples, Status.ABORTED)),
        **reported_metrics(tag, samples),
        **response_metrics(tag, finished),
    }
