"""`slime doctor`: what is installed, what the machine has, and what keeps a run off its GPUs."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from slime.cli.output import write
from slime.cli.text_layout import hanging
from slime.engine.ports import LOOPBACK, free_port
from slime.errors import ConfigError
from slime.registry.plugin_set import survey_plugins
from slime_planner.devices import Devices, Packages, doubts, find_devices, find_packages, problems

_USAGE = """\
usage: slime doctor

Print the versions of the engines, this machine's memory and GPUs, and what
keeps a run off them, with the remedy. The exit code is 1 if a package that
slime needs is missing or has another version, if a plugin does not work, if no
port is free, or if there are GPUs that runs cannot use.
"""
_PROJECT = "slime-rl"
_SHOWN = ("megatron-core", "sglang", "sglang-router", "ray", "transformers")


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if set(argv) & {"-h", "--help"}:
        write(_USAGE)
        return 0
    if argv:
        raise ConfigError(f"slime doctor takes no arguments, got {argv[0]!r}")
    devices, packages, plugins = find_devices(), find_packages(), survey_plugins()
    wrong, notes = (
        [*package_problems(), *map(str, plugins.failures), *port_problems()],
        ["there is no NVIDIA driver: runs use the CPU"],
    )
    if devices.driver:
        wrong += problems(devices, packages)
        notes = [*doubts(devices)]
    labelled = [
        *_inventory(devices, packages),
        ("plugins", f"{len(plugins.plugins)} work, {len(plugins.failures)} do not"),
        *(("problem", text) for text in wrong),
        *(("note", text) for text in notes),
    ]
    for label, text in labelled:
        write("\n".join(hanging(f"{label:<15}", text)))
    return 1 if wrong else 0


def package_problems() -> Iterator[str]:
    """Packages that slime's metadata require, and that are missing or have another version."""
    for text in importlib.metadata.requires(_PROJECT) or []:
        wanted = Requirement(text)
        # SGLang is in an extra only because its own requirements are large.
        if wanted.marker is not None and not (wanted.name == "sglang" or wanted.marker.evaluate({"extra": ""})):
            continue
        found = _version(wanted.name)
        if not found:
            yield f"{wanted.name} is not installed: make install"
        elif not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted.name} {found} is installed, and slime needs {wanted.name}{wanted.specifier}: make install"


def port_problems() -> Iterator[str]:
    """Why nothing can listen on this machine's own address, as engines, router and Ray do."""
    try:
        free_port()
    except OSError as error:
        yield f"no port of {LOOPBACK} can be listened on ({error}): bring the interface `lo` up, or free some ports"


def _version(package: str) -> str:
    """Empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _inventory(devices: Devices, packages: Packages) -> Iterator[tuple[str, str]]:
    yield "slime", f"{_version(_PROJECT)}, Python {platform.python_version()} in {sys.prefix}"
    for name in _SHOWN:
        yield name, _version(name) or "not installed"
    yield "torch", f"{packages.torch}, built for {f'CUDA {packages.cuda}' if packages.cuda else 'the CPU'}"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / 1e9:.0f} of {memory.total / 1e9:.0f} GB free, {psutil.cpu_count()} cores"
    yield "shared memory", f"{shutil.disk_usage('/dev/shm').free / 1e9:.0f} GB free in /dev/shm"
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free in {Path.cwd()}"
    yield "driver", devices.driver or "none"
    for gpu in devices.gpus:
        yield f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory_gb:.0f} GB"
