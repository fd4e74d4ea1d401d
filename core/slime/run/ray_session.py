"""The Ray runtime of a run.

No other module starts, joins or leaves Ray.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]  # has no stubs of its own
import psutil
import ray
from ray._private import node as ray_node
from ray._private import parameter as ray_parameter
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._private.services import canonicalize_bootstrap_address

from slime.config import RunConfig
from slime.errors import ClusterStartError, disk_problem
from slime.kit.processes import describe_exit
from slime.run.signals import interruptions_deferred, uninterrupted

#: folders of local Rays are named so
_FOLDER = "slime-ray-"
#: the parts of Ray without which nothing works
RAY_DAEMONS = {"gcs_server": "Ray's control service (gcs_server)", "raylet": "Ray's node service (raylet)"}
#: characters of a TMPDIR in which a run gets a folder: engines have sockets there, whose paths are limited to 107
_LONGEST_TMPDIR = 45
#: where torch puts compiled kernels
_KERNELS = "TORCHINDUCTOR_CACHE_DIR"
#: a cluster that does not answer at all is given up after this long
_REACH_S = 5.0
_HARMLESS_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
#: Ray gets this long to end its processes; then they are killed
_LEAVE_S = 10.0
_KILL_S = 5.0
#: a line of the logs of Ray's daemons: E is an error, C a failed check
_ERROR_LINE = re.compile(r"^\[[^\]]* [ECF] \d+ \d+\] .*$", re.MULTILINE)
_LAST_WORDS = 5
_TAIL_CHARS = 256 * 1024


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Start or join Ray for the body. Raises `ClusterStartError` if that fails.

    A local Ray belongs to this process alone: it listens on loopback, its calls need a token that exists only in the
    memory of the run's processes, and its files are in a folder that only this user can enter. It is started quietly,
    without dashboard, and dies with this process (Ray asks the kernel to end its daemons with their parent). With
    `--ray-address` the run joins that cluster instead, with the token that Ray finds (`RAY_AUTH_TOKEN`,
    `~/.ray/auth_token`), and leaves it running.
    """
    address = config.cluster.ray_address
    if address is not None:
        with _leaving():
            _join(address)
            yield
        return
    root = tempfile.gettempdir()
    # On a GPU host it also holds what other libraries have compiled, which is worth keeping.
    shared = config.on_gpu or len(root) > _LONGEST_TMPDIR
    kernels = _kernels() if shared else None
    scratch = own_folder(Path(root)) if kernels is None else nullcontext()
    with own_folder(_ray_root()) as folder, scratch as temporary, _own_settings(temporary, kernels), _leaving():
        _start(config, folder)
        yield


