"""trl's and verl's own code, ready to call.

verl's modules are imported as they are.  trl's loss is a method of a trainer whose module imports accelerate, datasets,
pandas and transformers' Trainer, none of which its arithmetic uses: so that one function is compiled from the installed
source, unchanged but for its decorators, and called with a stand-in for the trainer.
"""

from __future__ import annotations

import ast
import functools
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@functools.cache
def verl() -> SimpleNamespace:
    """verl's `core_algos` (as `core`), `rollout_corr_helper` (`correction`) and `ActorConfig`."""
    environment, handlers = dict(os.environ), list(logging.getLogger().handlers)
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

    # The import sets variables and a log handler, which must not affect later tests in this process.
    os.environ.clear()
    os.environ.update(environment)
    logging.getLogger().handlers[:] = handlers
    return SimpleNamespace(core=core_algos, correction=rollout_corr_helper, ActorConfig=ActorConfig)


def verl_policy_loss(
    mode: str,
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    aggregation: str,
    low: float = 0.2,
    high: float = 0.28,
    dual: float = 1e9,
    weights: Tensor | None = None,
) -> Tensor:
    """The loss of one of verl's policy losses; `dual` is its clip_ratio_c, which it always applies."""
    config = verl().ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
    )
    function = verl().core.get_policy_loss_fn(mode)
    loss: Tensor = function(old, log_probs, advantages, mask, aggregation, config, weights)[0]
    return loss


@functools.cache
def trl_function(file: str, name: str) -> Callable[..., Any]:
    """A function or class of trl's source, compiled separately."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None, "trl is not installed: run `make install`"
    path = Path(spec.origin).parent / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    (found,) = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    found.decorator_list = []
    module = ast.fix_missing_locations(ast.Module(body=[found], type_ignores=[]))
    namespace: dict[str, Any] = {"torch": torch, "math": math}
    if file == "trainer/grpo_trainer.py":
        namespace |= {extreme: trl_function("trainer/utils.py", extreme) for extreme in ("nanmin", "nanmax")}
    exec(compile(module, str(path), "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def trl_loss(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str,
    level: str = "token",
    low: float = 0.2,
    high: float = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    ref: Tensor | None = None,
    bias_correction: bool = False,
    engine: Tensor | None = None,
    weights: Tensor | None = None,
    sequence_delta: float | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    longest: int = 1,
) -> Tensor:
    """`GRPOTrainer._compute_loss` on one process without gradient accumulation."""
    entropies = torch.zeros_like(log_probs) if entropy is None else entropy
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropies, None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),  # noqa: ARG005
        args=SimpleNamespace(use_bias_correction_kl=bias_correction, delta=delta, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        importance_sampling_level=level,
        loss_type=loss_type,
        beta=beta,
        epsilon_low=low,
        epsilon_high=high,
        max_completion_length=longest,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        off_policy_mask_threshold=sequence_delta,
        get_off_policy_mask=trl_function("trainer/grpo_trainer.py", "get_off_policy_mask"),
        _entropy_bonus_enabled=entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _metrics={"train": defaultdict(list)},
    )
    trainer.accelerator.sync_gradients = True
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    optional = {
        "ref_per_token_logps": ref,
        "importance_sampling_ratio": weights,
        "sampling_per_token_logps": engine,
    }
    inputs |= {name: value for name, value in optional.items() if value is not None}
    loss: Tensor = trl_function("trainer/grpo_trainer.py", "_compute_loss")(trainer, None, inputs)
    return loss
