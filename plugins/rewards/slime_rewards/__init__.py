"""slime's own rewards, registered as a third party registers its own."""

from __future__ import annotations

from slime.plugin import RewardSpec, hookimpl
from slime_rewards.options import ExactMatchOptions

slime_api = 1


@hookimpl
def slime_register_rewards() -> list[RewardSpec]:
    """The rewards of this package."""
    return [
        RewardSpec(
            name="exact_match",
            factory="slime_rewards.exact_match:ExactMatch",
            options=ExactMatchOptions,
            summary="1 if the answer in the response equals the label, else 0",
            isolation="none",  # one pass over a string cannot block
        ),
    ]