def _kernels() -> Path | None:
    """A folder of this user's for the kernels that torch compiles; None if there is no home to write to.

    Torch's default is a folder of a known name in the temporary folder, without a look at whose it is: another user of
    the machine could make it first, and put code there that runs as this one.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get(_KERNELS) or cache / "slime" / "kernels")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder


def _ray_root() -> Path:
    return Path(os.environ.get("RAY_TMPDIR", "/tmp"))  # as Ray does: TMPDIR may be too long for sockets


def _start(config: RunConfig, folder: Path) -> None:
    # On CPU every actor requests zero CPUs. With one CPU, Ray starts no idle workers in advance.
    num_cpus = None if config.on_gpu else 1
    options = {"num_cpus": num_cpus, "include_dashboard": False, "configure_logging": False, "_temp_dir": str(folder)}
    try:
        with _on_one_machine():
            _connect(address="local", **options)
    except Exception as error:
        raise ClusterStartError(
            f"Ray could not be started: {_reason(error)}. It may be too slow on a busy machine: try again with less"
            " load."
        ) from error


def _join(address: str) -> None:
    try:
        _require_reachable(address)
        _connect(address=address)
    except Exception as error:
        raise ClusterStartError(
            f"the Ray cluster {address} could not be joined: {_reason(error)}. Check --ray-address, that `ray status`"
            " works on that machine, and that RAY_AUTH_TOKEN has the cluster's token if it wants one."
        ) from error


def _connect(**options: Any) -> None:
    # Ray leaves SIGTERM to slime. Its own handlers would end the process in the midst of Ray's start.
    with interruptions_deferred(), _changed(ray._private.utils, set_sigterm_handler=lambda _handler: None):
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    # Otherwise Ray prints how each worker ended, in its own words and colours; slime says it too.
    ray_worker._worker_logs_enabled = False


def _reason(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__


def _require_reachable(address: str) -> None:
    """Raise unless the control store of a Ray cluster answers at `address` and takes the user's token.

    Ray itself would try for a minute or longer.
    """
    bootstrap = canonicalize_bootstrap_address(address)
    if bootstrap is None or "://" in address:
        return
    compiled: Any = ray._raylet  # has no types
    tokens = compiled.AuthenticationTokenLoader.instance()
    headers = tokens.get_token_for_http_header() if tokens.has_token(ignore_auth_mode=True) else {}
    with grpc.insecure_channel(bootstrap, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_HARMLESS_CALL)(b"", timeout=_REACH_S, metadata=[*headers.items()])
        except grpc.RpcError as error:
            status = error.code()
            reason = {
                grpc.StatusCode.UNAUTHENTICATED: "it wants another token than yours" if headers else "it wants a token",
                grpc.StatusCode.UNIMPLEMENTED: f"what answers at {bootstrap} is not Ray's control store",
            }.get(status, f"Ray's control store does not answer at {bootstrap} ({status.name}: {error.details()})")
            raise ConnectionError(reason) from None


@contextmanager
def _changed(part_of_ray: Any, **values: Any) -> Iterator[None]:
    """In the body, attributes of a module or class of Ray have these values."""
    before = {name: getattr(part_of_ray, name) for name in values}
    for name, value in values.items():
        setattr(part_of_ray, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(part_of_ray, name, value)


@contextmanager
def _on_one_machine() -> Iterator[None]:
    """In the body, Ray starts what a run on one machine needs. `ray.init` has no parameters for this.

    Ray takes 127.0.0.1 for this machine's address, as it does on macOS. Its servers then listen there only. An address
    given to `ray.init` would not do: Ray replaces a loopback address by that of the network.

    It does not start the process that asks a cloud for more machines, the one that prints what workers write, which
    slime has in logs of its own, and the dashboard's server, which Ray starts without a dashboard too, to report usage.
    Each costs a second of imports at a moment when the run waits for Ray alone.
    """
    parameters = partial(ray_parameter.RayParams, no_monitor=True, include_log_monitor=False)
    with (
        _changed(ray_constants, ENABLE_RAY_CLUSTER=False),
        _changed(ray_parameter, RayParams=parameters),
        _changed(ray_node.Node, start_api_server=lambda _node, **_options: None),
    ):
        yield


@contextmanager
def _own_settings(temporary: Path | None, kernels: Path | None) -> Iterator[None]:
    """In the body, Ray has the settings of a run on one machine, whatever the user set for other clusters.

    Args:
        temporary: Where the run's processes put their temporary files. They are killed in the end, and libraries, wandb
            for example, would leave some.
        kernels: Where they put compiled kernels instead.
    """
    folders = {"TMPDIR": temporary, _KERNELS: kernels}
    own = {name: str(folder) for name, folder in folders.items() if folder is not None}
    own |= {
        # Ray's processes demand this token of each other. They get it in their environment, which only this user can
        # read.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Otherwise Ray's control service keeps a record of each of the last 100,000 calls, for a dashboard that does
        # not run: it grew by 12 MiB in 1,000 steps of a tiny run.
        "RAY_task_events_report_interval_ms": "0",
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    _reread_settings()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _reread_settings()


def _reread_settings() -> None:
    """Ray reads its settings and the token once per process; make it read them again."""
    compiled: Any = ray._raylet  # has no types
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def own_folder(root: Path) -> Iterator[Path]:
    """A folder in `root` for the files and sockets of a local Ray, or for temporary files, removed at the end.

    Ray opens its own folders to every user, so this one is inside another that is closed. Both are short, because the
    path of a socket is limited to 107 characters. The lock tells other runs that this folder is in use; what runs that
    were killed left behind is removed here.
    """
    for left in root.glob(f"{_FOLDER}*"):
        _remove_unused(left)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=root))
    except OSError as error:
        raise ClusterStartError(
            f"Ray's files cannot be put into {root}: {disk_problem(error, root / _FOLDER)}. RAY_TMPDIR and TMPDIR"
            " choose another one."
        ) from error
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "ray").mkdir()  # from now on it counts as unused when it is not locked
        yield folder / "ray"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_unused(folder: Path) -> None:
    with suppress(OSError):  # somebody else's, in use, or just removed
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid() and (folder / "ray").is_dir():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(lock)


# --- the end -------------------------------------------------------------------------------------


@contextmanager
def _leaving() -> Iterator[None]:
    """Leave Ray after the body, within seconds, whatever state it is in."""
    try:
        yield
    finally:
        with uninterrupted():
            _leave()


def _leave() -> None:
    """Disconnect from Ray. A local one is ended: with SIGKILL if it is broken, or does not end in time."""
    node = ray_worker._global_node
    own = [] if node is None or not node.is_head() else _tree(daemon.pid for _, daemon in _daemons())
    if ray_failure() is not None:
        # Ray would wait for the part that is missing.
        _kill(own)
    leaving = threading.Thread(target=ray.shutdown, name="leave-ray", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_S)
    _kill(own)
    leaving.join(_KILL_S)
    if leaving.is_alive():
        # It would be waited for again when Python exits.
        atexit.unregister(ray_worker.shutdown)


def new_meeting_file() -> Path:
    """A file, not yet there, in which the ranks of this machine's Ray find each other. Only this user can write to it,
    and it goes with Ray's other files."""
    return Path(ray_worker._global_node.get_temp_dir_path(), f"meeting-{uuid.uuid4().hex}")


