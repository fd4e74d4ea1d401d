"""`slime doctor`, and the notes of runs on GPUs: what is named, with its remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime.config import RunConfig
from slime.config.defaults import resolve
from slime_planner import devices as module
from slime_planner.at_hand import cluster_at_hand
from slime_planner.cluster import GPUS as KINDS
from slime_planner.devices import (
    Devices,
    Gpu,
    Packages,
    Tenant,
    device_notes,
    doubts,
    find_devices,
    find_packages,
    problems,
)
from slime_planner.doctor import package_problems, port_problems, run

H100 = [Gpu(index, f"GPU-{index}aaa", "NVIDIA H100 80GB HBM3", 85.5) for index in range(2)]
L4 = Gpu(2, "GPU-2bbb", "NVIDIA L4", 24.2)
GOOD = Devices("580.65.06", tuple(H100))
PACKAGES = Packages("2.14.1", "13.0")

#: what the fake driver's tool answers
GPUS = "0, GPU-0aaa, NVIDIA H100 80GB HBM3, {driver}, 81559\n1, GPU-1aaa, NVIDIA H100 80GB HBM3, {driver}, {memory}\n"
PROCESSES = "GPU-1aaa, {pid}, 30000\n"


@pytest.fixture
def fake_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a fake of the driver's tool on the path."""

    def install(driver: str = "580.65.06", pid: int = os.getppid(), memory: str = "81559") -> None:
        tool = tmp_path / "nvidia-smi"
        answers = {"gpu": GPUS.format(driver=driver, memory=memory), "compute-apps": PROCESSES.format(pid=pid)}
        cases = "".join(f"--query-{name}=*) printf '%s' '{answer}';;\n" for name, answer in answers.items())
        tool.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_the_kernels_that_sglang_brings_say_what_they_are_built_for() -> None:
    found = find_packages()
    assert (found.kernels_torch, found.kernels_cuda) == ("==2.14.1", "13")
    assert [*problems(GOOD, replace(found, torch="2.14.1+cu130", cuda="13.0"))] == []


def test_a_machine_without_a_fault_has_no_problem() -> None:
    for visible in (None, "0,1", "1", "GPU-1a"):
        found = replace(GOOD, visible=visible)
        assert [*problems(found, PACKAGES), *doubts(found)] == []


@pytest.mark.parametrize(
    ("devices", "packages", "says"),
    [
        (Devices(), PACKAGES, "finds no NVIDIA driver"),
        (
            replace(GOOD, driver="535.183.01"),
            PACKAGES,
            "535.183.01 is too old: torch 2.14.1 is built for CUDA 13.0",
        ),
        (replace(GOOD, driver="520.1"), Packages("2.6.0", "12.4"), "needs driver 525 or later"),
        (GOOD, Packages("2.13.0+cpu", ""), "torch 2.13.0+cpu is built for the CPU alone"),
        (GOOD, Packages("2.13.0+cpu", "", "", "==2.14.1", "13"), "is built for the CPU alone"),  # said once
        (
            GOOD,
            Packages("2.11.0", "13.0", "", "==2.14.1", "13"),
            "torch 2.11.0 is installed, and SGLang's kernels are built for torch==2.14.1",
        ),
        (
            GOOD,
            Packages("2.14.1+cu126", "12.6", "", "==2.14.1", "13"),
            "torch 2.14.1+cu126 is built for CUDA 12.6, and SGLang's kernels for CUDA 13",
        ),
        (replace(GOOD, visible=""), PACKAGES, "hides all GPUs. Unset it: 0 (NVIDIA H100 80GB HBM3, 86 GB), 1"),
        (replace(GOOD, visible="-1"), PACKAGES, "hides all GPUs"),
        (replace(GOOD, visible="0,7"), PACKAGES, "there is no GPU 7. This machine has 0 ("),
        (replace(GOOD, visible="GPU-9"), PACKAGES, "there is no GPU GPU-9"),
        (replace(GOOD, visible="1,1"), PACKAGES, "names a GPU twice"),
        (GOOD, replace(PACKAGES, transformer_engine="undefined symbol: x"), "cannot be imported: undefined symbol: x"),
    ],
)
def test_what_keeps_a_run_off_the_gpus_is_named(devices: Devices, packages: Packages, says: str) -> None:
    (problem,) = problems(devices, packages)
    assert says in problem


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (replace(GOOD, gpus=(*H100, L4)), "the GPUs differ: 0 (NVIDIA H100 80GB HBM3, 86 GB)"),
        (
            replace(GOOD, gpus=(replace(L4, memory_gb=8.6),)),
            "GPU 2 (NVIDIA L4) has 9 GB: too little to train beside an engine. Choose a larger one",
        ),
        (
            replace(GOOD, tenants=(Tenant("GPU-1aaa", 4711, 31.4, "python of user ada"),)),
            "process 4711 (python of user ada) holds 31.4 GB of GPU 1",
        ),
    ],
)
def test_what_a_run_would_suffer_from_is_noted(devices: Devices, says: str) -> None:
    (doubt,) = doubts(devices)
    assert says in doubt


