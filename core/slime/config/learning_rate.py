"""The learning-rate schedule in optimizer steps: its length, its warm-up, and where a resumed run is in it."""

from __future__ import annotations

from collections.abc import Iterator

from slime.config.run_config import RunConfig
from slime.errors import ConfigError

#: Megatron's options of the schedule
SCHEDULE = ("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction")


def warmup_and_decay(config: RunConfig, *, waits: bool = False) -> tuple[int, int]:
    """Steps of the warm-up and of the whole schedule, by default those of the whole run.

    Args:
        config: The run.
        waits: Whether the model takes no step in the first --num-critic-only-steps rollouts.

    Raises:
        ConfigError: The options contradict each other.
    """
    stated = config.megatron
    decay = stated.get("lr_decay_iters") or max(1, _steps(config, config.rollout.num_rollout or 1, waits=waits))
    warmup = stated.get("lr_warmup_iters") or 0
    if stated.get("lr_warmup_fraction") is not None:
        if warmup:
            raise ConfigError("--lr-warmup-iters and --lr-warmup-fraction exclude each other.")
        warmup = round(stated["lr_warmup_fraction"] * decay)
    if warmup >= decay:
        raise ConfigError(
            f"the learning rate would warm up for {warmup} steps of {decay} (--lr-decay-iters, by default rollouts x"
            " steps per rollout). Shorten the warm-up."
        )
    return warmup, decay


def require_order(least: float, most: float, flag: str = "--lr", least_flag: str = "--min-lr") -> None:
    """Check that a learning rate does not decay to a larger one. Raises `ConfigError`."""
    if not 0 <= least <= most:
        raise ConfigError(f"{least_flag} {least} is not between 0 and {flag} {most}.")


def continued_at(config: RunConfig, saved: RunConfig, rollouts_done: int, count: int, *, waits: bool = False) -> int:
    """Where in its schedule a model goes on that was saved after `count` steps of the run `saved`.

    A schedule over the whole run goes on at the same part of it if a rollout has another number of steps now. What is
    stated in steps, --lr-decay-iters and a warm-up that is not over, counts those that were taken.
    """
    if config.megatron.get("lr_decay_iters") is not None or count < warmup_and_decay(config, waits=waits)[0]:
        return count
    before, now = (_steps(run, rollouts_done, waits=waits) for run in (saved, config))
    return max(0, count + now - before)


def _steps(config: RunConfig, rollouts: int, *, waits: bool) -> int:
    """Optimizer steps of a model in the first rollouts of a run."""
    idle = config.algorithm.num_critic_only_steps if waits else 0
    return max(0, rollouts - idle) * config.batch.steps


def learning_rate_problems(config: RunConfig, *, with_critic: bool) -> Iterator[str]:
    """Schedules that contradict themselves, of the policy and of the critic."""
    stated, critic_lr = config.megatron, config.algorithm.critic_lr
    least, most = stated.get("min_lr", 0.0), stated["lr"]
    try:
        if config.rollout.num_rollout:
            for waits in {with_critic, False}:
                warmup_and_decay(config, waits=waits)
        require_order(least, most)
        if with_critic and critic_lr is not None:
            require_order(least, critic_lr, "--critic-lr")
        if (decoupled := stated.get("decoupled_lr")) is not None:
            require_order(stated.get("decoupled_min_lr") or 0.0, decoupled, "--decoupled-lr", "--decoupled-min-lr")
    except ConfigError as error:
        yield str(error)
