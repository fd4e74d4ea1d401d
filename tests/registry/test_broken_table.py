"""Every kind of broken plugin is listed with its cause, and stops only runs that use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.registry.broken_cases import CASES, Case
from tests.registry.broken_table import PAGE, Seen, everything, install, on_the_path, page_with, table

from slime.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Seen]:
    return everything()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mistake)
def test_a_broken_plugin_only_stops_runs_that_use_it(case: Case, found: dict[str, Seen]) -> None:
    seen = found[case.mistake]
    assert seen.others_run
    assert "\n" not in seen.listed and "Traceback" not in seen.listed
    if case.usable:
        assert seen.refused is None
    else:
        assert seen.refused is not None
        assert seen.exit_code == 2


def test_there_are_over_40_distinct_cases() -> None:
    assert len({case.mistake for case in CASES}) == len(CASES) > 40


def test_the_page_shows_the_actual_messages(found: dict[str, Seen]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with(table(found)), "run: python -m tests.registry.broken_table"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All broken packages at once, except those whose names conflict."""
    site = tmp_path_factory.mktemp("site")
    for number, case in enumerate(CASES):
        if len(case.packages) == 1 and case.packages[0].plugin == "bad":
            [package] = case.packages
            name = f"bad{number}"
            renamed = type(package)(
                package.source.replace("slime_reward_bad", f"slime_reward_{name}"),
                package.impl,
                f"slime-reward-{name}",
                name,
                package.entry.replace("slime_reward_bad", f"slime_reward_{name}"),
            )
            install(type(case)(case.mistake, (renamed,)), site)
    return site


@pytest.fixture
def slime(site: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `slime WORDS` where they are installed: its exit code and output, without a traceback."""

    def run(*words: str) -> tuple[int, str]:
        with on_the_path(site):
            code = main(list(words))
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return code, printed.out

    return run


def test_the_command_lists_all_broken_plugins(site: Path, slime: Callable[..., tuple[int, str]]) -> None:
    code, listed = slime("plugins")
    assert code == 0
    rows = [line.split() for line in listed.splitlines() if line.startswith("bad") and ":" not in line.split()[0]]
    assert len(rows) == len(list(site.glob("*.dist-info")))
    assert sum(row[3] == "broken" for row in rows) == 30


def test_a_run_only_reports_problems_of_its_own_plugins(tmp_path: Path, slime: Callable[..., tuple[int, str]]) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[rollout]\nn_samples_per_prompt = 2\n[algorithm]\nadvantage_estimator = "grpo"\n')
    assert slime("plugins", "--for", str(run), "--reward", "exact_match")[0] == 0
    code, listed = slime("plugins", "--for", str(run), "--reward", "bad2/r")
    assert code == 1
    assert "reward bad2/r comes from slime-reward-bad2 1.2, which cannot be used: " in listed
    assert "slime_reward_bad2.py:1: SyntaxError" in listed
