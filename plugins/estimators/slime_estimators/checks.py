"""Refuses options that an estimator would silently ignore, or that would turn it into a different algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.errors import ConfigError
from slime_estimators.options import DAPOOptions

if TYPE_CHECKING:
    from slime.config import RunConfig


def check_config(config: RunConfig) -> None:
    """Raise one `ConfigError` that lists every problem."""
    name = (config.algorithm.advantage_estimator or "").removeprefix("estimators/")
    problems = [problem for check in (_aggregation, _dual_clip, _overlong) for problem in check(name, config)]
    if problems:
        raise ConfigError(" ".join(problems))


def _aggregation(name: str, config: RunConfig) -> Iterator[str]:
    algorithm, longest = config.algorithm, config.rollout.rollout_max_response_len
    if name == "dr_grpo" and algorithm.loss_constant_length is None:
        yield (
            "--advantage-estimator dr_grpo divides the loss of a sequence by a constant instead of by its length. Set"
            f" --loss-constant-length (the paper: the longest response, {longest} here),"
            " or use --advantage-estimator grpo --estimator.std-normalization false."
        )
    if name == "dapo" and not algorithm.calculate_per_token_loss:
        yield (
            "--advantage-estimator dapo averages the loss over tokens. Set --calculate-per-token-loss, or use"
            " --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28."
        )


def _dual_clip(name: str, config: RunConfig) -> Iterator[str]:
    bound = config.algorithm.eps_clip_c
    if name == "cispo" and bound is not None:
        yield f"--eps-clip-c {bound:g} has no effect: --advantage-estimator cispo clips the weights, not the update."


def _overlong(name: str, config: RunConfig) -> Iterator[str]:
    if name != "dapo":
        return
    options = DAPOOptions.model_validate(dict(config.component_options.get("estimator", {})))
    longest = config.rollout.rollout_max_response_len
    if options.overlong_buffer is not None and options.overlong_buffer > longest:
        yield (
            f"--estimator.overlong-buffer {options.overlong_buffer} is longer than a response may be"
            f" (--rollout-max-response-len {longest})."
        )
