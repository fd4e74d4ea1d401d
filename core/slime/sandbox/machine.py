"""What this machine permits."""

from __future__ import annotations

import contextlib
import marshal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from slime.sandbox.inside.landlock import landlock_version
from slime.sandbox.inside.main import ANSWER
from slime.sandbox.limits import Isolation, Limits
from slime.sandbox.place import own_place

_TRY_S = 30.0
# Only the modules it needs: the packages' own __init__ would load far more than the program itself.
_LAUNCH = """
import sys
for name, place in (("slime", sys.argv[1]), ("slime.sandbox", sys.argv[1] + "/sandbox")):
    package = sys.modules[name] = type(sys)(name)
    package.__path__ = [place]
from slime.sandbox.inside.main import main
main()
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The best isolation to be had here."""

    isolation: Isolation
    #: why it is not better; empty where it is the best
    reason: str


@cache
def machine_isolation() -> Machine:
    """Find out, by trying, once in a process; takes some hundredths of a second."""
    reasons: list[str] = []
    for isolation in Isolation:
        problem = _try(isolation)
        if isolation is Isolation.FILTER and problem is None and not landlock_version():
            reasons.append("filter: without Landlock, so that programs write wherever this user may")
        if problem is None or isolation is Isolation.LIMITS:
            return Machine(isolation, "; ".join(reasons))
        reasons.append(f"{isolation.value}: {problem}")
    raise AssertionError("the last isolation is always taken")


def launcher_argv() -> list[str]:
    """The command that starts the process between slime and a program."""
    return [sys.executable, "-I", "-S", "-B", "-c", _LAUNCH, str(Path(__file__).parents[1])]


@contextlib.contextmanager
def killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Kill the process if this lasts longer; what is given tells whether it did."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _try(isolation: Isolation) -> str | None:
    """What is in the way of `isolation`; None: nothing."""
    with own_place() as place:
        request = {
            "argv": ["/bin/true"],
            "stdin": b"",
            "files": {},
            "limits": asdict(Limits()),
            "readable": [],
            "place": place,
            "level": isolation.value,
        }
        content = marshal.dumps(request)
        with (
            subprocess.Popen(
                launcher_argv(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={},
                start_new_session=True,
            ) as process,
            killed_after(process, _TRY_S) as late,
        ):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(len(content).to_bytes(8, "little") + content)
            process.stdin.flush()
            told = process.stdout.read()
    if late.is_set():
        return f"no answer within {_TRY_S:g} s"
    _, mark, packed = told.partition(b"\n" + ANSWER)
    if not mark:
        return told.decode(errors="replace").strip()[-300:] or "no answer"
    answer = marshal.loads(packed)
    if answer.get("kind") == "ok":
        return None
    return str(answer.get("refused") or answer)
