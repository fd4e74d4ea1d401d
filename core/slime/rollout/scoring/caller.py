"""What the rollout needs of a way to call a reward."""

from __future__ import annotations

from typing import Protocol

from slime.rollout.scoring.answers import Outcome
from slime.rollout.scoring.shipment import Shipment


class RewardCaller(Protocol):
    """Calls one reward; whatever the reward does, there is an outcome in time."""

    @property
    def restarts(self) -> int:
        """Worker processes replaced so far."""
        ...

    async def start(self) -> None:
        """Be ready for calls.  Raises `SlimeError` where the reward cannot be built."""
        ...

    async def call(self, shipment: Shipment) -> Outcome:
        """The reward's answer, or its fault.  Raises `PluginError` where no call can be made any more."""
        ...

    async def close(self) -> None:
        """End everything that was started."""
        ...
