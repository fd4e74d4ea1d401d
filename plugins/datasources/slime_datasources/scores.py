"""What the filters know of a group: the rewards of its samples that can be trained on."""

from __future__ import annotations

from slime.plugin import Group


def scores(group: Group) -> list[float]:
    """Rewards in float64 of the samples that were generated and scored; lost samples have none."""
    return [float(value) for sample in group.samples if sample.trainable and (value := sample.reward_value) is not None]
