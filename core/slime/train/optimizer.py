"""The optimizer over a model's chunks, the schedule of its learning rate, and the step with its checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.errors import ConfigError, TrainerError
from slime.train.adam import install_adam
from slime.train.settings import TrainSettings

if TYPE_CHECKING:
    from slime.config import RunConfig

_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


def build_optimizer(settings: TrainSettings, chunks: list[Any]) -> Any:
    """Megatron's optimizer for DDP-wrapped chunks."""
    install_adam()
    return get_megatron_optimizer(settings.optimizer, chunks, use_gloo_process_groups=False)


def build_scheduler(
    config: RunConfig, settings: TrainSettings, optimizer: Any, lr_flag: str = "--lr", *, idle_rollouts: int = 0
) -> Any:
    """Learning rate by --lr-decay-style, --lr-warmup-iters or -fraction, --lr-decay-iters and --min-lr.

    An iteration is one optimizer step.  The default decays over the whole run.  A resumed run keeps its count of steps
    and nothing else: a longer run, or another learning rate, is what it says.  `lr_flag` names the learning rate in
    messages; in `idle_rollouts` no step is taken.  Raises `ConfigError` for combinations that do not fit.
    """
    stated = config.megatron
    style = stated.get("lr_decay_style", "constant")
    if style not in _STYLES:
        raise ConfigError(f"--lr-decay-style {style!r} is not one of {', '.join(_STYLES)}.")
    run = ((config.rollout.num_rollout or 1) - idle_rollouts) * config.steps_per_rollout
    decay = stated.get("lr_decay_iters") or max(1, run)
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
    lr, least = settings.optimizer.lr, settings.optimizer.min_lr
    if not 0 <= least <= lr:
        raise ConfigError(f"--min-lr {least} is not between 0 and {lr_flag} {lr}.")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=least,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=style,
        start_wd=settings.optimizer.weight_decay,
        end_wd=settings.optimizer.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def take_step(
    optimizer: Any, scheduler: Any, *, where: str, sums: Mapping[str, float], scaled: bool
) -> tuple[float, float]:
    """Update the weights with the gradients they have; (gradient norm, learning rate of this step).

    sums     of the step's tokens; `loss` among them
    scaled   float16 loss scaling, with which an overflow is expected now and then: Megatron skips that update

    Raises `TrainerError` when the loss or the gradient is not finite.
    """
    seen = ", ".join(f"{name} {value:g}" for name, value in sums.items())
    if not math.isfinite(sums["loss"]):
        hint = " A large logprob_gap points at the engine's weights or log-probs." if "logprob_gap" in sums else ""
        raise TrainerError(
            f"{where}: the loss is {sums['loss']}. Sums over the step's tokens: {seen}."
            f" The weights were not changed.{hint}"
        )
    lr = float(optimizer.param_groups[0]["lr"])
    updated, norm, _ = optimizer.step()
    scheduler.step(increment=1)
    norm = float(norm)
    if not math.isfinite(norm) and (updated or not scaled):
        raise TrainerError(
            f"{where}: the gradient norm is {norm} at loss {sums['loss']:g} and learning rate {lr:g}."
            f" Sums over the step's tokens: {seen}. Resume from the last checkpoint."
        )
    return norm, lr
