"""Landlock (Linux 5.13): a process gives up writing outside one folder.

For programs that can see their user's files and processes. The kernel then also denies access to the memory and the
environment of unconfined processes (`/proc/N/mem`), which the system-call filter cannot do: it cannot read
paths.
"""

from __future__ import annotations

import ctypes
import os

from slime_sandbox.inside import kernel

# The same numbers on every architecture.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_BENEATH = 1
_WRITE_FILE = 1 << 1
#: write and truncate files, remove and make everything: bits 1 and 4 to 12; from the version on: further bits
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_LATER = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
#: no abstract sockets and no signals across the border
_SCOPES, _SCOPES_VERSION = 0b11, 6
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 if it has none."""
    return max(0, kernel.call(_CREATE, 0, 0, _VERSION))


def write_only_in(folder: str) -> None:
    """Restrict this process and its children to writing in `folder`. Does nothing if the kernel has no Landlock.

    Call after no-new-privileges has been set. Raises `OSError`.
    """
    version = landlock_version()
    if not version:
        return
    writes = _WRITES | sum(bit for since, bit in _LATER.items() if version >= since)
    fields = [writes] if version < _SCOPES_VERSION else [writes, 0, _SCOPES]
    asked = (ctypes.c_uint64 * len(fields))(*fields)
    rules = kernel.checked_call("landlock", _CREATE, ctypes.byref(asked), ctypes.sizeof(asked), 0)
    try:
        _allow(rules, folder, writes)
        for device in filter(os.path.exists, _DEVICES):
            _allow(rules, device, _WRITE_FILE)
        kernel.checked_call("landlock", _RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = ctypes.create_string_buffer(rights.to_bytes(8, "little") + parent.to_bytes(4, "little"), 12)
    try:
        kernel.checked_call(f"landlock {path}", _ADD, rules, _BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)
