"""`slime plugins show`: options, limits, origin and requirements of a component."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.cli.plugins import run
from slime.errors import PluginConflictError, PluginLoadError, PluginNotFoundError

FULL = """
    from typing import Literal

    from pydantic import Field

    import slime.plugin as sp

    slime_api = 1

    class Opts(sp.Options):
        path: str = Field(description="where it is")
        share: float = Field(default=0.5, gt=0, le=1)
        mode: Literal["fast", "slow"] = "fast"
        words: tuple[str, ...] = Field(default=(), max_length=3)

    @sp.hookimpl
    def slime_register_rewards():
        return [
            sp.RewardSpec(
                name="boxed",
                factory="slime_reward_math_impl:Impl",
                options=Opts,
                timeout_s=7,
                docs="https://example.org/boxed",
                requires=("pluggy>=1", "sympie>=1.12"),
            )
        ]
"""


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> list[list[str]]:
    """The lines of `slime plugins show`, as cells."""
    assert run(["show", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


@pytest.fixture
def math(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    direct = {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc123def4567890"}}
    install_reward("math", "boxed", source=FULL, direct_url=direct)
    return shown(capsys, "math/boxed")


def test_options_come_with_type_default_constraints_and_meaning(math: list[list[str]]) -> None:
    assert ["--reward.path", "a string", "required", "where it is"] in math
    assert ["--reward.share", "a number", "0.5", "> 0, <= 1"] in math
    assert ["--reward.mode", "one of fast, slow", "fast"] in math
    assert ["--reward.words", "a list", "()", "at most 3 long"] in math


def test_limits_are_listed_after_the_options_with_the_components_timeout(math: list[list[str]]) -> None:
    limits = [line[:4] for line in math[-2:]]
    assert limits[0] == ["--reward.timeout-s", "a number", "7", "> 0"]
    assert limits[1] == ["--reward.error-budget", "a number", "0.25", ">= 0, <= 1"]


def test_package_commit_docs_and_missing_requirements_are_shown(math: list[list[str]]) -> None:
    assert ["package", "slime-reward-math 0.3.1, https://example.org/r.git, commit abc123def456"] in math
    assert ["docs", "https://example.org/boxed"] in math
    at = math.index(["requires", "pluggy>=1", "(installed)"])
    assert math[at + 1] == ["sympie>=1.12", "(not installed)"]


def test_the_lines_of_the_hook_and_of_the_class_are_shown(math: list[list[str]]) -> None:
    [hook] = [line[1] for line in math if line[:1] == ["hook"]]
    assert hook.endswith("slime_reward_math.py:16")
    at = math.index(["class", "slime_reward_math_impl:Impl"])
    assert math[at + 1][0].endswith("slime_reward_math_impl.py:2")


def test_the_id_of_a_plugin_shows_everything_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "generators")
    assert ["generator generators/single_turn"] in lines
    assert ["generator generators/supervised"] in lines


def test_show_states_that_a_component_has_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "datasources/prompts")
    assert lines[lines.index(["options"]) + 1] == ["none"]


def test_an_unknown_id_suggests_the_nearest() -> None:
    with pytest.raises(PluginNotFoundError, match=r"called 'exact_mach'. Did you mean exact_match\?") as caught:
        run(["show", "exact_mach"])
    assert caught.value.exit_code == 2


def test_kind_selects_one_of_two_components(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
        import slime.plugin as sp
        slime_api = 1
        @sp.hookimpl
        def slime_register_rewards():
            return [sp.RewardSpec(name="two", factory="two_kinds:R")]
        @sp.hookimpl
        def slime_register_generators():
            return [sp.GeneratorSpec(name="two", factory="two_kinds:G")]
    """
    install("slime-two", "1", {"two": "two_kinds"}, {"two_kinds": source})
    assert [line[0] for line in shown(capsys, "two") if line and "two/two" in line[0]] == [
        "reward two/two",
        "generator two/two",
    ]
    assert shown(capsys, "two", "--kind", "generator")[0] == ["generator two/two"]


def test_an_ambiguous_name_prints_the_qualified_ones(install_reward: Any) -> None:
    install_reward("math", "boxed")
    install_reward("rival", "boxed")
    with pytest.raises(PluginConflictError, match=r"write math/boxed"):
        run(["show", "boxed"])


@pytest.mark.parametrize("name", ["bad/x", "bad", "slime-reward-bad"])
def test_the_reason_a_plugin_is_broken_is_shown(install_reward: Any, name: str) -> None:
    install_reward("bad", "x", source="import sympie\n")
    with pytest.raises(PluginLoadError, match="sympie"):
        run(["show", name])


@pytest.mark.parametrize("name", ["", ":reward_func"])
def test_a_function_by_path_is_shown_as_each_kind_that_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "rm.py"
    path.write_text("def reward_func(args, sample):\n    return 1.0\n\n\nclass Score:\n    pass\n")
    assert shown(capsys, f"{path}{name}")[0] == [f"reward {path}:reward_func"]
    with pytest.raises(
        PluginNotFoundError, match=r"rm\.py:5: got class Score\(\), which cannot be a reward: it has no"
    ):
        run(["show", f"{path}:Score"])
    with pytest.raises(PluginNotFoundError, match=r"rn\.py cannot be read: No such file .* Did you mean rm\.py\?"):
        run(["show", str(tmp_path / "rn.py")])
