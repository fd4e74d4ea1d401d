"""Fused layers of the trainer, for `--layer-backend fused`: compiled by torch, and attention of FlashAttention."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def missing(*, on_gpu: bool) -> str | None:
    """What compiling them lacks on this machine, to be read after the flag; None if nothing. Imports no torch.

    Args:
        on_gpu: Whether the run is on NVIDIA devices.
    """
    if on_gpu and importlib.util.find_spec("triton") is None:
        return "needs the package triton, which PyTorch for GPUs brings and this one does not. Install that, or drop it"
    # torch compiles C++ on a CPU, and Triton its launchers on a GPU.
    name, usual = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    compilers = [os.environ[name]] if os.environ.get(name) else list(usual)
    if not any(shutil.which(compiler.split()[0]) for compiler in compilers):
        return f"needs a compiler, and {' or '.join(compilers)} is not found. Install g++, or drop it"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"needs Python's headers, and {headers} has none. Install them (python3-dev on Debian), or drop it"
    return None
