"""How many NVIDIA devices this process may use, without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def nvidia_devices(dev: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> int:
    """Device files of GPUs that the driver has made, limited by CUDA_VISIBLE_DEVICES as CUDA itself is; 0 where
    there is no driver."""
    try:
        present = sum(1 for entry in dev.iterdir() if re.fullmatch(r"nvidia\d+", entry.name))
    except OSError:
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
