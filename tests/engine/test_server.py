"""Real servers start, answer, and end without leaving anything behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.engines import READY_S, cpu_engine, running
from tests.support.waiting import wait_until

from slime.engine.server import EngineServer, EngineSpec
from slime.errors import EngineError
from slime.kit.processes import living_members
from slime.kit.processes.fork_server import ForkServer

pytestmark = pytest.mark.engine


def scheduler_of(server: EngineServer) -> psutil.Process:
    assert server.pid is not None
    [scheduler] = [p for p in psutil.Process(server.pid).children() if "scheduler" in p.name()]
    return scheduler


def memory_maps(group: int) -> Iterator[str]:
    """The memory maps of a process group's members."""
    for pid in living_members(group):
        with contextlib.suppress(OSError):  # a short-lived child
            yield Path(f"/proc/{pid}/maps").read_text()


def shared_memory_of(group: int) -> set[Path]:
    """The files of shared memory in which an engine reports its load."""
    return {Path(p) for maps in memory_maps(group) for p in re.findall(r"/dev/shm/sglang_loads_\S+", maps)}


def test_a_directly_launched_server_answers_and_leaves_no_process_and_no_file(tiny_model: Path, tmp_path: Path) -> None:
    server = cpu_engine(tiny_model, tmp_path)
    with running(server):
        group = server.pid
        assert group is not None
        assert server.control.server_info()["model_path"] == str(tiny_model)
        assert len(living_members(group)) >= 3  # server, scheduler, detokenizer
        shared = shared_memory_of(group)
        scratch = Path(psutil.Process(group).environ()["TMPDIR"])
        assert shared and all(p.exists() for p in shared) and scratch.is_dir()
    assert living_members(group) == []
    assert not any(p.exists() for p in shared) and not scratch.exists()
    assert server.failure() is None


def test_processes_are_forked_beside_a_variable_that_no_engine_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in `OMP_NUM_THREADS=2 slime train`. SGLang's processes had no names then, and a hung scheduler was not known.
    variables = {"OMP_NUM_THREADS": "2", **{name: value for name, value in os.environ.items() if name[:3] != "OMP"}}
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    server = ForkServer(bool, env={"OMP_NUM_THREADS": "1"}, log_path=None)
    server.start()
    try:
        environ = Path(f"/proc/{server.pid}/environ")
        wait_until(lambda: environ.read_bytes() != b"")  # empty between fork and exec
        seen = environ.read_bytes().split(b"\0")
    finally:
        server.stop()
    assert seen[0].startswith(b"PATH=") and b"OMP_NUM_THREADS=1" in seen


def test_two_servers_share_one_import(tiny_model: Path, fork_server: Path, tmp_path: Path) -> None:
    servers = [cpu_engine(tiny_model, tmp_path, fork_server=fork_server) for _ in range(2)]
    with running(*servers):
        assert {s.control.weight_version() for s in servers} == {"default"}
        groups = [s.pid for s in servers]
        parents = {psutil.Process(group).ppid() for group in groups}
        assert len(set(groups)) == 2 and len(parents) == 1
    assert [living_members(group) for group in groups if group is not None] == [[], []]


def test_a_bad_model_folder_fails_with_the_servers_last_output(fork_server: Path, tmp_path: Path) -> None:
    server = cpu_engine(tmp_path / "no-such-model", tmp_path, fork_server=fork_server)
    server.start()
    with pytest.raises(EngineError) as caught:
        server.wait_ready(READY_S)
    message = str(caught.value)
    assert "ended with exit code 1" in message and str(server.spec.log_path) in message
    assert "no-such-model" in message
    server.stop()


