"""A run works without the packages beside the kernel; what is missing is named when it is asked for."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun

HIDING = Path(__file__).parents[1] / "support" / "without_shops"
#: packages that a run on a CPU works without, and a command that needs each, if there is one
SHOPS = {
    "slime_viewer": ("show", "outputs/run"),
    "slime_planner": ("convert", "model", "folder"),
    "slime_sandbox": (),
    "slime_endpoint": (),
    "slime_fused": (),
    "slime_quantised": (),
    "slime_launch": ("launch", "run.toml", "--on", "slurm"),
}

Start = Callable[..., SlimeRun]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Hides packages from the processes that the test starts."""

    def hide(*packages: str) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HIDING), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
        monkeypatch.setenv("WITHOUT_SHOPS", " ".join(packages))

    return hide


def slime(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("slime")), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("shop", SHOPS)
def test_without_one_package_the_others_work_and_it_is_named(without: Callable[..., None], shop: str) -> None:
    without(shop)
    listed = slime("plugins")
    assert listed.returncode == 0, listed.stderr
    assert shop.removeprefix("slime_") not in [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    if command := SHOPS[shop]:
        refused = slime(*command)
        assert refused.returncode == 2
        assert f"`slime {command[0]}` needs the package {shop}, which is not installed here" in refused.stderr


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.row("L4")
@pytest.mark.row("L10")
def test_a_run_of_two_ranks_without_all_of_them_trains_and_is_profiled(
    without: Callable[..., None], slime_train: Start
) -> None:
    """One run proves two things: it needs none of the packages; and two tensor-parallel ranks send their weights
    through shared memory, which engines hold exactly, and profile themselves and the engine."""
    without(*SHOPS)
    assert slime("--help").returncode == 0
    run = slime_train(
        "--num-rollout", "2", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2",
        "--update-weight-transport", "tensor", "--check-weight-update-equal",
        "--profile-steps", "1", "--profile-ranks", "1",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    assert run.left_over() == []
    assert not (run.run_dir / "report.html").exists()
    assert "report.html" not in run.output and "warning" not in run.output
    traces = sorted((run.run_dir / "profiles").iterdir())
    assert [path.name.partition(".")[0] for path in traces] == ["step-000001-engine-0-TP-0", "step-000001-trainer-1"]
    assert all("aten::mm" in gzip.decompress(path.read_bytes()).decode() for path in traces)
    assert len(steps := run.steps()) == 2
    assert not any("perf/sync/slowest_stage" in row for row in steps)
    assert all(row["train/grad_norm"] > 1e-3 and row["train/logprob_gap_max"] < 1e-4 for row in steps)


@pytest.mark.slow
def test_without_the_platform_a_run_on_a_cpu_is_refused_by_name_and_one_on_gpus_is_not(
    without: Callable[..., None], slime_train: Start
) -> None:
    without("slime_cpu")
    run = slime_train("--num-rollout", "2")
    assert run.wait() == 2
    assert "this run is on a CPU (--device), which needs the platform `slime_cpu`" in run.output
    assert "Traceback" not in run.output and not run.run_dir.exists()
    planned = slime_train("--dry-run", "--num-rollout", "2", "--device", "cuda", "--ray-address", "head:6379")
    assert planned.wait() == 0, planned.output
