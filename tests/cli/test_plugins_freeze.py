"""`slime plugins --freeze` and `--compare`: whether two installations have the same plugin code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from slime.cli.plugins import run
from slime.errors import ConfigError


def frozen(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run(["--freeze"]) == 0
    return capsys.readouterr().out.splitlines()


def pin(capsys: pytest.CaptureFixture[str], name: str) -> str:
    [found] = [line for line in frozen(capsys)[1:] if f"# {name} " in line]
    return found


@pytest.fixture
def pinned(tmp_path: Path, install_reward: Any, capsys: pytest.CaptureFixture[str]) -> tuple[Path, Path]:
    """(the `.dist-info` of an installed package, the output of --freeze)."""
    info = install_reward("math", "boxed")
    path = tmp_path / "plugins.lock"
    path.write_text("\n".join(frozen(capsys)) + "\n")
    return info, path


def differences(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    assert run(["--compare", str(path)]) == 1
    return capsys.readouterr().out


def test_an_ordinary_package_is_pinned_by_version_and_files(
    install_reward: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("math", "boxed", source="raise SystemExit\n")
    line = pin(capsys, "slime-reward-math")
    requirement, _, facts = line.partition("  # ")
    assert requirement == "slime-reward-math==0.3.1"
    name, version, digest = facts.split()
    assert (name, version, len(digest)) == ("slime-reward-math", "0.3.1", len("sha256=") + 64)
    assert "slime_reward_math" not in sys.modules  # no plugin's code runs


def test_a_repository_install_is_pinned_by_commit(install_reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    direct = {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}
    install_reward("math", "boxed", direct_url=direct)
    assert pin(capsys, "slime-reward-math").startswith(
        "slime-reward-math @ git+https://example.org/r.git@abc123  # slime-reward-math 0.3.1 commit=abc123 sha256="
    )


def test_an_editable_install_is_pinned_by_folder(
    install_reward: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_reward("math", "boxed", direct_url={"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert pin(capsys, "slime-reward-math") == f"-e {tmp_path.as_uri()}  # slime-reward-math 0.3.1"


def test_the_same_installation_compares_equal(pinned: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--compare", str(pinned[1])]) == 0
    assert "the installed plugin packages are as in" in capsys.readouterr().out


def test_a_changed_file_of_the_same_version_is_noticed(
    pinned: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    info, path = pinned
    (info.parent / "slime_reward_math_impl.py").write_text("print('other')\n")
    assert "slime-reward-math: sha256 " in differences(capsys, path)


def test_a_different_version_is_noticed(pinned: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    info, path = pinned
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("0.3.1", "0.4.0"))
    assert "slime-reward-math: version 0.4.0, pinned 0.3.1" in differences(capsys, path)


def test_missing_and_additional_packages_are_noticed(
    pinned: tuple[Path, Path], install_reward: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    info, path = pinned
    (info / "entry_points.txt").unlink()
    install_reward("extra", "x")
    text = differences(capsys, path)
    assert "slime-reward-math: pinned (0.3.1), but not installed" in text
    assert "slime-reward-extra: installed (0.3.1), but not pinned" in text


@pytest.mark.parametrize("text", ["", "slime-reward-math==0.3.1\n", "# slime plugins --freeze, format 1\nrubbish\n"])
def test_a_file_that_freeze_did_not_write_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pins"
    path.write_text(text)
    with pytest.raises(ConfigError, match="slime plugins --freeze"):
        run(["--compare", str(path)])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        run(["--compare", str(tmp_path / "none")])
