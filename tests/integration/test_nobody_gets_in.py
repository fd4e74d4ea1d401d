"""A run on one machine is closed to everybody else.

It listens on loopback only, Ray wants a token, engines and router want keys, and no file has a secret.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from tests.integration.conftest import SlimeRun, command_of, output_of
from tests.support.http_services import serving
from tests.support.strangers import as_stranger, stranger_can_open

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]

NOBODY = 65534
CANARY = "canary-51c9"
#: a line in the format of Prometheus
_COUNTER = re.compile(rb"#.*|[a-zA-Z_:][\w:]*({.*})? \S+|")
#: what would let a stranger use or change the run
ATTEMPTS = [
    ("POST", "/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/flush_cache"),
    ("POST", "/workers"),
    ("GET", "/workers"),
    ("GET", "/server_info"),
]
#: a method of each of Ray's services that gives somebody power over the run
METHODS = (
    "InternalKVGcsService/InternalKVKeys",
    "JobInfoGcsService/AddJob",
    "ActorInfoGcsService/RegisterActor",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Pull",
    "CoreWorkerService/PushTask",
)
#: calls each method at a port as another user, and prints the status of each answer
CALLER = """
import json, os, sys
os.environ["GRPC_VERBOSITY"] = "NONE"
import grpc
port, methods, metadata, user = json.loads(sys.stdin.read())
import grpc._channel  # later it could not be read: another user may have no access to this Python
if user is not None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
answers = []
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    for method in methods:
        try:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=60, metadata=metadata)
            answers.append("OK")
        except grpc.RpcError as error:
            answers.append(error.code().name)
print(json.dumps(answers))
"""


def listeners(process: psutil.Process) -> list[tuple[str, int]]:
    """Addresses and ports on which a process accepts TCP connections."""
    try:
        found = process.net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]


def files_of(processes: list[psutil.Process]) -> set[Path]:
    """What these processes use of the folders that all users share: files of slime and Ray, and shared memory."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError, psutil.Error):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found |= set(re.findall(r" (/dev/shm/\S+|/tmp/(?:slime|ray)\S*)$", maps, re.MULTILINE))
            found |= {one.path for one in process.open_files()}
            found |= {one.laddr for one in process.net_connections(kind="unix")}
    return {Path(path) for path in found if path.startswith(("/dev/shm/", "/tmp/slime-", "/tmp/ray"))}


