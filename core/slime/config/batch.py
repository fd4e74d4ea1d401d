"""Batch arithmetic: rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.options import RolloutOptions
from slime.errors import ConfigError


@dataclass(frozen=True)
class BatchShape:
    """Four numbers that satisfy the identity."""

    prompts: int  #: per rollout
    samples_per_prompt: int
    samples_per_step: int
    steps: int  #: optimizer steps per rollout

    @property
    def samples(self) -> int:
        """Per rollout."""
        return self.prompts * self.samples_per_prompt

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts x {self.samples_per_prompt} samples = {self.samples} samples"
            f" = {self.samples_per_step} per step x {self.steps} step{'s' if self.steps != 1 else ''}"
        )


def batch_shape(options: RolloutOptions) -> BatchShape:
    """Complete the identity from what is stated.

    Raises `ConfigError`, with the numbers, where it does not hold or cannot be completed in whole numbers.
    """
    prompts, each = options.rollout_batch_size, options.n_samples_per_prompt
    per_step, steps = options.global_batch_size, options.num_steps_per_rollout
    if prompts is None:
        raise ConfigError("--rollout-batch-size is missing: how many prompts a rollout has")
    samples = prompts * each
    have = f"--rollout-batch-size {prompts} x --n-samples-per-prompt {each} = {samples} samples per rollout"
    if per_step is None and steps is None:
        return BatchShape(prompts, each, samples, 1)
    if per_step is None:
        assert steps is not None
        if samples % steps:
            raise ConfigError(f"{have}, which --num-steps-per-rollout {steps} does not divide. {_change()}")
        return BatchShape(prompts, each, samples // steps, steps)
    if steps is None:
        if samples % per_step:
            raise ConfigError(f"{have}, which is no multiple of --global-batch-size {per_step}. {_change()}")
        return BatchShape(prompts, each, per_step, samples // per_step)
    if samples != per_step * steps:
        raise ConfigError(
            f"{have}, but --global-batch-size {per_step} x --num-steps-per-rollout {steps} = {per_step * steps}."
            f" The two must be equal. {_change()}"
        )
    return BatchShape(prompts, each, per_step, steps)


def _change() -> str:
    return (
        "Change one of them, or leave --global-batch-size or --num-steps-per-rollout out: it follows from the others."
    )
