"""What the weaker isolation levels still provide."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.errors import ConfigError, SandboxError
from slime_sandbox import (
    Isolation,
    Limits,
    Machine,
    Outcome,
    machine_isolation,
    require_isolation,
    run_program_sync,
)

ROOT = Path(__file__).parents[3]
#: where a bare Python finds the sandbox, and the errors that it raises
SOURCES = [str(ROOT / "core"), str(ROOT / "plugins" / "sandbox")]
#: a Python that every user may run; the one that runs the tests may be in a home folder
PYTHON = Path("/usr/bin/python3")
needs_python = pytest.mark.skipif(not PYTHON.exists(), reason="there is no /usr/bin/python3")
LIMITS = Limits(wall_s=20.0, processes=8)


def python(code: str, isolation: Isolation, limits: Limits = LIMITS) -> Outcome:
    return run_program_sync(
        [str(PYTHON), "-I", "m.py"], files={"m.py": code.encode()}, limits=limits, isolation=isolation
    )


@pytest.mark.slow
@needs_python
@pytest.mark.parametrize("isolation", [Isolation.FILTER, Isolation.LIMITS])
def test_limits_hold_without_namespaces(isolation: Isolation) -> None:
    assert python("print(open('m.py').read()[:5])", isolation).stdout == b"print\n"
    assert python("while True: pass", isolation, Limits(wall_s=1.0)).kind == "timeout"
    assert b"MemoryError" in python("bytearray(10**10)", isolation).stderr
    assert python("print('x' * 10**7)", isolation).kind == "output"
    bomb = "import os, time\nwhile True:\n  if os.fork() == 0: time.sleep(60)"
    assert b"BlockingIOError" in python(bomb, isolation).stderr


@needs_python
@pytest.mark.parametrize("isolation", [Isolation.FILTER, Isolation.LIMITS])
def test_a_daemon_is_killed_without_namespaces(isolation: Isolation) -> None:
    mark = f"{os.getpid()}-{isolation.value}"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv({str(PYTHON)!r}, ['{mark}', '-c', 'import time; time.sleep(60)'])
    os._exit(0)
os.wait()
time.sleep(0.3)
"""
    assert python(code, isolation).kind == "ok"
    assert not [command for command in command_lines() if mark.encode() in command.split(b"\0")[0]]


