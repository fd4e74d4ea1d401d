"""Building components: options are checked, the class imported, and its methods checked."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from slime.errors import ConfigError, DataError, PluginLoadError
from slime.plugin import Context
from slime.registry.component import checked_options
from slime.registry.plugin_set import survey_plugins

OPTIONS = """
    import slime.plugin as sp

    slime_api = 1

    class Opts(sp.Options):
        timeout: float = 1.0
        name: str

    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="opt", factory="slime_reward_math_impl:Impl", options=Opts)]
"""


def test_build_gives_the_class_its_options_and_context(install_reward: Any, context: Context) -> None:
    install_reward("math", "opt", source=OPTIONS)
    plugins = survey_plugins()
    assert "slime_reward_math_impl" not in sys.modules  # the implementation is imported when it is built
    made = plugins.build("reward", "opt", {"name": "n", "timeout": "2"}, context)
    assert (made.options.timeout, made.options.name, made.context) == (2.0, "n", context)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "n", "timeuot": 1},
            r"options of reward math/opt \(slime-reward-math 0.3.1\): no option 'timeuot'. Did you mean timeout",
        ),
        ({"name": "n", "timeout": "soon"}, r"'timeout' is 'soon': .*valid number"),
        ({}, r"'name' is required"),
    ],
)
def test_wrong_options_name_component_and_option(install_reward: Any, options: dict[str, Any], message: str) -> None:
    install_reward("math", "opt", source=OPTIONS)
    with pytest.raises(ConfigError, match=message):
        checked_options(survey_plugins().find("reward", "math/opt"), options)


def test_a_missing_option_of_a_tracker_is_told_with_its_whole_flag(install: Any) -> None:
    source = OPTIONS.replace("_rewards", "_trackers").replace("RewardSpec", "TrackerSpec")
    install(
        "slime-mine", "1", {"mine": "slime_mine"}, {"slime_mine": source, "slime_reward_math_impl": "Impl = object"}
    )
    # A run may have several trackers, so that --tracker.name alone would be refused.
    with pytest.raises(ConfigError, match=r"'name' is required: write --tracker\.opt\.name$"):
        checked_options(survey_plugins().find("tracker", "opt"), {})


def test_options_are_checked_before_anything_is_imported(install_reward: Any, context: Context) -> None:
    install_reward("math", "opt", source=OPTIONS, impl="raise RuntimeError\n")
    with pytest.raises(ConfigError):
        survey_plugins().build("reward", "opt", {"nme": "n"}, context)


def test_a_missing_class_is_named_with_the_nearest(install_reward: Any, context: Context) -> None:
    install_reward("math", "boxed", impl="class Imple: pass\n")
    message = (
        r"names the class slime_reward_math_impl:Impl, but slime_reward_math_impl has no Impl. Did you mean Imple\?"
    )
    with pytest.raises(PluginLoadError, match=message):
        survey_plugins().build("reward", "boxed", {}, context)


def test_an_import_error_names_package_and_remedy(install_reward: Any, context: Context) -> None:
    install_reward("math", "boxed", impl="import sympie\n")
    message = (
        r"reward math/boxed \(slime-reward-math 0.3.1\) cannot be imported: .*: Mod.*NotFoundError.*provides sympie"
    )
    with pytest.raises(PluginLoadError, match=message):
        survey_plugins().build("reward", "boxed", {}, context)


def test_an_error_in_a_constructor_names_the_component(install_reward: Any, context: Context) -> None:
    impl = "class Impl:\n    def __init__(self, options, context): raise KeyError('url')\n"
    install_reward("math", "boxed", impl=impl)
    with pytest.raises(
        PluginLoadError, match=r"math/boxed \(slime-reward-math 0.3.1\) cannot be built: .*:2: KeyError: 'url'"
    ):
        survey_plugins().build("reward", "boxed", {}, context)


def test_a_config_error_is_raised_unchanged(install_reward: Any, context: Context) -> None:
    impl = (
        "from slime.errors import DataError\n"
        "class Impl:\n    def __init__(self, options, context): raise DataError('a.jsonl:3 is no JSON')\n"
    )
    install_reward("math", "boxed", impl=impl)
    with pytest.raises(DataError, match=r"^a.jsonl:3 is no JSON$"):
        survey_plugins().build("reward", "boxed", {}, context)


def test_resolve_checks_everything_a_run_uses_without_importing_it(config_with: Any) -> None:
    used = survey_plugins().resolve(config_with(options={"reward": {"ignore_case": True}}))
    assert {kind: one.component.id for kind, one in used.items()} == {
        "estimator": "estimators/grpo",
        "reward": "rewards/exact_match",
        "datasource": "datasources/prompts",
        "generator": "generators/single_turn",
        "tracker[0]": "trackers/tensorboard",
    }
    assert used["reward"].options.model_dump()["ignore_case"] is True


def test_supervised_runs_use_no_estimator(config_with: Any) -> None:
    config = config_with(loss_type="sft_loss", reward=None, generator="supervised")
    assert set(survey_plugins().resolve(config)) == {"datasource", "generator", "tracker[0]"}


def test_an_estimator_of_groups_needs_several_samples_per_prompt(config_with: Any) -> None:
    with pytest.raises(ConfigError, match="--n-samples-per-prompt is 1: every advantage would be 0"):
        survey_plugins().resolve(config_with(samples=1))


CRITIC = """
    import slime.plugin as sp
    slime_api = 1
    @sp.hookimpl
    def slime_register_estimators():
        return [sp.EstimatorSpec(name="ac", factory="with_critic_impl:E", needs=frozenset({"critic"}))]
