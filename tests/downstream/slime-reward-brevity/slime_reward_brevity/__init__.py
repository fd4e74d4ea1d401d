"""A reward for slime: the shorter, the better."""

from __future__ import annotations

from pydantic import Field

from slime.plugin import Options, RewardSpec, hookimpl

slime_api = 1


class BrevityOptions(Options):
    """Options of `brevity/short`."""

    limit: int = Field(default=200, ge=1, description="characters at which a response is worth nothing")


@hookimpl
def slime_register_rewards() -> list[RewardSpec]:
    """The rewards of this package."""
    return [
        RewardSpec(
            name="short",
            factory="slime_reward_brevity.impl:Short",
            options=BrevityOptions,
            summary="1 - characters / limit",
        )
    ]