def command_lines() -> Iterator[bytes]:
    """The command lines of all processes of the machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended in the meantime
            yield path.read_bytes()


@needs_python
def test_the_filter_blocks_signals_to_other_processes() -> None:
    assert b"not permitted" in python(f"import os; os.kill({os.getpid()}, 0)", Isolation.FILTER).stderr


@pytest.mark.slow
@needs_python
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without rights")
def test_programs_started_by_root_have_no_privileges() -> None:
    code = "import os; print(os.getuid() > 60000, os.getgroups(), os.access('/etc/shadow', os.R_OK))"
    for isolation in Isolation:
        assert python(code, isolation).stdout == b"True [] False\n"


def as_nobody(program: str) -> str:
    """The output of `program`, run as an unprivileged user."""
    made = subprocess.run(
        [str(PYTHON), "-B", "-c", textwrap.dedent(program)],
        user=65534, group=65534, extra_groups=[], env={}, cwd="/", capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    if b"Permission" in made.stderr or b"ModuleNotFound" in made.stderr:
        pytest.skip("the sources are not readable for everybody")
    return made.stdout.decode()


def test_less_isolation_than_required_is_refused() -> None:
    with pytest.raises(SandboxError, match=r"isolation 'namespaces' is required .* but only 'filter' is available"):
        run_program_sync(["/bin/true"], isolation=Isolation.FILTER, require=Isolation.NAMESPACES)


@pytest.mark.slow
@needs_python
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_an_ordinary_user_gets_namespaces_if_permitted() -> None:
    program = f"""
        import sys
        sys.path[:0] = {SOURCES}
        from slime_sandbox import machine_isolation, run_program_sync
        print(machine_isolation().isolation.value)
        code = b"import os; print(os.getuid(), os.path.exists('/home'), sorted(os.listdir('.')))"
        print(run_program_sync([sys.executable, "m.py"], files={{"m.py": code}}).stdout.decode())
    """
    isolation, _, rest = as_nobody(program).partition("\n")
    if isolation == "namespaces":
        assert rest.strip() == "65534 False ['m.py']"
    else:
        assert isolation == "filter"


def test_a_python_that_no_unprivileged_user_may_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_sandbox.machine._try", lambda _: "Python is in a closed folder")
    machine_isolation.cache_clear()
    with pytest.raises(SandboxError, match=r"no untrusted program .* limits: Python is in a closed folder"):
        machine_isolation()
    with pytest.raises(ConfigError, match="no untrusted program can be run on this machine"):
        require_isolation(Isolation.LIMITS)


def test_isolation_is_tried_with_python_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("slime_sandbox.machine.python_argv", lambda *_: [str(tmp_path / "python")])
    with pytest.raises(SandboxError, match=f"namespaces: {tmp_path}/python cannot be started"):
        machine_isolation.__wrapped__()


def test_machine_isolation_gives_a_reason_if_namespaces_are_missing() -> None:
    machine = machine_isolation()
    assert (machine.reason == "") == (machine.isolation is Isolation.NAMESPACES)


def test_without_landlock_the_reason_lists_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {Isolation.NAMESPACES: "not permitted"}
    monkeypatch.setattr("slime_sandbox.machine._try", problems.get)
    for version, reason in (
        (0, "namespaces: not permitted; filter: without Landlock, so that programs write wherever this user may"),
        (1, "namespaces: not permitted"),
    ):
        monkeypatch.setattr("slime_sandbox.machine.landlock_version", lambda version=version: version)
        assert machine_isolation.__wrapped__() == Machine(Isolation.FILTER, reason)


def test_the_sandbox_imports_only_the_standard_library() -> None:
    code = f"import sys; sys.path[:0] = {SOURCES}; import slime_sandbox; print('pydantic' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240, check=True)
    assert made.stdout == b"False\n"


#: root in a user namespace, as in a rootless container, with concurrent programs
IN_A_CONTAINER = """
import asyncio, ctypes, os, sys
ready, mapped = os.pipe(), os.pipe()
child = os.fork()
if child:
    os.read(ready[0], 1)
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write("0 100000 65536")
    os.write(mapped[1], b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
made = ctypes.CDLL(None).unshare(0x10000000)
os.write(ready[1], b"x")
os.read(mapped[0], 1)
if made == -1:
    sys.exit("Permission denied: no user namespaces")
os.setresgid(0, 0, 0)
os.setresuid(0, 0, 0)
sys.path[:0] = sys.argv[1].split(":")
from slime_sandbox import Limits, run_program
CODE = b'''
import os, time
for _ in range(5):
    if os.fork() == 0: time.sleep(60)
time.sleep(1)
print(os.getuid())
'''
async def several():
    argv, limits = [sys.argv[2], "-I", "m.py"], Limits(wall_s=30.0, processes=8)
    return await asyncio.gather(*(run_program(argv, files={"m.py": CODE}, limits=limits) for _ in range(3)))
outcomes = asyncio.run(several())
print([one.kind for one in outcomes], len({one.stdout for one in outcomes}))
"""


@pytest.mark.slow
@needs_python
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a container's users")
def test_concurrent_programs_have_separate_process_limits() -> None:
    made = subprocess.run(
        [str(PYTHON), "-B", "-c", IN_A_CONTAINER, ":".join(SOURCES), str(PYTHON)],
        env={}, cwd="/", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "Permission" in made.stderr or "ModuleNotFoundError" in made.stderr:
        pytest.skip("no user namespaces here, or the sources are not readable for everybody")
    assert made.stdout == "['ok', 'ok', 'ok'] 3\n", made.stderr
