"""Builds the stand-in for an NVIDIA device, and runs programs on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
#: PyTorch, cuDNN and Triton look for the driver under this name
_DRIVER = "libcuda.so.1"
#: for a module and all its parts
_TIMEOUT_S = 3000


def build(folder: Path) -> Path:
    """Compile the stand-in with the headers of the packages for GPUs; returns the library."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) / "cu13" / "include" for place in (spec.submodule_search_locations or ())] if spec else []
    library = folder / _DRIVER
    words = ["gcc", "-shared", "-fPIC", "-O1", "-w", *(f"-I{place}" for place in places)]
    words += [*map(str, sorted(_HERE.glob("*.c"))), "-o", str(library), f"-Wl,-soname,{_DRIVER}"]
    subprocess.run(words, check=True)
    (folder / "libcuda.so").symlink_to(library)  # the name by which Triton links it
    return library


def run_module(library: Path, module: str, arguments: Sequence[str], *, capability: int = 90, mib: int = 81920) -> str:
    """What a module of this repository prints when it runs on the stand-in.

    Args:
        library: See `build`.
        module: Its name.
        arguments: Of its command line.
        capability: Of the device: 90 for an H100, 100 for a B200.
        mib: Of its memory.
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        # Kernels are compiled for the stand-in, and must not be found by runs on a real device.
        "TRITON_CACHE_DIR": str(library.parent / f"triton-{capability}"),
        "TORCHINDUCTOR_CACHE_DIR": str(library.parent / f"inductor-{capability}"),
        "NO_GPU_CAPABILITY": str(capability),
        "NO_GPU_MIB": str(mib),
        "CUTE_DSL_ARCH": f"sm_{capability}a",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(library.parent / f"attention-{capability}"),
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError("\n".join([f"{module} {' '.join(arguments)} failed:", *done.stderr.splitlines()[-12:]]))
    return done.stdout
