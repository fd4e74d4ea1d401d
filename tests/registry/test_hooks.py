"""Hooks other than registration are called with the arguments that they declare."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cli.plan import lines_of_plugins
from slime.cli.preflight_plugins import check_config
from slime.config import PluginOptions
from slime.errors import ConfigError, PluginError
from slime.registry.plugin_set import load_plugins, survey_plugins

WATCHER = """
    import slime.plugin as sp

    slime_api = 1
    seen = []

    @sp.hookimpl
    def slime_run_started(run_dir, config):
        seen.append(("started", run_dir, config))

    @sp.hookimpl
    def slime_step_finished(metrics):
        seen.append(("step", dict(metrics)))

    @sp.hookimpl
    def slime_checkpoint_saved(step, path):
        seen.append(("saved", step, path))

    @sp.hookimpl
    def slime_run_finished(outcome, extra=None):
        seen.append(("finished", outcome))
"""
RAISER = """
    import slime.plugin as sp
    slime_api = 1

    @sp.hookimpl
    def slime_step_finished(step):
        raise OSError(f"disk full at {step}")
"""
CHECKER = """
    import slime.plugin as sp
    from slime.errors import ConfigError
    slime_api = 1

    @sp.hookimpl
    def slime_check_config(config):
        if config.reward.reward == "refused":
            raise ConfigError("no such thing here")
        config.nothing_of_that_name
"""

PLANNER = """
    import slime.plugin as sp
    slime_api = 1

    @sp.hookimpl
    def slime_plan_lines(longest_prompt):
        return {"prompts": [f"up to {10 // longest_prompt} tokens"], "notes": ["mine"]}
"""


REPORTER = """
    import slime.plugin as sp
    slime_api = 1

    @sp.hookimpl
    def slime_run_closed(run_dir, outcome):
        return {f"{outcome}.html": str(run_dir)}
"""


def test_what_plugins_make_of_a_closed_run_is_returned(install: Any) -> None:
    install("slime-report", "1", {"report": "reporter_mod"}, {"reporter_mod": REPORTER})
    plugins = load_plugins(PluginOptions(allow=["report"], deny=["viewer"]))
    written = plugins.observe("slime_run_closed", run_dir=Path("r"), outcome="finished", build_panel=None)
    assert written == [{"finished.html": "r"}]


def test_observers_get_the_arguments_they_declare(install: Any) -> None:
    install("slime-watch", "1", {"watch": "watcher_mod"}, {"watcher_mod": WATCHER.replace(", extra=None", "")})
    plugins = survey_plugins()
    call = plugins.observe
    call("slime_run_started", run_dir=Path("r"), config="c")
    call("slime_step_finished", step=1, metrics={"loss": 0.5})
    call("slime_checkpoint_saved", step=1, path=Path("p"))
    call("slime_run_finished", run_dir=Path("r"), outcome="finished")
    assert plugins.plugins[-1].module.seen == [
        ("started", Path("r"), "c"),
        ("step", {"loss": 0.5}),
        ("saved", 1, Path("p")),
        ("finished", "finished"),
    ]


def test_an_argument_the_hook_does_not_pass_is_refused_even_with_a_default(install: Any) -> None:
    install("slime-watch", "1", {"watch": "watcher_mod"}, {"watcher_mod": WATCHER})
    assert "has the parameter `extra=None`" in survey_plugins().failures[0].problem


def test_an_observer_that_raises_is_reported_once_and_counted(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install("slime-a-raise", "2.0", {"raise": "raiser_mod"}, {"raiser_mod": RAISER})
    install("slime-b-watch", "1", {"watch": "watcher_mod"}, {"watcher_mod": WATCHER.replace(", extra=None", "")})
    plugins = survey_plugins()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            plugins.observe("slime_step_finished", step=step, metrics={})
    assert (
        caplog.text.count("slime_step_finished() of plugin raise (slime-a-raise 2.0) raised OSError: disk full at 0")
        == 1
    )
    assert "disk full at 1" not in caplog.text
    assert plugins.observer_failures["raise", "slime_step_finished"] == 3
    assert len(plugins.plugins[-1].module.seen) == 3  # the other observer was still called


def test_a_plugin_may_refuse_a_configuration(install: Any, config_with: Any) -> None:
    install("slime-check", "1", {"check": "checker_mod"}, {"checker_mod": CHECKER})
    with pytest.raises(ConfigError, match=r"^no such thing here$"):
        check_config(survey_plugins(), config_with(reward="refused"))


def test_a_plugin_may_refuse_the_nodes_of_a_cluster(install: Any) -> None:
    refuses = """
    import slime.plugin as sp
    from slime.errors import ConfigError
    slime_api = 1

    @sp.hookimpl
    def slime_ray_joined(config, run_dir):
        raise ConfigError(f"not for {run_dir}")
"""
    install("slime-nodes", "1", {"nodes": "nodes_mod"}, {"nodes_mod": refuses})
    plugins = survey_plugins(PluginOptions(deny=["launch"]))
    with pytest.raises(ConfigError, match=r"^not for r$"):
        plugins.manager.hook.slime_ray_joined(config=None, run_dir=Path("r"))


def test_a_crashing_config_check_stops_only_runs_that_use_its_plugin(
    install: Any, config_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reward = """
    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="mine", factory="checker_mod:Mine")]

    class Mine: pass
"""
    install("slime-check", "1", {"check": "checker_mod"}, {"checker_mod": CHECKER + reward})
    message = "slime_check_config() of plugin check (slime-check 1): "
    with pytest.raises(PluginError, match=re.escape(message)):
        check_config(survey_plugins(), config_with(reward="mine"))
    check_config(survey_plugins(), config_with())
    assert message in caplog.text


def test_plugins_add_lines_to_the_plan(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install("slime-plan", "1", {"plan": "plan_mod"}, {"plan_mod": PLANNER})
    options = PluginOptions(deny=["planner", "quantised"])
    data, model = SimpleNamespace(name="training", longest=2, limit=8), SimpleNamespace(architecture=None)
    plugins = survey_plugins(options)
    checked: Any = SimpleNamespace(
        plugins=plugins, config=None, model=model, with_critic=False, with_engines=True, data=[data]
    )
    assert lines_of_plugins(checked) == {"prompts": ["up to 5 tokens"], "notes": ["mine"]}
    assert caplog.text == ""
    data.longest = 0
    assert lines_of_plugins(checked) == {}
    assert "slime_plan_lines() of plugin plan (slime-plan 1) raised ZeroDivisionError" in caplog.text


def test_an_observer_cannot_exit_the_process(install: Any) -> None:
    install(
        "slime-leave", "1", {"leave": "leaver_mod"}, {"leaver_mod": RAISER.replace("raise OSError", "raise SystemExit")}
    )
    plugins = survey_plugins()
    plugins.observe("slime_step_finished", step=0, metrics={})
    assert plugins.observer_failures["leave", "slime_step_finished"] == 1


def test_slimes_own_plugins_accept_an_ordinary_configuration(config: Any) -> None:
    check_config(survey_plugins(), config)
