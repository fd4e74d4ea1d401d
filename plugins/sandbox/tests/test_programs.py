"""Good and hostile programs, with the isolation of this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.errors import SandboxError
from slime_sandbox import Isolation, Limits, Outcome, machine_isolation, python_argv, run_program, run_program_sync

pytestmark = pytest.mark.slow

QUICK = Limits(wall_s=20.0, cpu_s=20.0, memory_mb=256, file_mb=4, processes=8, output_kb=16)


def python(code: str, *, stdin: bytes = b"", limits: Limits = QUICK) -> Outcome:
    return run_program_sync(python_argv("main.py"), files={"main.py": code.encode()}, stdin=stdin, limits=limits)


def test_a_program_gets_files_and_input_and_returns_output() -> None:
    code = "import sys; print(open('a/b.txt').read(), input()); print('bad', file=sys.stderr); sys.exit(3)"
    outcome = run_program_sync(
        python_argv("main.py"), files={"main.py": code.encode(), "a/b.txt": "tö".encode()}, stdin=b"x\n", limits=QUICK
    )
    assert (outcome.kind, outcome.returncode) == ("error", 3)
    assert outcome.stdout.decode() == "tö x\n" and outcome.stderr == b"bad\n"
    assert outcome.isolation is machine_isolation().isolation


def test_missing_input_is_empty() -> None:
    assert python("import sys; print(repr(sys.stdin.read()))").stdout == b"''\n"


def test_libraries_of_this_python_can_be_imported_and_slime_cannot() -> None:
    assert python("import numpy; print(numpy.arange(3).sum())").stdout == b"3\n"
    if machine_isolation().isolation is Isolation.NAMESPACES:
        assert b"ModuleNotFoundError" in python("import slime").stderr


def test_a_signal_is_reported_by_its_number() -> None:
    assert python("import os; os.abort()").returncode == -6


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "import sys; sys.stdin.read(); input"]
)
def test_loops_and_waits_end_at_the_time_limit(code: str) -> None:
    outcome = python(code + "\nimport time; time.sleep(60)", limits=Limits(wall_s=1.0, cpu_s=20.0))
    assert (outcome.kind, outcome.returncode) == ("timeout", None)
    assert outcome.seconds < 30


def test_processor_time_is_counted_over_all_processes() -> None:
    code = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    assert python(code, limits=Limits(wall_s=60.0, cpu_s=1.0, processes=16)).kind == "cpu"


@pytest.mark.parametrize("ignored", [False, True])
def test_processor_time_of_children_that_have_ended_is_counted(ignored: bool) -> None:
    code = f"""
import os, signal, time
if {ignored}: signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # then their usage is not reported
for _ in range(12):
    if os.fork() == 0:
        while time.process_time() < 0.3: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""
    assert python(code, limits=Limits(wall_s=60.0, cpu_s=1.0)).kind == "cpu"


def test_more_memory_than_allowed_is_refused_to_one_process() -> None:
    outcome = python("bytearray(10**10)")
    assert outcome.kind == "error" and b"MemoryError" in outcome.stderr


def test_several_processes_have_no_more_memory_than_one() -> None:
    code = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        held = bytearray(100 << 20)
        for i in range(0, len(held), 4096): held[i] = 1
        time.sleep(60)
time.sleep(60)
"""
    assert python(code).kind == "memory"


def test_a_fork_bomb_stops_at_the_number_of_processes() -> None:
    code = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0: time.sleep(60)
        made += 1
except BlockingIOError:
    print(made)
"""
    outcome = python(code)
    assert outcome.kind == "ok" and int(outcome.stdout) == QUICK.processes - 1
    assert outcome.seconds < 15  # the leftover process did not delay it


def test_a_file_ends_at_its_limit() -> None:
    code = "f = open('big', 'wb')\nfor _ in range(64): f.write(b'x' * (1 << 20)); f.flush()"
    outcome = python(code)
    assert outcome.kind == "error" and (outcome.returncode == -25 or b"OSError" in outcome.stderr)


def test_output_ends_at_its_limit() -> None:
    outcome = python("print('x' * 10_000_000)")
    assert outcome.kind == "output" and outcome.stdout == b"x" * 16 * 1024


def test_excess_output_counts_even_if_the_program_ended() -> None:
    outcome = python("import os; os.write(1, b'x' * 20_000)")
    assert outcome.kind == "output" and len(outcome.stdout) == 16 * 1024


def test_closing_the_output_has_no_effect() -> None:
    assert python("import os; os.close(1); os.close(2)").kind == "ok"


