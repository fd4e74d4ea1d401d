"""What NVIDIA's driver and the installed packages say about this machine's GPUs, and what would keep a run off them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from slime.config import RunConfig

#: the oldest driver for a major version of CUDA
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
#: below this, no model of use to anybody trains beside its engine
_SMALL_GB = 12
_ASKS_GPUS = "index,uuid,name,driver_version,memory.total"
_ASKS_PROCESSES = "gpu_uuid,pid,used_memory"
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Gpu:
    """One device, as the driver counts them."""

    index: int
    uuid: str
    name: str
    #: gigabytes (10^9 bytes)
    memory_gb: float


@dataclass(frozen=True)
class Tenant:
    """A process that holds memory of a device."""

    uuid: str
    pid: int
    memory_gb: float
    #: such as "python of user ada"
    who: str


@dataclass(frozen=True)
class Devices:
    """This machine's GPUs."""

    #: version of NVIDIA's driver; empty without one
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    #: CUDA_VISIBLE_DEVICES; None if it is not set
    visible: str | None = None

    def usable(self) -> list[Gpu]:
        """The devices that CUDA_VISIBLE_DEVICES leaves, in its order. CUDA stops at the first that does not exist."""
        if self.visible is None:
            return list(self.gpus)
        chosen: list[Gpu] = []
        for name in _names(self.visible):
            found = _gpu_named(name, self.gpus)
            if found is None:
                break
            chosen.append(found)
        return chosen


@dataclass(frozen=True)
class Packages:
    """The installed packages that depend on CUDA."""

    #: version of torch, such as 2.14.1
    torch: str
    #: version of CUDA that torch was built for; empty for a CPU build
    cuda: str
    #: why TransformerEngine cannot be imported; empty if it can, or is not installed
    transformer_engine: str = ""
    #: versions of torch for which SGLang's kernels are built, such as ==2.14.1; empty if it does not say
    kernels_torch: str = ""
    #: the major version of CUDA for which they are built; empty if it does not say
    kernels_cuda: str = ""


def find_devices() -> Devices:
    """Ask the driver's tool, `nvidia-smi`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    rows = _ask(f"--query-gpu={_ASKS_GPUS}")
    if not rows:
        return Devices(visible=visible)
    gpus = tuple(Gpu(int(index), uuid, name, _gigabytes(memory)) for index, uuid, name, _, memory in rows)
    own = {process.pid for process in [psutil.Process(), *psutil.Process().children(recursive=True)]}
    tenants = tuple(
        Tenant(uuid, int(pid), _gigabytes(memory), _who(int(pid)))
        for uuid, pid, memory in _ask(f"--query-compute-apps={_ASKS_PROCESSES}")
        if int(pid) not in own
    )
    return Devices(rows[0][3], gpus, tenants, visible)


def find_packages() -> Packages:
    """Look at the installed packages. torch is not imported; TransformerEngine is, in a process of its own."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
    stated = re.search(r"^cuda[^=]*= '([\d.]+)'", version, re.MULTILINE)
    wanted = [Requirement(text) for text in _requirements("sglang")]
    named = [name for package in wanted for name in (package.name, *package.extras)]
    return Packages(
        importlib.metadata.version("torch"),
        stated[1] if stated else "",
        _import_problem("transformer_engine.pytorch"),
        next((str(package.specifier) for package in wanted if package.name == "torch"), ""),
        next((found[1] for name in named if (found := re.search(r"(?:^|-)cu(\d+)$", name))), ""),
    )


