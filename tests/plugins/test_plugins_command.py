"""`slime plugins`: table, JSON, details, and its exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from slime.cli.plugins import run
from slime.errors import ConfigError, PluginLoadError


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert run(argv) == code
    return capsys.readouterr().out


def line(text: str, start: str) -> list[str]:
    [found] = [row for row in text.splitlines() if row.startswith(start + " ")]
    return [cell.strip() for cell in found.split("  ") if cell.strip()]


def test_the_table_shows_every_plugin_and_where_it_is_from(
    install_reward: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("math", "boxed")
    text = output(capsys)
    assert text.splitlines()[0].split() == ["PLUGIN", "VERSION", "API", "STATUS", "PROVIDES", "FROM"]
    assert line(text, "math") == ["math", "0.3.1", "1", "ok", "reward boxed", "slime-reward-math"]
    assert line(text, "rewards") == ["rewards", "0.1.0", "1", "ok", "reward exact_match", "slime-rl (built in)"]
    assert "5 plugins" in text


def test_broken_and_clashing_plugins_are_told_with_the_remedy(
    install_reward: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("bad", "x", source="slime_api = 3\n")
    install_reward("math", "boxed")
    install_reward("rival", "boxed")
    text = output(capsys)
    assert line(text, "bad")[2:5] == ["3", "broken", "written for plugin API 3, this slime speaks 1"]
    assert line(text, "rival")[3] == line(text, "math")[3] == "clash"
    assert "7 plugins, 1 broken, 2 clash" in text
    assert "bad: Try: pip install -U slime-rl" in text
    assert "reward 'boxed' is ambiguous: write math/boxed" in text


def test_check_exits_with_1_when_something_is_wrong(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    output(capsys, "--check", code=0)
    install_reward("bad", "x", source="import sympie\n")
    output(capsys, code=0)
    output(capsys, "--check", code=1)


def test_json_holds_what_the_table_shows_and_more(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("math", "boxed")
    listing = json.loads(output(capsys, "--json"))
    assert (listing["format"], listing["api"]) == (1, 1)
    [math] = [plugin for plugin in listing["plugins"] if plugin["plugin"] == "math"]
    [provided] = math.pop("provides")
    assert math == {
        "plugin": "math",
        "distribution": "slime-reward-math",
        "version": "0.3.1",
        "entry": "slime_reward_math",
        "built_in": False,
        "status": "ok",
        "api": 1,
        "problem": None,
        "remedy": None,
    }
    assert provided["id"] == "math/boxed" and provided["factory"] == "slime_reward_math_impl:Impl"


def test_kind_narrows_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--kind", "generator")
    assert "single_turn" in text and "exact_match" not in text


def test_an_unknown_kind_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--kind rewards: expected one of .* Did you mean reward\?"):
        run(["--kind", "rewards"])


def test_no_load_runs_no_plugins_code(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("bad", "x", source="raise SystemExit\n")
    assert line(output(capsys, "--no-load"), "bad")[3] == "not loaded"
    assert "slime_reward_bad" not in sys.modules


def test_verbose_adds_the_traceback(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("bad", "x", source="import sympie\n")
    assert "Traceback" not in output(capsys)
    assert "Traceback" in output(capsys, "-v")


def test_show_lists_options_with_types_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "show", "rewards/exact_match")
    assert line(text, "  reward.ignore-case")[:3] == ["reward.ignore-case", "bool", "False"]
    assert "slime_rewards.exact_match:ExactMatch" in text


def test_show_of_an_unknown_component_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no component is called 'exact_mach'. Did you mean exact_match\?"):
        run(["show", "exact_mach"])


def test_show_of_a_broken_plugins_component_says_why(install_reward: Any) -> None:
    install_reward("bad", "x", source="import sympie\n")
    with pytest.raises(PluginLoadError, match="sympie"):
        run(["show", "bad/x"])
