"""What `slime train --dry-run` says of a run on CPUs: memory of each kind of process, and bytes of a weight sync."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from slime.config import RunConfig
from slime.observe.sizes import gibibytes, size_text
from slime.plugin.architecture import Architecture
from slime_planner.fleet_lines import rank_text
from slime_planner.fleet_plan import stage_needs
from slime_planner.known_models import described
from slime_planner.predicted_activations import largest_micro_batch
from slime_planner.predicted_cache import cache_text, engine_memory
from slime_planner.predicted_memory import rank_memory
from slime_planner.predicted_sync import weight_bytes


def memory_lines(config: RunConfig, model: Architecture, *, critic: bool, with_engines: bool) -> Iterator[str]:
    """The prediction, for users.

    Args:
        config: The run.
        model: Its model.
        critic: As of `rank_memory`.
        with_engines: Whether the run has engines.
    """
    stages = stage_needs(config, described(model.family, model, config), critic=critic)
    largest = max(stages, key=lambda need: need.total)
    which = f" (the largest of {len(stages)} pipeline stages)" if len(stages) > 1 else ""
    yield rank_text(largest, which, largest_micro_batch(config).text, critic=critic)
    if with_engines:
        devices = config.cluster.rollout_num_gpus_per_engine
        where = "an engine" if devices == 1 else f"each device of an engine ({devices} devices)"
        yield f"{where}: weights {size_text(engine_memory(config, model))}; {cache_text(config, model)}"


def sync_lines(config: RunConfig, model: Architecture) -> Iterator[str]:
    """What a weight sync carries. Its seconds depend on the load of the machine, and are not predicted."""
    size = weight_bytes(config, model)
    text = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
    yield f"{text} by {config.sync.update_weight_transport}"
    if config.sync.disk_delta:
        yield (
            f"a whole version, as every {config.sync.disk_delta_full_every} are; the others have what changed,"
            " and every engine's node needs as much space in its temporary folder (TMPDIR)"
        )


def memory_notes(config: RunConfig, model: Architecture, *, critic: bool, with_engines: bool) -> Iterator[str]:
    """A note for a run that does not fit into this machine's memory."""
    if config.cluster.ray_address is not None:
        return
    stages = rank_memory(config, model, critic=critic)
    need = sum(one.total for one in stages) * config.world_size / len(stages)
    if with_engines:
        need += engine_memory(config, model) * config.own_engines * config.cluster.rollout_num_gpus_per_engine
    have = psutil.virtual_memory().total
    if need > have:
        yield (
            f"weights, gradients and optimizer need {gibibytes(need)}, and this machine has {gibibytes(have)}: use a"
            " smaller model or fewer ranks and engines"
        )