def test_an_unknown_server_argument_shows_sglangs_usage_error(
    tiny_model: Path, fork_server: Path, tmp_path: Path
) -> None:
    server = cpu_engine(tiny_model, tmp_path, extra_args=("--no-such-option",), fork_server=fork_server)
    server.start()
    with pytest.raises(EngineError, match=r"ended with exit code 2(.|\n)*--no-such-option"):
        server.wait_ready(READY_S)
    server.stop()


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_sigkill_of_any_part_is_noticed_with_log_lines(
    victim: str, tiny_model: Path, fork_server: Path, tmp_path: Path
) -> None:
    server = cpu_engine(tiny_model, tmp_path, fork_server=fork_server)
    with running(server):
        group = server.pid
        assert group is not None
        shared = shared_memory_of(group)
        assert shared
        # SGLang answers a moment before it logs that it is ready.
        wait_until(lambda: "fired up" in server.log_path.read_text(encoding="utf-8"))
        if victim == "server":
            os.kill(group, signal.SIGKILL)
        else:
            scheduler_of(server).kill()
        wait_until(lambda: server.failure() is not None)
        failure = server.failure()
        assert failure is not None and "Last lines of" in failure
        assert ("fired up" if victim == "server" else "crashed") in failure
        assert living_members(group) == []
    assert not any(path.exists() for path in shared)


PARENT = """
import time
from pathlib import Path
from slime.engine.server import engine_fork_server
from tests.support.engines import READY_S, cpu_engine
model, folder, address = Path({model!r}), Path({folder!r}), {address!r} and Path({address!r})
host = None
if {own_fork_server}:
    host = engine_fork_server(cpu_engine(model, folder).spec, folder / "fork-server.log")
    host.start()
    address = host.address
server = cpu_engine(model, folder, fork_server=address)
server.start()
server.wait_ready(READY_S)
print(server.pid, host.pid if host else server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "launched",
    [
        pytest.param("directly", marks=pytest.mark.slow),
        pytest.param("by a fork server of others", marks=pytest.mark.slow),
        "by a fork server of its own",
    ],
)
def test_no_server_outlives_a_parent_that_is_killed(
    launched: str, tiny_model: Path, fork_server: Path, tmp_path: Path
) -> None:
    program = PARENT.format(
        model=str(tiny_model),
        folder=str(tmp_path),
        address=str(fork_server) if "others" in launched else None,
        own_fork_server="own" in launched,
    )
    with tempfile.TemporaryDirectory(prefix="killed-") as scratch:  # files that a killed parent cannot remove
        environment = {**os.environ, "TMPDIR": scratch}
        parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        assert_nothing_outlives(parent, num_groups=2 if "own" in launched else 1)


def assert_nothing_outlives(parent: subprocess.Popen[str], num_groups: int) -> None:
    """Wait for the process groups that `parent` names, kill it, and see them end."""
    assert parent.stdout is not None
    groups = {int(pid) for pid in parent.stdout.readline().split()}
    assert len(groups) == num_groups
    assert sum(len(living_members(group)) for group in groups) >= 3
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(living_members(group) for group in groups))


def test_a_fork_server_ends_with_its_servers(tiny_model: Path, tmp_path: Path) -> None:
    from slime.engine.server import engine_fork_server

    spec = EngineSpec(model_path=str(tiny_model), device="cpu", log_path=tmp_path / "unused.log")
    host = engine_fork_server(spec, tmp_path / "fork-server.log")
    host.start()
    server = cpu_engine(tiny_model, tmp_path, fork_server=host.address)
    with running(server):
        group = server.pid
        assert group is not None and host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        wait_until(lambda: server.failure() is not None)
        assert living_members(group) == []
    assert host.poll() == -signal.SIGKILL
    host.stop()


def test_a_fork_server_is_refused_for_gpus(tmp_path: Path) -> None:
    spec = EngineSpec(model_path="m", log_path=tmp_path / "log", device="cuda", fork_server=tmp_path / "socket")
    with pytest.raises(EngineError, match="CPU engines only"):
        EngineServer(spec)


def test_a_missing_fork_server_is_named(tiny_model: Path, tmp_path: Path) -> None:
    server = cpu_engine(tiny_model, tmp_path, fork_server=tmp_path / "socket")
    with pytest.raises(EngineError, match=r"could not be started.*"):
        server.start()