def test_gpus_that_are_left_out_are_not_noted() -> None:
    tenants = (Tenant("GPU-1aaa", 4711, 31.4, "python of user ada"),)
    assert [*doubts(Devices("580.1", (*H100, L4), tenants, visible="0"))] == []


def test_the_drivers_tool_is_read(
    fake_nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvidia_smi()
    found = module.find_devices()
    assert found.driver == "580.65.06"
    assert found.gpus == tuple(replace(gpu, memory_gb=pytest.approx(85.5, abs=0.1)) for gpu in H100)
    assert [tenant.pid for tenant in found.tenants] == [os.getppid()]

    monkeypatch.setattr("slime_planner.doctor.find_packages", lambda: PACKAGES)
    assert run([]) == 0
    printed = capsys.readouterr().out
    assert "GPU 1          NVIDIA H100 80GB HBM3, 86 GB\n" in printed
    assert f"note           process {os.getppid()} (" in printed

    fake_nvidia_smi(driver="470.1", pid=os.getpid())  # our own process is nobody else
    assert run([]) == 1
    printed = capsys.readouterr().out
    assert "problem        NVIDIA driver 470.1 is too old" in printed and "process" not in printed


def test_runs_on_gpus_of_this_machine_alone_have_notes(fake_nvidia_smi: Callable[..., None]) -> None:
    def notes(**cluster: object) -> list[str]:
        return device_notes(RunConfig.model_validate({"cluster": cluster}))

    fake_nvidia_smi(driver="470.1")
    assert notes(device="cpu") == notes(device="cuda", ray_address="head:6379") == []
    assert notes(device="cuda", actor_num_nodes=2) == []
    assert any("470.1" in note or "CPU alone" in note for note in notes(device="cuda"))


def test_a_run_that_auto_puts_on_the_cpu_says_why(
    fake_nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi()
    for visible in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        [note] = device_notes(resolve(RunConfig()))
        assert f"on the CPU: CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs of this machine, 0 (NVIDIA H100" in note
    for visible in ("1", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert device_notes(resolve(RunConfig.model_validate({"cluster": {"device": "cpu"}}))) == []
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_notes(resolve(RunConfig())) == []


@pytest.mark.parametrize(
    ("visible", "memory", "mebibytes"),
    [
        (None, "40000", 40000),
        ("0", "40000", 81559),  # the smaller one is not the run's
        ("GPU-1a,0", "40000", 40000),
        (None, "[N/A]", 81559),
        ("1", "[N/A]", None),
        ("-1", "40000", None),
    ],
)
def test_the_smallest_gpu_that_a_run_may_use_counts(
    fake_nvidia_smi: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    memory: str,
    mebibytes: int | None,
) -> None:
    fake_nvidia_smi(memory=memory)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cluster, _ = cluster_at_hand(RunConfig(), find_devices(), with_engines=True)
    assert cluster.gpu.memory == pytest.approx(KINDS["h100"].memory if mebibytes is None else mebibytes / 1024)


def test_a_transformer_engine_that_does_not_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_packages().transformer_engine == ""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise ImportError('undefined symbol: nvte')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert find_packages().transformer_engine == "ImportError: undefined symbol: nvte"


def test_the_installed_packages_are_those_that_slime_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*package_problems()] == []
    monkeypatch.setattr("slime_planner.doctor._version", lambda name: {"sglang": "0.4.1", "ray": ""}.get(name, "999"))
    found = [*package_problems()]
    assert "sglang 0.4.1 is installed, and slime needs sglang==0.5.23: make install" in found
    assert "ray is not installed: make install" in found


def test_a_machine_without_ports_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*port_problems()] == []

    def none() -> int:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr("slime_planner.doctor.free_port", none)
    assert "no port of 127.0.0.1 can be listened on ([Errno 99] Cannot assign" in next(port_problems())
