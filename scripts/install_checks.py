"""What a machine needs for `make install`, checked before anything is downloaded.

    python -m scripts.install_checks cpu|cuda

The exit status is 1 if something is missing; each such thing has a line. Any Python from 3.7 on can run it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

#: free space in GB that pip needs to unpack the packages
DISK_GB = {"cpu": 6, "cuda": 20}
#: the oldest C library for which there are wheels: of PyTorch's CPU build; of SGLang's kernels
GLIBC = {"cpu": (2, 28), "cuda": (2, 34)}
#: the oldest driver for CUDA 13, for which PyTorch's wheels are built
DRIVER = 580


def problems(
    device: str, *, python: tuple[int, int], system: str, machine: str, glibc: str, free_gb: float, driver: str
) -> list[str]:
    """What keeps the packages from being installed or used, one sentence each.

    Args:
        device: `cpu` or `cuda`.
        python: The version of Python that will run slime.
        system: Such as Linux.
        machine: Such as x86_64.
        glibc: The version of the C library; empty if it is another library.
        free_gb: Free space in the folder of the packages.
        driver: The version of NVIDIA's driver; empty without one, which is no problem: GPUs can come later.
    """
    found = []
    if not (3, 11) <= python <= (3, 12):
        found.append(
            f"Python {python[0]}.{python[1]}: slime needs 3.11 or 3.12. Choose one: make install PYTHON=python3.11"
        )
    if system != "Linux":
        found.append(f"{system}: slime needs Linux. On Windows, use WSL 2.")
    if device == "cuda" and machine != "x86_64":
        found.append(f"processor {machine}: the packages in requirements/gpu.txt are for x86_64.")
    needed = f"{GLIBC[device][0]}.{GLIBC[device][1]}"
    if system == "Linux" and not glibc:
        found.append(f"no glibc: the packages need glibc {needed} or later; Alpine's musl is not supported.")
    elif glibc and _numbers(glibc) < GLIBC[device]:
        found.append(
            f"glibc {glibc}: the packages need {needed} or later. Debian 12, Ubuntu 22.04 and RHEL 9 have that."
        )
    if free_gb < DISK_GB[device]:
        found.append(f"{free_gb:.1f} GB of free space: pip needs {DISK_GB[device]} GB to unpack the packages.")
    if _numbers(driver) and _numbers(driver) < (DRIVER,):
        found.append(
            f"NVIDIA driver {driver}: PyTorch's packages are built for CUDA 13, which needs driver {DRIVER} or later."
            " Update the driver, or install for the processor alone: make install DEVICE=cpu"
        )
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def driver_version() -> str:
    """The version of NVIDIA's driver; empty without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.decode().split("\n")[0].strip()


def main(device: str) -> int:
    """Look at this machine; returns the exit status."""
    if device not in DISK_GB:
        print(f"DEVICE={device}: expected cpu or cuda", file=sys.stderr)
        return 1
    library, version = platform.libc_ver()
    driver = driver_version() if device == "cuda" else ""
    found = problems(
        device,
        python=(sys.version_info[0], sys.version_info[1]),
        system=platform.system(),
        machine=platform.machine(),
        glibc=version if library == "glibc" else "",
        free_gb=shutil.disk_usage(os.getcwd()).free / 1e9,
        driver=driver,
    )
    for problem in found:
        print(f"cannot install: {problem}", file=sys.stderr)
    if not found and device == "cuda" and not driver:
        print("nvidia-smi finds no driver here: slime will run on the processor until there is one")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