def ray_failure(*, killed: bool = False) -> str | None:
    """Which part of the local Ray has ended, how, and why; None while it is complete, and for a cluster.

    With `killed` only one that a signal has ended: others may have followed an agent of theirs.
    """
    for name, process in _daemons():
        if name in RAY_DAEMONS and (status := process.poll()) is not None and (status < 0 or not killed):
            return f"{RAY_DAEMONS[name]} (pid {process.pid}) {describe_exit(status)}.{_last_words(name)}"
    return None


def _last_words(kind: str) -> str:
    """The last errors that a daemon of the local Ray wrote. Its log is removed with Ray's other files."""
    lines = []
    for log in Path(ray_worker._global_node.get_logs_dir_path()).glob(f"{kind}.*"):
        with suppress(OSError):
            lines += _ERROR_LINE.findall(log.read_text(errors="replace")[-_TAIL_CHARS:])
    return "\n".join(("\nThe last errors in its log:", *lines[-_LAST_WORDS:])) if lines else ""


def _daemons() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The processes that Ray has started for this one: each kind with its process."""
    if (node := ray_worker._global_node) is not None:
        for kind, started in list(node.all_processes.items()):
            yield from ((kind, one.process) for one in started)


def _tree(roots: Iterable[int]) -> list[psutil.Process]:
    """Processes and everything they started."""
    found = []
    for pid in roots:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found += [root, *root.children(recursive=True)]
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # psutil notices if another process has the number now
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_S)


def live_nodes() -> set[str]:
    """Addresses of the nodes that the Ray cluster has now. That one is cut off it notices after a minute."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def node_devices(resource: str) -> list[int]:
    """How many devices each node of the Ray cluster serves now, some perhaps none: its `GPU`, or on CPUs its `CPU`."""
    return [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]


def devices_at(address: str, resource: str) -> list[int]:
    """`node_devices` of the Ray cluster at an address, without joining it. Raises `ConnectionError`."""
    _require_reachable(address)
    compiled: Any = ray._raylet  # has no types
    nodes = compiled.GcsClient(address=canonicalize_bootstrap_address(address)).get_all_node_info(timeout=_REACH_S)
    return [int(node.resources_total.get(resource, 0)) for node in nodes.values() if node.state == 0]


def of_several_nodes() -> bool:
    """Whether this process has joined a cluster of several nodes."""
    return ray.is_initialized() and not any(_daemons()) and len(live_nodes()) > 1
