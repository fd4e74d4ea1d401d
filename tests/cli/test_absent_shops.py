"""Without the sandbox or the endpoint: what needs it is refused before a run starts, everything else works."""

from __future__ import annotations

import importlib
import sys

import pytest
from tests.cli.conftest import Slime

from slime.errors import ConfigError

AGAIN = "comes with slime-rl: install that again, with all of its packages."


@pytest.fixture(autouse=True)
def _absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("slime_sandbox", "slime_endpoint"):
        for loaded in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("words", "component", "package"),
    [
        (["--reward", "code"], "reward rewards/code", "slime_sandbox"),
        (
            ["--generator", "black_box", "--generator.command", "true", "--apply-chat-template"],
            "generator generators/black_box",
            "slime_endpoint",
        ),
        (
            ["--generator", "verifiers_env", "--generator.taskset", "any", "--apply-chat-template"],
            "generator generators/verifiers_env",
            "slime_endpoint",
        ),
    ],
)
def test_a_component_that_needs_it_is_refused(dry_run: Slime, words: list[str], component: str, package: str) -> None:
    ended = dry_run(*words)
    assert ended.code != 0 and "Traceback" not in ended.err
    assert component in ended.err and f"needs {package}, which is not installed. {package} {AGAIN}" in ended.err


def test_the_python_tool_is_refused(dry_run: Slime) -> None:
    ended = dry_run("--generator", "tool_loop", "--generator.tools", "calculator,python")
    assert ended.code == 2
    assert "tools" in ended.err
    assert "the tool `python` needs the package slime_sandbox, which is not installed here." in ended.err


def test_other_components_of_the_same_plugins_are_not(dry_run: Slime) -> None:
    for words in ([], ["--generator", "tool_loop"]):
        assert dry_run(*words).code == 0


def test_the_documented_names_name_the_package() -> None:
    for module, name, package in (
        ("slime.kit.sandbox", "run_program", "slime_sandbox"),
        ("slime.kit.sessions", "SessionServer", "slime_endpoint"),
    ):
        face = importlib.import_module(module)
        assert name in face.__all__
        with pytest.raises(ConfigError, match=rf"{module}.{name} needs the package {package}, which is not installed"):
            getattr(face, name)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            face.nothing  # noqa: B018 - the access is the test
