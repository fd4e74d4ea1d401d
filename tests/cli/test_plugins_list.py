"""`slime plugins`: table, JSON and its exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema
import pytest

from slime import __version__
from slime.cli.plugins import run
from slime.cli.plugins_json import Listing
from slime.errors import ConfigError
from slime.registry.find import find_plugins

#: how many plugins come with slime
OWN = sum(plugin.own for plugin in find_plugins())


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert run(argv) == code
    return capsys.readouterr().out


def line(text: str, start: str) -> list[str]:
    [found] = [row for row in text.splitlines() if row.startswith(start + " ")]
    return [cell.strip() for cell in found.split("  ") if cell.strip()]


@pytest.mark.row("P3")
def test_the_table_shows_every_plugin_and_its_package(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("math", "boxed")
    text = output(capsys)
    assert text.splitlines()[0].split() == ["PLUGIN", "VERSION", "API", "STATUS", "PROVIDES", "FROM"]
    assert line(text, "math") == ["math", "0.3.1", "1", "ok", "reward boxed", "slime-reward-math"]
    own = line(text, "rewards")
    assert own[:4] + own[-1:] == ["rewards", __version__, "1", "ok", "slime-rl (built in)"]
    assert own[4].startswith("reward exact_match, math, ")
    assert f"{1 + OWN} plugins" in text


def test_broken_and_clashing_plugins_are_listed_with_a_remedy(
    install_reward: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("bad", "x", source="slime_api = 3\n")
    install_reward("math", "boxed")
    install_reward("rival", "boxed")
    text = output(capsys)
    assert line(text, "bad")[2:5] == ["3", "broken", "written for plugin API 3, this slime supports 1"]
    assert line(text, "rival")[3] == line(text, "math")[3] == "clash"
    assert f"{3 + OWN} plugins, 1 broken, 2 clash" in text
    assert "bad: Try: a newer slime, or an older slime-reward-bad" in text
    assert "reward 'boxed' is ambiguous: write math/boxed" in text


def test_check_exits_with_1_when_something_is_wrong(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    output(capsys, "--check", code=0)
    install_reward("bad", "x", source="import sympie\n")
    output(capsys, code=0)
    output(capsys, "--check", code=1)


def test_json_contains_the_table_and_more(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("math", "boxed")
    listing = json.loads(output(capsys, "--json"))
    assert (listing["format"], listing["api"]) == (1, 1)
    [math] = [plugin for plugin in listing["plugins"] if plugin["plugin"] == "math"]
    [provided] = math.pop("provides")
    assert math == {
        "plugin": "math",
        "hooks": [],
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


def test_every_listing_follows_the_documented_schema(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("bad", "x", source="slime_api = 3\n")
    install_reward("math", "boxed")
    install_reward("rival", "boxed")
    for words in (["--json"], ["--json", "--no-load"], ["--json", "--kind", "reward"]):
        jsonschema.validate(json.loads(output(capsys, *words)), Listing.model_json_schema())


def test_output_of_plugin_imports_is_not_in_the_json(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("loud", "x", source="print('hello')\nslime_api = 1\n")
    assert json.loads(output(capsys, "--json"))["plugins"][-1]["status"] == "ok"


def test_hooks_other_than_registration_are_listed(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = "import slime.plugin as sp\nslime_api = 1\n@sp.hookimpl\ndef slime_step_finished(step): pass\n"
    install("slime-watch", "1.0", {"watch": "slime_watch_mod"}, {"slime_watch_mod": source})
    assert line(output(capsys), "watch") == ["watch", "1.0", "1", "ok", "hook step_finished", "slime-watch"]


def test_the_table_fits_the_terminal_and_is_not_wrapped_in_a_pipe(
    install: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"reward_number_{n}" for n in range(12)]
    specs = ", ".join(f"sp.RewardSpec(name='{name}', factory='many_mod:R')" for name in names)
    source = f"import slime.plugin as sp\nslime_api = 1\n@sp.hookimpl\ndef slime_register_rewards(): return [{specs}]\n"
    install("slime-many", "1.0", {"many": "many_mod"}, {"many_mod": source})
    monkeypatch.delenv("COLUMNS", raising=False)
    assert line(output(capsys), "many")[4] == f"reward {', '.join(names)}"
    monkeypatch.setenv("COLUMNS", "100")
    folded = output(capsys)
    assert max(map(len, folded.splitlines())) <= 100
    assert all(name in folded for name in names)


def test_verbose_shows_the_location_of_every_plugin(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    direct = {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}
    install_reward("math", "boxed", direct_url=direct)
    text = output(capsys, "-v")
    assert "math         slime_reward_math  https://example.org/r.git, commit abc123" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jsn"], r"unknown option '--jsn'. Did you mean --json\?"),
        (["lst"], r"unknown command 'lst'. Did you mean list\?"),
        (["--freeze", "--json"], "--freeze cannot be combined with --json"),
        (["--no-load", "--kind", "reward"], "--no-load cannot be combined with --kind"),
        (["--no-load", "--check"], "--no-load cannot be combined with --check"),
        (["--json", "-v"], "--json cannot be combined with --verbose"),
        (["--kind", "reward", "--compare", "x"], "--compare cannot be combined with --kind"),
        (["--for"], "--for needs a run"),
        (["show"], "the following arguments are required: ID"),
    ],
)
def test_an_invalid_command_line_is_refused_with_the_reason(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(words)


@pytest.mark.parametrize("words", [["--help"], ["show", "-h"], ["new", "--help"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *words)
    assert all(f"slime plugins {command}" in text for command in ("show", "check", "new"))


def test_kind_filters_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--kind", "generator")
    assert "single_turn" in text and "exact_match" not in text


def test_an_unknown_kind_suggests_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"'rewards' is not a kind of component; expected one of .* Did you mean reward\?"
    ):
        run(["--kind", "rewards"])


def test_no_load_runs_no_plugin_code(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("bad", "x", source="raise SystemExit\n")
    assert line(output(capsys, "--no-load"), "bad")[3] == "not loaded"
    assert "slime_reward_bad" not in sys.modules


def test_verbose_adds_the_traceback(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("bad", "x", source="import sympie\n")
    assert "Traceback" not in output(capsys)
    assert "Traceback" in output(capsys, "-v")
