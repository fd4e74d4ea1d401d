"""`python -m proofs.gpu_set` names what does not import and what SGLang refuses; nightly says if it skips it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proofs import nightly
from proofs.gpu_set import ROOT, import_problems, modules
from slime_planner.devices import Packages


def test_modules_of_slime_and_its_shops_are_found() -> None:
    found = modules()
    assert len(found) == len(set(found)) > 200
    assert {"slime", "_slime_pytest", "slime.engine.launch", "slime.train.rank", "slime_planner.doctor"} <= {*found}
    assert not [name for name in found if name.endswith("__main__")]


def test_a_module_that_does_not_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wants_libcuda.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [*import_problems(["json", "wants_libcuda"])] == [
        "import wants_libcuda: OSError: libcuda.so.1: cannot open shared object file"
    ]


@pytest.mark.nightly
def test_everything_imports_and_a_flag_that_sglang_has_not_is_named() -> None:
    done = subprocess.run([sys.executable, "-m", "proofs.gpu_set"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(" 0 problems\n"), done.stdout + done.stderr

    wrong = "from pathlib import Path; from proofs import gpu_set; gpu_set.NAMES = ['glm4-9B'];"
    wrong += " gpu_set.command_line = lambda *_: ['--model-path', 'x', '--tp-size', '2', '--no-such-flag'];"
    wrong += " print(*gpu_set.refusals(Path('.')))"
    done = subprocess.run([sys.executable, "-c", wrong], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "glm4-9B: SGLang has no --no-such-flag\n"


@pytest.mark.parametrize(("cuda", "runs"), [("", 0), ("13.0", 1)])
def test_nightly_skips_the_part_by_name_without_the_packages_for_gpus(
    cuda: str, runs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = []

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        called.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(nightly, "find_packages", lambda: Packages("2.14.1", cuda))
    monkeypatch.setattr(subprocess, "run", fail)
    assert nightly.run("gpu-set", nightly.PARTS["gpu-set"]) is not bool(runs)
    assert len(called) == runs
    named = "=== gpu-set: skipped, the packages for GPUs are not installed" in capsys.readouterr().out
    assert named is not bool(runs)
