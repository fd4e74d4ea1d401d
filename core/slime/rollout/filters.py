"""Buffer filters behind a boundary, and the choice that is made where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from slime.contracts.selection import check_selection
from slime.errors import PluginContractError, PluginError, SlimeError
from slime.plugin import BufferFilter, Selection
from slime.rollout.failures import reason_of
from slime.types import Group


class GroupFilter:
    """Asks a buffer filter plugin and names it when it raises or breaks its contract."""

    def __init__(self, plugin: BufferFilter, who: str) -> None:
        """`who` names the filter in errors."""
        self.who = who
        self._plugin = plugin

    def select(self, groups: Sequence[Group], want: int) -> Selection:
        """What of `groups` to keep (at most `want`) and to drop.  Raises `PluginError`, `PluginContractError`."""
        try:
            # A list of its own: a filter that takes groups out of the list it was given does no harm.
            return check_selection(self._plugin.select(list(groups), want), len(groups), want)
        except PluginContractError as error:
            raise PluginContractError(f"{self.who} {error}") from None
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the buffer filter plugin
            raise PluginError(reason_of(self.who, error)) from error


class OldestFirst:
    """The choice without a buffer filter: the groups at the head of the buffer, none dropped."""

    who = "oldest first"

    def select(self, groups: Sequence[Group], want: int) -> Selection:
        """The first `want`."""
        return Selection(keep=list(range(min(want, len(groups)))))
