"""The contract kit: plugin authors test their components with it, and slime tests its own.

    from slime.testing import assert_reward_contract, make_context, make_sample

    def test_contract():
        reward = Length(LengthOptions(), make_context())
        assert_reward_contract(reward, good=[make_sample(response="4")], bad=[...])

Plain functions that raise `AssertionError`; pytest is not needed, and its plugin `_slime_pytest` only adds fixtures.
Importing the kit loads pluggy and pydantic; torch and transformers are imported by the functions that need them.
`slime.testing.check` checks an installed component.
"""

from slime.testing.buffer_filters import assert_buffer_filter_contract
from slime.testing.context import make_context
from slime.testing.datasources import assert_datasource_contract
from slime.testing.estimators import assert_estimator_contract
from slime.testing.families import assert_family_contract
from slime.testing.family_numbers import Agreement, assert_family_matches_transformers
from slime.testing.generators import assert_generator_contract
from slime.testing.modules import assert_hookimpls_valid, assert_light_import, assert_pickles, load_module_as_plugin
from slime.testing.panels import assert_panel_contract, make_run_view
from slime.testing.rewards import assert_reward_contract
from slime.testing.samples import (
    decode,
    encode,
    make_batch,
    make_group,
    make_sample,
    make_token_batch,
    make_tokenizer,
    random_batch,
    random_buffer,
)
from slime.testing.scripted_policy import Call, Say, ScriptedPolicy
from slime.testing.tools import call_tool
from slime.testing.trackers import assert_tracker_contract

__all__ = [
    "Agreement",
    "Call",
    "Say",
    "ScriptedPolicy",
    "assert_buffer_filter_contract",
    "assert_datasource_contract",
    "assert_estimator_contract",
    "assert_family_contract",
    "assert_family_matches_transformers",
    "assert_generator_contract",
    "assert_hookimpls_valid",
    "assert_light_import",
    "assert_panel_contract",
    "assert_pickles",
    "assert_reward_contract",
    "assert_tracker_contract",
    "call_tool",
    "decode",
    "encode",
    "load_module_as_plugin",
    "make_batch",
    "make_context",
    "make_group",
    "make_run_view",
    "make_sample",
    "make_token_batch",
    "make_tokenizer",
    "random_batch",
    "random_buffer",
]