def test_binary_output_is_returned_unchanged() -> None:
    assert python(r"import os; os.write(1, b'\xff\x00')").stdout == b"\xff\x00"


def test_the_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    outcome = python("import os; print(os.environ)")
    assert outcome.kind == "ok" and b"hunter2" not in outcome.stdout


@pytest.fixture
def secret() -> Iterator[Path]:
    path = Path(__file__).parent / ".secret"
    path.write_text("hunter2")
    yield path
    path.unlink()


namespaces = pytest.mark.skipif(
    machine_isolation().isolation is not Isolation.NAMESPACES, reason="this machine permits no namespaces"
)
filtered = pytest.mark.skipif(
    machine_isolation().isolation is Isolation.LIMITS, reason="this machine permits no system-call filter"
)


@namespaces
def test_the_machines_files_are_hidden(secret: Path) -> None:
    outcome = python(f"import os; print(os.path.exists({str(secret)!r}), os.path.exists('/home'), os.listdir('.'))")
    assert outcome.stdout == b"False False ['main.py']\n"


@namespaces
def test_only_the_working_folder_is_writable() -> None:
    code = """
import os, sys
for place in ('/', '/usr', '/etc', '/dev', '/proc', sys.prefix, sys.base_prefix):
    try:
        open(os.path.join(place, 'mine'), 'w')
        print('written', place)
    except OSError:
        pass
open('mine', 'w')
"""
    outcome = python(code)
    assert (outcome.kind, outcome.stdout) == ("ok", b"")


@namespaces
def test_all_files_together_end_at_the_limit() -> None:
    code = "for n in range(8): open(str(n), 'wb').write(b'x' * (1 << 20))"
    assert b"No space left" in python(code).stderr


@namespaces
def test_a_program_cannot_lower_its_chance_of_being_killed_when_memory_runs_out() -> None:
    code = "print(open('/proc/self/oom_score_adj').read()); open('/proc/self/oom_score_adj', 'w')"
    outcome = python(code)
    assert outcome.stdout.split() == [b"1000"] and b"Read-only file system" in outcome.stderr


@namespaces
def test_other_processes_are_hidden() -> None:
    outcome = python("import os; print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))")
    assert outcome.stdout == b"[1, 2]\n"


@namespaces
def test_leftover_processes_are_killed() -> None:
    code = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(60)"
    outcome = python(code)
    assert outcome.kind == "ok" and outcome.seconds < 15


@filtered
@pytest.mark.parametrize(
    "call",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
        "import ctypes, os; os.memfd_create('x')",
        "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
    ],
)
def test_network_and_dangerous_system_calls_are_refused(call: str) -> None:
    outcome = python(call)
    assert outcome.kind == "error" and b"not permitted" in outcome.stderr


@filtered
def test_a_program_cannot_create_namespaces() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), os.strerror(ctypes.get_errno()))
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), os.strerror(ctypes.get_errno()))
"""
    assert python(code).stdout == b"-1 Operation not permitted\n" * 2


def test_a_program_cannot_raise_its_limits() -> None:
    code = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1 << 40, 1 << 40))"
    assert b"ValueError" in python(code).stderr


def test_concurrent_programs_are_isolated() -> None:
    async def several() -> list[Outcome]:
        code = b"import sys, time; open('f', 'w').write(sys.argv[1]); time.sleep(0.2); print(open('f').read())"
        runs = (run_program(python_argv("m.py", str(n)), files={"m.py": code}, limits=QUICK) for n in range(6))
        return list(await asyncio.gather(*runs))

    assert [outcome.stdout for outcome in asyncio.run(several())] == [f"{n}\n".encode() for n in range(6)]


def test_a_cancelled_call_ends_its_program(tmp_path: Path) -> None:
    async def cancel() -> float:
        code = b"import time; time.sleep(60)"
        task = asyncio.create_task(
            run_program(python_argv("m.py"), files={"m.py": code}, limits=Limits(wall_s=60.0), readable=[tmp_path])
        )
        await asyncio.sleep(0.5)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    machine_isolation()
    assert asyncio.run(cancel()) < 40  # it would sleep for 60 s


def test_a_missing_program_raises_an_error() -> None:
    with pytest.raises(SandboxError, match=r"/nowhere/python cannot be started.*absolute path"):
        run_program_sync(["/nowhere/python"])


def test_files_outside_the_working_folder_are_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        run_program_sync(["/bin/true"], files={"../x": b""})
