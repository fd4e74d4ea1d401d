"""Programs that run as slime's own user without namespaces: what the filter and Landlock prevent."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_sandbox.inside.landlock import landlock_version

ROOT = Path(__file__).parents[3]
#: where a bare Python finds the sandbox, and the errors that it raises
SOURCES = [str(ROOT / "core"), str(ROOT / "plugins" / "sandbox")]
#: a Python that every user may run; the one that runs the tests may be in a home folder
PYTHON = Path("/usr/bin/python3")
_NOBODY = 65534
_BEFORE = f"""
import os, subprocess, sys, time
sys.path[:0] = {SOURCES}
from slime_sandbox import Isolation, Limits, machine_isolation, run_program_sync

def run(code, **limits):
    return run_program_sync(
        [{str(PYTHON)!r}, "-I", "m.py"], files={{"m.py": code.encode()}}, isolation=Isolation.FILTER,
        limits=Limits(**{{"wall_s": 20.0, **limits}}),
    )
"""
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no /usr/bin/python3"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user"),
]
landlocked = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an unprivileged user can access, unlike pytest's own folders."""
    path = Path(tempfile.mkdtemp())
    os.chown(path, _NOBODY, _NOBODY)
    yield path
    shutil.rmtree(path)


def as_nobody(program: str, folder: Path) -> str:
    """The output of `program`, run as an unprivileged user with only the filter."""
    made = subprocess.run(
        [str(PYTHON), "-B", "-c", _BEFORE + textwrap.dedent(program)],
        user=_NOBODY, group=_NOBODY, extra_groups=[], env={}, cwd=folder, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    if "ModuleNotFound" in made.stderr:
        pytest.skip("the sources are not readable for everybody")
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_no_signal_reaches_processes_of_the_same_user(folder: Path) -> None:
    program = r"""
        victim = subprocess.Popen(["/bin/sleep", "60"])
        print(run(f'''
        import ctypes, fcntl, os, struct
        tgkill = 234 if os.uname().machine == "x86_64" else 131
        for target in ({victim.pid}, os.getppid()):
            print(ctypes.CDLL(None).syscall(tgkill, target, target, 9), flush=True)
        end, _ = os.pipe()  # the process that gets a signal when it can be read
        for command, argument in ((fcntl.F_SETOWN, {victim.pid}), (15, struct.pack("ii", 1, {victim.pid}))):
            try:
                print(fcntl.fcntl(end, command, argument), flush=True)
            except PermissionError:
                print(-1, flush=True)
        ''').stdout.split())
        time.sleep(0.2)
        print(victim.poll())
        victim.kill()
    """
    assert as_nobody(program, folder) == f"{[b'-1'] * 4}\nNone\n"


def test_a_program_may_signal_itself(folder: Path) -> None:
    assert as_nobody('print(run("import os; os.abort()").returncode)', folder) == "-6\n"


@landlocked
def test_memory_and_environment_of_slime_itself_cannot_be_opened(folder: Path) -> None:
    program = r"""
        for name in ("mem", "environ"):
            print(run(f"open('/proc/{os.getpid()}/{name}', 'rb')").stderr.split()[-1].decode())
        print(run("import os; open(f'/proc/{os.getppid()}/mem', 'r+b')").stderr.split(b":")[-3:-1])
    """
    said = as_nobody(program, folder).splitlines()
    assert [line.rpartition("/")[2] for line in said[:2]] == ["mem'", "environ'"]
    assert "Permission denied" in said[2]


@landlocked
def test_nothing_is_written_outside_the_working_folder(folder: Path) -> None:
    program = r"""
        open("mine", "w").write("as it was")
        os.mkdir("folder")
        outcome = run(f'''
        import os
        there = {os.getcwd()!r} + "/"
        for number, deed in enumerate((
            lambda: open(there + "mine", "w"), lambda: os.unlink(there + "mine"), lambda: os.rmdir(there + "folder"),
            lambda: os.rename(there + "mine", "stolen"), lambda: os.truncate(there + "mine", 0),
            lambda: os.symlink("m.py", there + "link"), lambda: open("/tmp/left-behind", "w"),
            lambda: open("/dev/shm/left-behind", "w"),
        )):
            try:
                deed()
                print(number)
            except OSError:
                pass
        os.makedirs("a/b"); open("a/b/c", "w").write("x"); os.rename("a/b/c", "c"); open("/dev/null", "w").write("x")
        print(open("c").read())
        ''')
        print(outcome.stdout.decode(), outcome.stderr.decode()[-300:], open("mine").read(), sorted(os.listdir(".")))
    """
    assert as_nobody(program, folder) == "x\n  as it was ['folder', 'mine']\n"


@landlocked
def test_the_users_files_and_processes_keep_rights_times_and_priorities(folder: Path) -> None:
    program = r"""
        open("mine", "w").write("as it was")
        os.utime("mine", (1, 1))
        victim = subprocess.Popen(["/bin/sleep", "60"])
        before = os.stat("mine").st_mode
        outcome = run(f'''
        import os
        mine, victim = {os.path.abspath("mine")!r}, {victim.pid}
        opened = os.open(mine, os.O_RDONLY)
        for number, deed in enumerate((
            lambda: os.chmod(mine, 0), lambda: os.chmod(opened, 0), lambda: os.chown(mine, -1, -1),
            lambda: os.utime(mine), lambda: os.utime(opened), lambda: os.setxattr(mine, "user.a", b"1"),
            lambda: os.setpriority(os.PRIO_PROCESS, victim, 19), lambda: os.setpriority(os.PRIO_USER, 0, 19),
            lambda: os.sched_setaffinity(victim, {{0}}),
            lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)),
        )):
            try:
                deed()
                print(number)
            except PermissionError:
                pass
        os.sched_setaffinity(0, {{0}})
        print("its own")
        ''')
        found = os.stat("mine")
        print(outcome.stdout.decode(), outcome.stderr.decode()[-300:], found.st_mode == before, found.st_mtime,
              os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0),
              os.sched_getscheduler(victim.pid))
        victim.kill()
    """
    assert as_nobody(program, folder) == "its own\n  True 1.0 True 0\n"


def test_very_deep_folders_are_removed(folder: Path) -> None:
    program = r"""
        import tempfile
        tempfile.tempdir = os.getcwd()
        code = "import os\nfor n in range(1500): os.mkdir('d'); os.chdir('d')\nopen('f', 'w'); os.mkdir('closed', 0)"
        print(run(code).kind, os.listdir("."))
    """
    assert as_nobody(program, folder) == "ok []\n"
