"""Every kind of broken plugin is listed with its cause, and stops only runs that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.registry.broken_cases import CASES, Case
from tests.registry.broken_table import PAGE, Seen, everything, install, page_with, table

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


def slime(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from slime.cli.main import main; sys.exit(main())", *words]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_the_command_lists_all_broken_plugins(site: Path) -> None:
    done = slime(site, "plugins")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("bad") and ":" not in line.split()[0]]
    assert len(rows) == len(list(site.glob("*.dist-info")))
    assert sum(row[3] == "broken" for row in rows) == 30


def test_a_run_only_reports_problems_of_its_own_plugins(site: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[rollout]\nn_samples_per_prompt = 2\n[algorithm]\nadvantage_estimator = "grpo"\n')
    works = slime(site, "plugins", "--for", str(run), "--reward", "exact_match")
    assert works.returncode == 0, works.stdout + works.stderr
    refused = slime(site, "plugins", "--for", str(run), "--reward", "bad2/r")
    assert refused.returncode == 1
    assert "reward bad2/r comes from slime-reward-bad2 1.2, which cannot be used: " in refused.stdout
    assert "slime_reward_bad2.py:1: SyntaxError" in refused.stdout
    assert "Traceback" not in refused.stdout + refused.stderr
