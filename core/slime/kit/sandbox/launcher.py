"""The process between slime and a program, which confines the program, watches it and reports what it did.

It is `slime.kit.sandbox.inside.main`, connected by one socket: the request goes in, the answer comes out, and when this
end closes, the program is ended.
"""

from __future__ import annotations

import contextlib
import marshal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from slime.kit.sandbox.inside.main import ANSWER

#: seconds that ending a program may take, on a busy machine
_END_S = 30.0
_READ = 1 << 16
# Only the modules it needs: the packages' own __init__ would load far more than the program itself.
_LAUNCH = """
import sys
for name, folder in (("slime", sys.argv[1]), ("slime.kit.sandbox", sys.argv[1] + "/sandbox")):
    package = sys.modules[name] = type(sys)(name)
    package.__path__ = [folder]
from slime.kit.sandbox.inside.main import main
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

    def run(self, request: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any] | None, str]:
        """Run the program and wait until all of its processes have ended.

        Args:
            request: What `slime.kit.sandbox.inside.main` reads.
            timeout_s: Seconds until there must be an answer.

        Returns:
            The answer, or None and the output of the process that ended without one.

        Raises:
            TimeoutError: If there is no answer in time.
        """
        argv = [sys.executable, "-I", "-S", "-B", "-c", _LAUNCH, str(Path(__file__).parents[1])]
        theirs = self._theirs.fileno()
        process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env={}, start_new_session=True
        )
        self._theirs.close()
        try:
            before, mark, answer = self._exchange(marshal.dumps(request), timeout_s).partition(b"\n" + ANSWER)
        finally:
            self._ours.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return marshal.loads(answer) if mark else None, before.decode(errors="replace").strip()

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
