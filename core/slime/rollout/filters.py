"""Buffer filters behind a boundary, and the choice that is made where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.contracts.groups import check_state
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

    def state(self) -> dict[str, Any] | None:
        """What it remembers, JSON-ready; None for a filter that remembers nothing.  Raises as `select` does."""
        save = getattr(self._plugin, "state_dict", None)
        if save is None:
            return None
        try:
            return check_state(save())
        except PluginContractError as error:
            raise PluginContractError(f"{self.who} {error}") from None
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the buffer filter plugin
            raise PluginError(reason_of(self.who, error)) from error

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Remember again what `state` gave; nothing where the filter or the saved run has no state."""
        load = getattr(self._plugin, "load_state_dict", None)
        if load is None or state is None:
            return
        try:
            load(state)
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the buffer filter plugin
            raise PluginError(reason_of(f"{self.who} cannot continue from its saved state", error)) from error


class OldestFirst:
    """The choice without a buffer filter: the groups at the head of the buffer, none dropped."""

    who = "oldest first"

    def select(self, groups: Sequence[Group], want: int) -> Selection:
        """The first `want`."""
        return Selection(keep=list(range(min(want, len(groups)))))
