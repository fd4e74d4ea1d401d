"""A Ray that cannot be started or joined is reported with what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import grpc  # type: ignore[import-untyped]  # has no stubs of its own
import psutil
import pytest
import ray

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import ClusterError
from slime.run import ray_session as ray_session_module
from slime.run.ray_session import own_folder, ray_session


def broken_init(**_: Any) -> None:
    """Fail as Ray does on a machine that is too slow."""
    raise Exception("The current node timed out during startup.")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, r"Ray could not be started: The current node timed out during startup\. It may be too slow"),
        ("10.0.0.1:6379", r"the Ray cluster 10\.0\.0\.1:6379 could not be joined: .* Check --ray-address"),
    ],
)
def test_ray_errors_become_cluster_errors(monkeypatch: pytest.MonkeyPatch, address: str | None, message: str) -> None:
    monkeypatch.setattr(ray, "init", broken_init)
    monkeypatch.setattr(ray_session_module, "_require_reachable", lambda _: None)
    config = RunConfig(cluster=ClusterOptions(device="cpu", ray_address=address))
    with pytest.raises(ClusterError, match=message), ray_session(config):
        pass
    assert not ray.is_initialized()


@contextmanager
def listening(server: grpc.Server | None) -> Iterator[str]:
    """The address of a gRPC server that knows no method of Ray's, or of a socket that accepts and says nothing."""
    host = ray.util.get_node_ip_address()  # Ray replaces a loopback address by this one
    if server is None:
        with socket.create_server((host, 0)) as silent:
            yield f"{host}:{silent.getsockname()[1]}"
        return
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("nothing", r"Ray's control store does not answer at [\d.]+:\d+ \(UNAVAILABLE"),
        pytest.param(
            "silence",
            r"Ray's control store does not answer at [\d.]+:\d+ \((UNAVAILABLE|DEADLINE)",
            marks=pytest.mark.slow,
        ),
        ("something else", r"what answers at [\d.]+:\d+ is not Ray's control store"),
    ],
)
def test_a_wrong_address_is_reported_within_ten_seconds(answers: str, message: str) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1)) if answers == "something else" else None
    with listening(server) as address:
        if answers == "nothing":
            address = f"{ray.util.get_node_ip_address()}:1"
        started = time.monotonic()
        config = RunConfig(cluster=ClusterOptions(device="cpu", ray_address=address))
        with pytest.raises(ClusterError, match=message) as caught, ray_session(config):
            pass
    assert time.monotonic() - started < 10
    assert "Check --ray-address" in str(caught.value)
    assert not ray.is_initialized()


@pytest.mark.engine
def test_a_local_ray_has_no_process_that_a_run_on_one_machine_does_not_need() -> None:
    before = psutil.Process().children(recursive=True)  # other tests' Rays among them
    with ray_session(RunConfig(cluster=ClusterOptions(device="cpu"))):
        started = []
        for child in set(psutil.Process().children(recursive=True)) - set(before):
            with suppress(psutil.Error):  # it has ended
                started.append(" ".join(child.cmdline()))
    known = ("gcs_server", "raylet", "monitor.py", "dashboard.py")
    names = {name for name in known for command in started if name in command}
    assert names == {"gcs_server", "raylet"}


def test_folders_of_killed_runs_are_removed_and_no_others(tmp_path: Path) -> None:
    of_a_killed_run, just_made, of_another_program = (tmp_path / name for name in ("slime-ray-a", "slime-ray-b", "ray"))
    (of_a_killed_run / "ray" / "session_1").mkdir(parents=True)
    (of_another_program / "ray").mkdir(parents=True)
    just_made.mkdir()
    with own_folder(tmp_path) as in_use:
        assert in_use.parent.stat().st_mode & 0o077 == 0, "others can enter it"
        with own_folder(tmp_path) as another:
            assert set(tmp_path.iterdir()) == {just_made, of_another_program, in_use.parent, another.parent}
    assert sorted(tmp_path.iterdir()) == [of_another_program, just_made]


def test_a_temporary_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    told = pytest.raises(ClusterError, match=r"/absent: No such file or directory; .* RAY_TMPDIR")
    with told, own_folder(tmp_path / "absent"):
        pass


_WHERE = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_kernels_are_in_no_folder_that_another_user_could_have_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Literal["cpu", "cuda"]
) -> None:
    """Torch runs what it finds there."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ray_session_module, "_start", lambda *_: None)
    with ray_session(RunConfig(cluster=ClusterOptions(device=device))):
        asked = subprocess.run([sys.executable, "-c", _WHERE], capture_output=True, text=True, check=True)
        folder, temporary = Path(asked.stdout.strip()), Path(os.environ.get("TMPDIR", "/tmp"))
    if device == "cuda":
        assert folder == tmp_path / "slime" / "kernels"
        assert folder.stat().st_mode & 0o077 == 0
    else:
        assert folder.parent == temporary and temporary.parent.name.startswith("slime-ray-")
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with ray_session(RunConfig(cluster=ClusterOptions(device=device))):
        assert Path(os.environ["TMPDIR"]).parent.name.startswith("slime-ray-")


@pytest.mark.parametrize("folder", ["short", "too-long-for-the-sockets-that-engines-have-in-their-temporary-folders"])
def test_what_killed_processes_leave_in_their_temporary_folder_goes_with_the_run(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    with TemporaryDirectory(dir="/tmp") as base:
        root = Path(base, folder)
        root.mkdir()
        monkeypatch.setenv("TMPDIR", str(root))
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path(base, "cache")))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setattr(ray_session_module, "_start", lambda *_: None)
        with ray_session(RunConfig(cluster=ClusterOptions(device="cpu"))):
            own = Path(os.environ["TMPDIR"])
            assert (own != root and root in own.parents) == (folder == "short")
            if own != root:
                (own / "left").touch()
        assert os.environ["TMPDIR"] == str(root) and list(root.iterdir()) == []
