"""The contract of every reward, and the specifics of this one."""

from slime_reward_brevity import BrevityOptions, slime_register_rewards
from slime_reward_brevity.impl import Short

from slime.testing import assert_light_import, assert_reward_contract, make_context, make_sample


def test_the_reward_keeps_its_contract() -> None:
    [spec] = slime_register_rewards()
    reward = Short(BrevityOptions(limit=10), make_context())
    assert_reward_contract(
        reward, spec=spec, good=[make_sample(response="four")], bad=[make_sample(response="it is four")]
    )


def test_the_reward_is_found_by_name(slime_component) -> None:
    [reward] = slime_component("reward", "brevity/short", {"limit": 8}).score([make_sample(response="ab")])
    assert reward.value == 0.75


def test_importing_the_package_is_light() -> None:
    assert_light_import("slime_reward_brevity")