"""


@pytest.mark.parametrize(
    "stated", [{"critic_lr": 1e-5}, {"critic_load": "rm"}, {"value_clip": 0.5}, {"num_critic_only_steps": 3}]
)
def test_critic_options_need_an_estimator_with_a_critic(install: Any, config_with: Any, stated: dict[str, Any]) -> None:
    impl = "class E:\n    def advantages(self, batch): ...\n"
    install("slime-estimator-ac", "1", {"ac": "with_critic"}, {"with_critic": CRITIC, "with_critic_impl": impl})
    assert "estimator" in survey_plugins().resolve(config_with(estimator="ac", **stated))
    (flag,) = (f"--{name.replace('_', '-')} {value}" for name, value in stated.items())
    with pytest.raises(ConfigError, match=rf"{flag}: the estimator grpo trains no critic"):
        survey_plugins().resolve(config_with(**stated))
    supervised = {"loss_type": "sft_loss", "reward": None, "generator": "supervised", "estimator": None}
    with pytest.raises(ConfigError, match=rf"{flag}: supervised training trains no critic"):
        survey_plugins().resolve(config_with(**supervised, **stated))


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        (
            "import sympie\nclass Impl: pass\n",
            r"_impl needs sympie, which is not installed. Install the package that provides sympie",
        ),
        ("from sympie.core import x\nclass Impl: pass\n", "needs sympie"),
        ("class Imple: pass\n", r"slime_reward_math_impl has no Impl. Did you mean Imple\?"),
        ("class Impl(:\n", "is not valid Python"),
    ],
)
def test_a_factory_that_cannot_work_is_refused_before_anything_starts(
    install_reward: Any, config_with: Any, impl: str, message: str
) -> None:
    install_reward("math", "boxed", impl=impl)
    with pytest.raises(PluginLoadError, match=message):
        survey_plugins().resolve(config_with(reward="boxed"))
    assert "slime_reward_math_impl" not in sys.modules
    assert set(survey_plugins().resolve(config_with())) == {
        "estimator",
        "reward",
        "datasource",
        "generator",
        "tracker[0]",
    }


@pytest.mark.parametrize(
    "impl",
    [
        "try:\n    import sympie\nexcept ImportError:\n    sympie = None\nclass Impl: pass\n",
        "from json import JSONDecoder as Impl\n",
        "from json import *\n",
        "if True:\n    class Impl: pass\n",
        "Impl = type('Impl', (), {})\n",
        "def __getattr__(name): return object\n",
    ],
)
def test_a_factory_that_cannot_be_checked_is_accepted(install_reward: Any, config_with: Any, impl: str) -> None:
    install_reward("math", "boxed", impl=impl)
    assert survey_plugins().resolve(config_with(reward="boxed"))["reward"].component.id == "math/boxed"


def test_kl_coef_is_refused_for_third_party_estimators_without_it(install: Any, config_with: Any) -> None:
    hook = """
        import slime.plugin as sp

        slime_api = 1

        @sp.hookimpl
        def slime_register_estimators():
            return [
                sp.EstimatorSpec(name="without", factory="e_impl:Impl"),
                sp.EstimatorSpec(name="with", factory="e_impl:Impl", takes_kl=True),
            ]
    """
    install("slime-estimator-e", "1.0", {"e": "e"}, {"e": hook, "e_impl": "class Impl: ..."})
    plugins = survey_plugins()
    with pytest.raises(
        ConfigError, match=r"--kl-coef 0\.1 subtracts KL from the reward, which estimator e/without .*does not"
    ):
        plugins.resolve(config_with(estimator="without", kl_coef=0.1))
    assert plugins.resolve(config_with(estimator="with", kl_coef=0.1))["estimator"].component.id == "e/with"
