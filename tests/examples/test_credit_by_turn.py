"""Credit by turn: the package's own tests, and a short real run in which its column reaches estimator and file."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.support.python import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
SLIME = ["-m", "slime.cli.main"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder to work in, and a folder into which pip installed the package offline."""
    folder = tmp_path_factory.mktemp("credit-by-turn")
    source, site = folder / "source", folder / "site"
    shutil.copytree(EXAMPLES / "credit-by-turn", source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = ["-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-build-isolation"]
    run_python([*pip, "--no-index", "--target", str(site), str(source)], folder)
    return folder, site


@pytest.mark.nightly
def test_the_package_passes_the_contract_kit_and_its_tests(installed: tuple[Path, Path]) -> None:
    folder, site = installed
    run_python([*SLIME, "plugins", "check", "credit_by_turn"], folder, PYTHONPATH=str(site))
    own = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_credit_by_turn.py"]
    assert "6 passed" in run_python(own, folder / "source", PYTHONPATH=str(site))


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_credit_reaches_the_estimator_and_the_file(installed: tuple[Path, Path]) -> None:
    """With a random model: the whole example shows which credit teaches more."""
    folder, site = installed
    example = EXAMPLES / "credit-by-turn"
    make = (
        "from pathlib import Path; import make_task; work = Path('outputs/credit-by-turn'); make_task.make_data(work)"
    )
    run_python(["-c", f"{make}; make_task.make_model(work / 'warm_start', seed=0)"], folder, PYTHONPATH=str(example))
    flags = ["--reward", "judged_turns", "--advantage-estimator", "by_turn", "--run-name", "turns"]
    flags += ["--num-rollout", "1", "--rollout-batch-size", "2", "--global-batch-size", "16", "--eval-interval", "1"]
    flags += ["--log-token-columns", "all", "--skip-eval-before-train"]
    run_python([*SLIME, "train", str(example / "run.toml"), *flags], folder, PYTHONPATH=str(site))
    samples = (folder / "outputs/turns/rollouts/000000.jsonl").read_text(encoding="utf-8").splitlines()
    rows = pq.read_table(folder / "outputs/turns/rollouts/000000.tokens.parquet").to_pylist()
    assert len(rows) == len(samples) == 16
    for row in rows:
        written = [source == 0 for source in row["source"]]
        assert written == [not math.isnan(credit) for credit in row["credit"]]
        assert written == [not math.isnan(advantage) for advantage in row["advantage"]]
        assert row["credit"][-1] in (0, 1)
