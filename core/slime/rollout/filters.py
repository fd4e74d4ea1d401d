"""Buffer filters behind a boundary, and the choice that is made where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from slime.contracts.selection import check_selection
from slime.errors import PluginContractError, PluginError, SlimeError
from slime.plugin import BufferFilter, Selection
from slime.rollout.failures import reason_of
from slime.rollout.passive import PassiveChecks
from slime.types import Group


class GroupFilter:
    """Asks a buffer filter plugin and names it when it raises or breaks its contract."""

    def __init__(self, plugin: BufferFilter, who: str, passive: PassiveChecks | None = None) -> None:
        """`who` names the filter in errors.  While `passive` lasts, a group is looked at for changes."""
        self.who = who
        self._plugin = plugin
        self._passive = PassiveChecks() if passive is None else passive

    def select(self, groups: Sequence[Group], want: int) -> Selection:
        """What of `groups` to keep (at most `want`) and to drop.  Raises `PluginError`, `PluginContractError`."""
        before = self._passive.copies(self.who, groups[0].samples) if groups else None
        try:
            # A list of its own: a filter that takes groups out of the list it was given does no harm.
            selection = check_selection(self._plugin.select(list(groups), want), len(groups), want)
            self._passive.untouched(self.who, before, groups[0].samples if groups else [])
            return selection
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
