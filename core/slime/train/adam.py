"""Adam with the step count in the parameter group.

Megatron's distributed optimizer saves and reloads optimizers of that form (TransformerEngine's and Apex's
FusedAdam); with torch's own, which counts per parameter, it cannot load what it saved.  `install_adam` puts
this one where neither package is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
import torch
from torch.optim.adam import adam


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015), or AdamW (Loshchilov and Hutter, 2019) with `adam_w_mode`."""

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
            if not params:
                continue
            adam(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in params],
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


def install_adam() -> None:
    """Make Megatron use `GroupStepAdam` where neither TransformerEngine nor Apex is installed."""
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        megatron_optimizer.Adam = distributed_optimizer.Adam = GroupStepAdam
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed_optimizer.HAVE_APEX_OR_TE = distributed_optimizer.USING_APEX_OPTIMIZER = True
