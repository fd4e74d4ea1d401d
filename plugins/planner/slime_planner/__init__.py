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
    from slime_planner.memory_here import memory_lines, memory_note
    from slime_planner.predicted_activations import activations_not_predicted
    from slime_planner.predicted_memory import not_predicted
    from slime_planner.predicted_sync import sync_lines

    note = memory_note(config, model, critic=with_critic, with_engines=with_engines)
    notes = [*([] if note is None else [note]), *device_notes(config)]
    if config.on_gpu and not (not_predicted(config) or activations_not_predicted(config)):
        lines = plan_at_hand(
            config, model, critic=with_critic, with_engines=with_engines, longest_prompt=longest_prompt
        )
        return {**lines, "notes": [*notes, *lines["notes"]]}
    kind = "GPUs" if config.on_gpu else "CPUs (--device cuda plans for GPUs)"
    return {
        "planned for": [kind],
        "memory": [
            *memory_lines(config, model, critic=with_critic, with_engines=with_engines, longest_prompt=longest_prompt)
        ],
        "weight sync": [*sync_lines(config, model)] if with_engines else [],
        "notes": notes,
    }
