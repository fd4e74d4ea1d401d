"""`slime plugins new`: writes a complete package and overwrites nothing."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slime import __version__
from slime.cli.plugins import run
from slime.errors import ConfigError
from slime.testing.scaffold import Names, package_files

KINDS = ("reward", "estimator", "datasource", "buffer-filter", "generator", "family", "tracker", "panel")


def new(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["new", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_is_complete(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(capsys, kind, "my-idea", "--into", str(tmp_path))
    module = f"slime_{kind.replace('-', '_')}_my_idea"
    folder = tmp_path / f"slime-{kind}-my-idea"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        ".github/workflows/test.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        f"{module}/__init__.py",
        f"{module}/impl.py",
        f"{module}/py.typed",
        "tests/test_contract.py",
    ]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["slime"] == {"my_idea": module}
    assert project["name"] == folder.name
    assert "$" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_the_light_module_imports_only_slime_plugin_and_pydantic(kind: str) -> None:
    files = package_files(Names.of(kind.replace("-", "_"), "my-idea"))
    [light] = [text for path, text in files.items() if path.endswith("/__init__.py")]
    tree = ast.parse(light)
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert "slime.plugin" in imported <= {"pydantic", "slime.plugin"}
    assert "slime_api = 1" in light


def test_the_dependency_range_includes_this_version_of_slime() -> None:
    from packaging.requirements import Requirement

    files = package_files(Names.of("reward", "my-idea"))
    [slime] = tomllib.loads(files["pyproject.toml"])["project"]["dependencies"]
    wanted = Requirement(slime)
    assert wanted.name == "slime-rl"
    assert wanted.specifier.contains(__version__)
    assert not wanted.specifier.contains("1.0")


def test_next_steps_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = new(capsys, "reward", "my-reward")
    for command in (
        "pip install -e slime-reward-my-reward",
        "pytest slime-reward-my-reward",
        "slime plugins check my_reward",
        "slime train RUN.toml --reward my_reward/my_reward",
    ):
        assert f"\n  {command}\n" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My Reward", r"'My Reward' cannot name a plugin: expected lower-case .* Did you mean my-reward\?"),
        ("2fast", r"Did you mean fast\?"),
        ("--", "unknown|cannot name|required"),
        ("a" * 41, "at most 40 long"),
        ("slime-reward-boxed", r"already says what kind it is. Did you mean boxed\?"),
        ("slime", "is a reserved word"),
        ("rewards", r"'rewards' is the id of a plugin of slime-rl .*, which is installed"),
    ],
)
def test_an_invalid_name_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(["new", "reward", name, "--into", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'bufferfilter' is not a kind of component.* Did you mean buffer-filter\?"):
        run(["new", "bufferfilter", "x", "--into", str(tmp_path)])


def test_an_existing_folder_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "slime-reward-mine"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("mine")
    with pytest.raises(ConfigError, match="exists already, and nothing in it was changed"):
        run(["new", "reward", "mine", "--into", str(tmp_path)])
    assert [path.name for path in folder.iterdir()] == ["pyproject.toml"]
    assert (folder / "pyproject.toml").read_text() == "mine"


def test_the_target_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        run(["new", "reward", "mine", "--into", str(tmp_path / "none")])


def test_no_plugin_is_imported(install_reward: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_reward("bad", "x", source="raise SystemExit\n")
    new(capsys, "reward", "mine", "--into", str(tmp_path))
    assert "slime_reward_bad" not in sys.modules


def test_the_id_of_another_installed_plugin_is_refused(install_reward: Any, tmp_path: Path) -> None:
    install_reward("math", "boxed")
    with pytest.raises(ConfigError, match=r"'math' is the id of a plugin of slime-reward-math 0.3.1"):
        run(["new", "estimator", "math", "--into", str(tmp_path)])
