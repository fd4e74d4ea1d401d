"""What a data source must hand out, and what state it may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from slime.errors import PluginContractError
from slime.types import Group, Status


def check_groups(groups: Sequence[Group], count: int, samples_per_prompt: int) -> None:
    """`count` groups of `samples_per_prompt` pending samples, each with its `group_index` and an `index` of its own.

    Raises `PluginContractError`.
    """
    if len(groups) != count:
        raise PluginContractError(f"gave {len(groups)} groups, expected {count}")
    if len({group.index for group in groups}) != count:
        raise PluginContractError(f"gave one group index to several of {count} groups")
    for group in groups:
        _check_group(group, samples_per_prompt)
    if len({sample.index for group in groups for sample in group.samples}) != count * samples_per_prompt:
        raise PluginContractError("gave one sample index to several samples")


def check_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` as it will come back from a checkpoint, sharing nothing with the living source.

    Raises `PluginContractError` where it is no JSON.
    """
    try:
        detached: dict[str, Any] = orjson.loads(orjson.dumps(state))
    except TypeError as error:
        raise PluginContractError(f"gave a state_dict that is no JSON: {error}") from None
    return detached


def _check_group(group: Group, samples_per_prompt: int) -> None:
    if len(group.samples) != samples_per_prompt:
        raise PluginContractError(
            f"gave group {group.index} {len(group.samples)} samples,"
            f" expected --n-samples-per-prompt = {samples_per_prompt}"
        )
    for sample in group.samples:
        if sample.group_index != group.index or sample.index is None or sample.status is not Status.PENDING:
            raise PluginContractError(
                f"gave group {group.index} a sample with group_index {sample.group_index}, index"
                f" {sample.index}, status {sample.status.name}; expected that group_index, an index, status PENDING"
            )
