"""A temporary folder for one program, and its removal, even of deeply nested or write-protected folders."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """A new folder that only this user can read, removed afterwards as far as permitted."""
    folder = tempfile.mkdtemp(prefix="slime-box-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # with namespaces the program's files never were here
        return
    # Not shutil.rmtree: a program may nest folders deeper than recursion goes. Neither tool follows links inside.
    if os.geteuid() != 0:  # root may remove folders whatever their mode
        subprocess.run(["chmod", "-R", "u+rwx", "--", folder], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)
