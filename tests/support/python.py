"""Programs in a new Python process, as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_python(words: Sequence[str], folder: Path, *, timeout_s: float = 400.0, **environment: str) -> str:
    """Run `python WORDS` in `folder` and return its standard output; it must exit with 0.

    Args:
        words: The command line after `python`.
        folder: The working directory.
        timeout_s: Seconds it may take.
        environment: Variables beside this process's own.
    """
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
