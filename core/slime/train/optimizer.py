"""The optimizer of a model: its learning-rate schedule, one update of the weights, and Adam without extensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.optim.adam import adam

from slime.config.learning_rate import require_order, warmup_and_decay
from slime.errors import TrainerError
from slime.train.settings import TrainSettings
from slime.weights.shards import buckets

if TYPE_CHECKING:
    from slime.config import RunConfig

#: bytes of parameters that are updated together
_BYTES_AT_ONCE = 1 << 28


def build_scheduler(
    config: RunConfig, settings: TrainSettings, optimizer: Any, lr_flag: str = "--lr", *, waits: bool = False
) -> Any:
    """The learning rate by --lr-decay-style, --lr-warmup-iters or -fraction, --lr-decay-iters and --min-lr.

    An iteration is one optimizer step. The default decays over the whole run. Of a resumed run only the place in the
    schedule is kept (`slime.config.learning_rate`); its length and the learning rate are those that the resumed run
    states.

    Args:
        config: The run's configuration.
        settings: The model's settings, with the learning rate.
        optimizer: What the schedule drives.
        lr_flag: The flag that set the learning rate, for messages.
        waits: Whether the model takes no step in the first --num-critic-only-steps rollouts.

    Raises:
        ConfigError: The options contradict each other.
    """
    warmup, decay = warmup_and_decay(config, waits=waits)
    lr, least = settings.optimizer.lr, settings.optimizer.min_lr
    require_order(least, lr, lr_flag)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=least,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=config.megatron.get("lr_decay_style", "constant"),
        start_wd=settings.optimizer.weight_decay,
        end_wd=settings.optimizer.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def take_step(
    optimizer: Any, scheduler: Any, *, step_name: str, sums: Mapping[str, float], scaled: bool
) -> tuple[float, float]:
    """Update the weights with the accumulated gradients.

    Args:
        optimizer: Megatron's optimizer.
        scheduler: Its learning-rate schedule, advanced by one step.
        step_name: Rollout and step, for messages.
        sums: Sums over the step's tokens, `loss` among them.
        scaled: Whether float16 loss scaling is on, with which an overflow is expected now and then: Megatron skips
            that update.

    Returns:
        The gradient norm and the learning rate of this step.

    Raises:
        TrainerError: The loss or the gradient is not finite.
    """
    seen = ", ".join(f"{name} {value:g}" for name, value in sums.items())
    losses = {name: sums[name] for name in ("loss", "mtp_loss") if name in sums}
    if wrong := {name: value for name, value in losses.items() if not math.isfinite(value)}:
        hint = " A large logprob_gap points at the engine's weights or log-probs." if "logprob_gap" in sums else ""
        [name, *_] = wrong
        raise TrainerError(
            f"{step_name}: the {name} is {wrong[name]}. Sums over the step's tokens: {seen}."
            f" The weights were not changed.{hint}"
        )
    lr = float(optimizer.param_groups[0]["lr"])
    updated, norm, _ = optimizer.step()
    scheduler.step(increment=1)
    # Megatron has no norm for gradients that overflowed in float16.
    norm = math.nan if norm is None else float(norm)
    if not math.isfinite(norm) and (updated or not scaled):
        raise TrainerError(
            f"{step_name}: the gradient norm is {norm} at loss {sums['loss']:g} and learning rate {lr:g}."
            f" Sums over the step's tokens: {seen}. Resume from the last checkpoint."
        )
    return norm, lr


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015), or AdamW (Loshchilov and Hutter, 2019) with `adam_w_mode`.

    Its step count is in the parameter group, as in TransformerEngine's and Apex's FusedAdam, which Megatron's
    distributed optimizer can save and reload. torch's own counts per parameter, and Megatron cannot load what it saved.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("GroupStepAdam takes no closure")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            # Torch's update copies what it gets.
            for bucket in buckets(((p.grad, p) for p in params), _BYTES_AT_ONCE):
                part = [p for _, p in bucket]
                adam(
                    part,
                    [grad for grad, _ in bucket],
                    [self.state[p]["exp_avg"] for p in part],
                    [self.state[p]["exp_avg_sq"] for p in part],
                    [],
                    [torch.tensor(float(group["step"] - 1)) for _ in part],
                    foreach=True,
                    decoupled_weight_decay=self.adam_w_mode,
                    amsgrad=False,
                    maximize=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                )


def _l2_norm(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _each: bool) -> tuple[Tensor, None]:
    """[1] the norm of all tensors. Megatron's own version waits for the device once per tensor."""
    norms = torch._foreach_norm(tensors[0], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def install_adam() -> None:
    """Make Megatron use `GroupStepAdam`, and our norm, if neither TransformerEngine nor Apex is installed."""
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        clip_grads.l2_norm_impl = _l2_norm
        megatron_optimizer.Adam = distributed_optimizer.Adam = GroupStepAdam
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed_optimizer.HAVE_APEX_OR_TE = distributed_optimizer.USING_APEX_OPTIMIZER = True
