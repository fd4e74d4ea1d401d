"""How large a checkpoint is: weights in the trainer's type, and what Adam keeps of each trained number."""

from __future__ import annotations

import math
from collections.abc import Iterable

from slime.config import RunConfig
from slime.plugin.architecture import Architecture, Rule
from slime.weights.lora import adapter_rules, lora_of
from slime_planner.predicted_memory import number_bytes
from slime_planner.predicted_sync import weight_bytes

#: bytes of the optimizer's copy of a number and its two moments, which are saved in float32 whatever it keeps
_ADAM = 12


def checkpoint_bytes(config: RunConfig, model: Architecture) -> float:
    """Bytes of a checkpoint of the policy, with its reference where that is saved; a critic would be as much again.

    Args:
        config: The run.
        model: Its model, as it is trained.
    """
    size = number_bytes(config)
    lora = lora_of(config.lora, model)
    if lora is not None:
        adapted = (
            rule for rule in model.rules if any(name.removesuffix(".weight") in lora.modules for name in rule.hf)
        )
        return _count(one for rule in adapted for one in adapter_rules(rule, lora)) * (size + _ADAM)
    weights = weight_bytes(config, model)
    options, start = config.algorithm, config.checkpoint
    renewed = options.ref_update_interval is not None
    lost = start.initial_megatron_checkpoint is not None and start.ref_load is None
    reference = weights if (options.use_kl_loss or options.kl_coef) and (renewed or lost) else 0.0
    return weights + _count(model.rules) * _ADAM + reference


def _count(rules: Iterable[Rule]) -> float:
    return float(sum(math.prod(shape) for rule in rules for shape in rule.shapes))