def files_with(text: str, folder: Path) -> Iterator[Path]:
    """The files in a folder that contain `text`. The run goes on: files and folders may vanish while it is read."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and text.encode() in path.read_bytes():
                    yield path


def call_ray(port: int, token: str | None = None) -> list[str]:
    """What Ray's services at a port answer to another user of this machine, or to this one if it is not root."""
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    done = subprocess.run(
        [sys.executable, "-c", CALLER],
        input=json.dumps(
            [port, METHODS if token is None else METHODS[:1], metadata, NOBODY if os.getuid() == 0 else None]
        ),
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[str] = json.loads(done.stdout)
    return answers


def is_metrics(answer: http.client.HTTPResponse) -> bool:
    """Whether a server answers whatever it is asked with its counters, as those for Prometheus do."""
    return answer.status == 200 and all(_COUNTER.fullmatch(line) for line in answer.read().splitlines())


def attempts(ports: set[int]) -> dict[str, int]:
    """The status of every attempt on a port that speaks HTTP."""
    got: dict[str, int] = {}

    def attempt(port: int) -> None:
        for method, path in ATTEMPTS:
            # Ports that speak something else never answer; the others do in time on a busy machine too.
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                connection.request(method, path, "{}", {"Content-Type": "application/json"})
                answer = connection.getresponse()
                got[f"{port} {method} {path}"] = 0 if is_metrics(answer) else answer.status
            except (OSError, http.client.HTTPException):
                break
            finally:
                connection.close()

    with ThreadPoolExecutor(max(len(ports), 1)) as threads:
        list(threads.map(attempt, ports))
    return got


@pytest.mark.row("T1")
def test_a_run_is_closed_keeps_its_secrets_and_leaves_nothing_when_it_is_interrupted(
    slime_train: Start,
) -> None:
    asked: list[str] = []

    async def rate(number: int, content: Any) -> Any:
        del number
        asked.append(content["response"])
        if content["response"] == asked[0]:
            return web.Response(status=400, text="no")
        return {"score": float(len(content["response"]))}

    with serving(rate) as service:
        url = service.url.replace("http://", f"http://user:{CANARY}@") + f"/score?api_key={CANARY}"
        run = slime_train(
            "--num-rollout", "100000", "--async", "--save-interval", "2", "--advantage-estimator", "grpo",
            "--entropy-coef", "0.1", "--reward", "remote", "--reward.url", url, "--reward.protocol", "single",
            reward=False,
        )  # fmt: skip
        run.wait_for_output(r"checkpoint after 2 rollouts")
        files = assert_closed(run)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130, run.output
    assert run.left_over() == []
    assert [path for path in files if path.exists()] == []
    assert "slime: interrupted: ending the run" in run.output
    assert re.search(
        r"slime: to continue from the checkpoint rollout_\d+:\n"
        r"  slime train --resume outputs/run '--reward\.url=\S*api_key=<secret>'\n"
        r"slime: Ctrl-C saves nothing; `kill PID` \(SIGTERM\) saves a checkpoint after the step, then ends\n$",
        run.output,
    )

    assert "Basic " in service.headers[0]["Authorization"]
    assert "answered 400" in run.output and "please report it" not in run.output
    assert "answered 400" in (run.run_dir / "rollouts/000000.jsonl").read_text()
    kept = [path for path in run.root.rglob("*") if path.is_file()]
    names = {path.name for path in kept}
    assert {"config.toml", "plugins.json", "metrics.jsonl", "state.json", "engine-0.log", "router.log"} <= names
    assert [str(path) for path in kept if CANARY.encode() in path.read_bytes()] == []
    assert run.log in kept


def assert_closed(run: SlimeRun) -> set[Path]:
    """Nobody else can use or read a run that goes on. Returns what it has in the folders that all users share."""
    driver = psutil.Process(run.process.pid)
    processes = [driver, *driver.children(recursive=True)]
    titles = {process.pid: " ".join(command_of(process)) for process in processes}
    listening = {process.pid: listeners(process) for process in processes}

    outside = {
        (titles[pid][:100], address)
        for pid, addresses in listening.items()
        for address, _ in addresses
        if not ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback
    }
    assert outside == set()
    [control_store] = [process for process in processes if "/gcs_server" in titles[process.pid]]
    schedulers = [process for process in processes if titles[process.pid].startswith("sglang::scheduler")]
    assert len(schedulers) == 1, titles
    [scheduler] = schedulers
    [rank] = [p for p in processes if output_of(p).endswith("/trainer-0.log")]
    for process in (control_store, scheduler, rank):
        assert listening[process.pid], "the test no longer sees where the run listens"

    token = control_store.environ()["RAY_AUTH_TOKEN"]
    rays = [
        pid
        for pid in titles
        if re.search(r"ray::(Worker|AsyncWorker|trainer|rollout)|/raylet |/gcs_server", titles[pid])
    ]
    assert len(rays) == 5
    for pid in rays:
        # gloo's ports are the trainer's others
        [*ports] = [port for address, port in listening[pid] if address.startswith("::ffff:")]
        for port in ports:
            assert "UNAUTHENTICATED" in (answers := set(call_ray(port))) <= {"UNAUTHENTICATED", "UNIMPLEMENTED"}, (
                answers
            )
    [(_, gcs)] = listening[control_store.pid]
    assert call_ray(gcs)[:3] == ["UNAUTHENTICATED"] * 3
    assert call_ray(gcs, token)[0] not in ("UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE")

    [agent] = [pid for pid, title in titles.items() if title.startswith("ray::RuntimeEnvAgent")]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        url = f"http://127.0.0.1:{listening[agent][0][1]}/get_or_create_runtime_env"
        urllib.request.urlopen(url, data=b"", timeout=60)

    assert not [title for title in titles.values() if token in title]
    files = files_of(processes)
    shared = {Path(*path.parts[:3]) for path in files if path.is_relative_to("/tmp")}
    assert len(shared) == 2, shared  # of Ray, and of temporary files
    assert [folder for folder in shared if folder.stat().st_mode & 0o077] == []
    assert [path for folder in (run.root, *shared) for path in files_with(token, folder)] == []
    [meeting] = [path for folder in shared for path in folder.rglob("meeting-*")]
    assert meeting.stat().st_size, "the ranks did not meet in this file"
    memory = [path for path in files if path.is_relative_to("/dev/shm") and path.exists()]
    assert memory and [path for path in memory if stranger_can_open(path)] == []

    ports = {port for addresses in listening.values() for _, port in addresses}
    got = as_stranger(lambda: attempts(ports))
    refused = [status for status in got.values() if status == 401]
    assert len(refused) >= 9, got  # those of the engine, and five of the router's
    assert [(what, status) for what, status in got.items() if 0 < status < 400] == []
    return files
