"""The process between slime and a program, which confines the program, watches it and reports what it did.

It is `slime_sandbox.inside.main`, connected by one socket: the request goes in, the answer comes out, and when this
end closes, the program is ended.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Self

from slime.errors import SandboxError
from slime_sandbox.inside.main import ANSWER
from slime_sandbox.limits import Isolation, Limits, Outcome

#: seconds that starting a program may take in addition to its own time, and that ending it may take, on a busy machine
_SPARE_S = 30.0
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_READ = 1 << 16
# Only the modules it needs: the package's own __init__ would load far more than the program itself.
_LAUNCH = """
import sys
package = sys.modules["slime_sandbox"] = type(sys)("slime_sandbox")
package.__path__ = [sys.argv[1]]
from slime_sandbox.inside.main import main
main()
"""


class Launcher:
    """Runs one program; a context manager that releases its sockets."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._theirs.close()

    def run(
        self,
        argv: Sequence[str],
        isolation: Isolation,
        limits: Limits,
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] = NO_FILES,
        readable: Sequence[str] = (),
    ) -> Outcome:
        """Run the program and wait until all of its processes have ended; for the arguments see `run_program`.

        Raises:
            SandboxError: If it cannot be isolated or started, or there is no answer in time.
        """
        with _scratch_folder() as scratch:
            request = {
                "argv": list(argv),
                "stdin": stdin,
                "files": dict(files),
                "limits": asdict(limits),
                "readable": list(readable),
                "scratch": scratch,
                "level": isolation.value,
            }
            try:
                output, mark, packed = self._ask(marshal.dumps(request), limits.wall_s + _SPARE_S)
            except TimeoutError:
                raise SandboxError(
                    f"{argv[0]}: no answer {_SPARE_S:g} s after its time of {limits.wall_s:g} s was over"
                ) from None
        if not mark:
            written = output.decode(errors="replace").strip()[-500:] or "it wrote nothing"
            raise SandboxError(f"the process that watches {argv[0]} ended without an answer: {written}")
        answer = marshal.loads(packed)
        if "refused" in answer:
            raise SandboxError(f"{argv[0]} cannot be started with isolation {isolation.value!r}: {answer['refused']}")
        if "lost" in answer:  # process 1 was killed: by the kernel, for lack of memory
            return Outcome("memory", None, b"", b"", 0.0, 0.0, 0.0, isolation)
        return Outcome(**answer, isolation=isolation)

    def _ask(self, request: bytes, timeout_s: float) -> tuple[bytes, bytes, bytes]:
        """Output that is no answer, the mark before the answer, and the answer. Raises `TimeoutError`."""
        argv = [sys.executable, "-I", "-S", "-B", "-c", _LAUNCH, str(Path(__file__).parent)]
        theirs = self._theirs.fileno()
        process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env={}, start_new_session=True
        )
        self._theirs.close()
        try:
            return self._exchange(request, timeout_s).partition(b"\n" + ANSWER)
        finally:
            self._ours.close()
            try:
                process.wait(_SPARE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _exchange(self, request: bytes, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        received = bytearray()
        self._ours.settimeout(timeout_s)
        with contextlib.suppress(ConnectionError):  # it ended early: what it wrote says why
            self._ours.sendall(len(request).to_bytes(8, "little") + request)
            while data := self._ours.recv(_READ):
                received += data
                self._ours.settimeout(max(0.001, deadline - time.monotonic()))
        return bytes(received)

    def abandon(self) -> None:
        """End the program; safe to call from another thread than `run`."""
        with contextlib.suppress(OSError):  # it has ended
            self._ours.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
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


def python_argv(*arguments: str) -> list[str]:
    """The command that runs this process's Python with its installed libraries, but without the user's own packages."""
    return [sys.executable, "-s", "-P", "-B", *arguments]


def python_folders() -> list[str]:
    """Folders that this process's Python reads."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    folders |= {os.path.realpath(folder) for folder in folders}
    folders.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    return sorted(folder for folder in folders if folder != "/")