def problems(devices: Devices, packages: Packages) -> Iterator[str]:
    """What keeps a run from using the GPUs, with the remedy, a sentence each."""
    if not packages.cuda:
        yield (
            f"torch {packages.torch} is built for the CPU alone. Install the packages for GPUs: make clean, then"
            " make install DEVICE=cuda"
        )
    elif packages.kernels_torch and not SpecifierSet(packages.kernels_torch).contains(packages.torch, prereleases=True):
        yield (
            f"torch {packages.torch} is installed, and SGLang's kernels are built for torch{packages.kernels_torch}."
            " Install the locked packages: make clean, then make install DEVICE=cuda"
        )
    elif packages.kernels_cuda and packages.cuda.split(".")[0] != packages.kernels_cuda:
        yield (
            f"torch {packages.torch} is built for CUDA {packages.cuda}, and SGLang's kernels for CUDA"
            f" {packages.kernels_cuda}. Install the locked packages: make clean, then make install DEVICE=cuda"
        )
    if not devices.driver:
        yield (
            "nvidia-smi finds no NVIDIA driver. Install one, or pass the GPUs on to the container (docker run --gpus"
            " all); --device cpu runs without"
        )
        return
    major = int((packages.cuda or "0").split(".")[0])
    oldest = _OLDEST_DRIVER.get(major, 0)
    if int(devices.driver.split(".")[0]) < oldest:
        yield (
            f"NVIDIA driver {devices.driver} is too old: torch {packages.torch} is built for CUDA {packages.cuda},"
            f" which needs driver {oldest} or later. Update it"
        )
    yield from _visibility_problems(devices)
    if packages.transformer_engine:
        yield (
            f"TransformerEngine is installed and cannot be imported: {packages.transformer_engine}. Build it for torch"
            f" {packages.torch}, or pip uninstall transformer-engine transformer-engine-torch; slime runs without"
        )


def doubts(devices: Devices) -> Iterator[str]:
    """What a run on the GPUs would suffer from, a sentence each."""
    usable = devices.usable()
    if len({gpu.name for gpu in usable}) > 1:
        yield (
            f"the GPUs differ: {_listed(usable)}. The slowest and smallest would set the pace and the sizes. Choose"
            " those of one kind with CUDA_VISIBLE_DEVICES"
        )
    for gpu in usable:
        if gpu.memory_gb < _SMALL_GB:
            yield (
                f"GPU {gpu.index} ({gpu.name}) has {gpu.memory_gb:.0f} GB: too little to train beside an engine."
                " Choose a larger one with CUDA_VISIBLE_DEVICES; --device cpu computes on the processor"
            )
        for tenant in devices.tenants:
            if tenant.uuid == gpu.uuid:
                yield (
                    f"process {tenant.pid} ({tenant.who}) holds {tenant.memory_gb:.1f} GB of GPU {gpu.index}. End it,"
                    " wait for it, or leave the GPU out with CUDA_VISIBLE_DEVICES"
                )


def device_notes(config: RunConfig) -> list[str]:
    """What is to be said of this machine's GPUs: of a run that is to use them, and of one that cannot see them."""
    cluster = config.cluster
    if cluster.ray_address is not None or cluster.actor_num_nodes > 1:
        return []
    if not config.on_gpu:
        return [*_hidden()]
    devices = find_devices()
    return [*problems(devices, find_packages()), *doubts(devices)]


def _hidden() -> Iterator[str]:
    """Why a run is on the CPU, if the machine has GPUs."""
    # Asked only then: on a machine without GPUs the driver's tool may wait for a minute.
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return
    devices = find_devices()
    if devices.gpus and not devices.usable():
        yield (
            f"the run computes on the CPU: CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs of this machine,"
            f" {_listed(devices.gpus)}. To use them, unset it, and drop --device cpu if it is set"
        )


def _visibility_problems(devices: Devices) -> Iterator[str]:
    if devices.visible is None:
        return
    names = _names(devices.visible)
    if not names or names[0] == "-1":
        yield f"CUDA_VISIBLE_DEVICES={devices.visible!r} hides all GPUs. Unset it: {_listed(devices.gpus)}"
        return
    for name in names:
        if _gpu_named(name, devices.gpus) is None:
            there = _listed(devices.gpus)
            yield f"CUDA_VISIBLE_DEVICES={devices.visible}: there is no GPU {name}. This machine has {there}"
    if len(set(names)) < len(names):
        yield f"CUDA_VISIBLE_DEVICES={devices.visible} names a GPU twice"


def _names(visible: str) -> list[str]:
    return [name.strip() for name in visible.split(",") if name.strip()]


def _gpu_named(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """A device by its number, or by the beginning of its UUID."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)):
            return gpu
    return None


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} ({gpu.name}, {gpu.memory_gb:.0f} GB)" for gpu in gpus)


def _ask(query: str) -> list[list[str]]:
    """The rows that nvidia-smi prints; none without a driver."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _gigabytes(mebibytes: str) -> float:
    """`[N/A]`, which some devices answer, is 0."""
    return int(mebibytes) * 2**20 / 1e9 if mebibytes.isdigit() else 0.0


def _who(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.name()} of user {process.username()}"
    except psutil.Error:  # in another container
        return "not visible from here"


def _requirements(package: str) -> list[str]:
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _import_problem(module: str) -> str:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return ""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
