"""What a buffer filter must hand back."""

from __future__ import annotations

from slime.errors import PluginContractError
from slime.plugin import Selection


def check_selection(selection: object, size: int, want: int) -> Selection:
    """A selection from a buffer of `size` groups: at most `want` kept, indices valid and disjoint, reasons given.

    Raises `PluginContractError`.
    """
    if not isinstance(selection, Selection):
        raise PluginContractError(f"returned a {type(selection).__name__}, expected a slime.plugin.Selection")
    keep, drop = selection.keep, selection.drop
    for index in (*keep, *drop):
        if type(index) is not int or not 0 <= index < size:
            raise PluginContractError(f"returned index {index!r}, expected whole numbers from 0 to {size - 1}")
    if len(keep) > want:
        raise PluginContractError(f"kept {len(keep)} groups, expected at most {want}")
    if len(set(keep)) != len(keep):
        raise PluginContractError("kept one index twice")
    if both := sorted(set(keep) & set(drop)):
        raise PluginContractError(f"both kept and dropped index {both[0]}")
    for index, reason in drop.items():
        if not isinstance(reason, str) or not reason:
            raise PluginContractError(f"dropped index {index} with reason {reason!r}, expected a text")
    return selection
