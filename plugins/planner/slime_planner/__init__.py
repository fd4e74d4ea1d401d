"""The planner: predicts memory and weight syncs before a run starts, looks at the machine's GPUs (`slime doctor`), and
converts models (`slime convert`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import slime.plugin as sp

if TYPE_CHECKING:
    from slime.config import RunConfig

slime_api = 1


@sp.hookimpl
def slime_plan_lines(
    config: RunConfig, model: sp.Architecture, with_critic: bool, with_engines: bool, longest_prompt: int | None
) -> dict[str, list[str]]:
    # Every process of a run imports this module, and only the one that plans needs these.
    from slime_planner.at_hand import plan_at_hand
    from slime_planner.devices import device_notes
    from slime_planner.memory_here import memory_lines, memory_notes, sync_lines
    from slime_planner.predicted_memory import not_predicted

    if longest_prompt is not None and config.rollout.rollout_max_prompt_len is None:
        config = config.with_options("rollout", rollout_max_prompt_len=longest_prompt)
    notes = device_notes(config)
    if (option := not_predicted(config)) is not None:
        return {"memory": [f"not predicted with {option}"], "notes": notes}
    if config.on_gpu:
        lines = plan_at_hand(config, model, critic=with_critic, with_engines=with_engines)
        return {**lines, "notes": [*notes, *lines["notes"]]}
    return {
        "planned for": ["CPUs (--device cuda plans for GPUs)"],
        "memory": [*memory_lines(config, model, critic=with_critic, with_engines=with_engines)],
        "weight sync": [*sync_lines(config, model)] if with_engines else [],
        "notes": [*memory_notes(config, model, critic=with_critic, with_engines=with_engines), *notes],
    }
