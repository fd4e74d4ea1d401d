"""One SGLang server as a supervised child process.

Its command line and environment are what RL needs, and what the device's platform needs (see `slime.platform`). SGLang
options that the user set override them.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from slime.config import RunConfig
from slime.config.sglang_options import engine_options
from slime.engine.control import EngineControl, EngineKeys
from slime.engine.launch import prepare, serve_forked
from slime.engine.ports import LOOPBACK, ReservedPort, http_url, on_interface_of
from slime.engine.process import SupervisedProcess, launch_child
from slime.errors import EngineError, SlimeError
from slime.kit.processes import COLLECT_AFTER, Child, ForkedChild, ForkServer, living_members
from slime.platform import platform_of

#: on every kind of machine
_ENVIRONMENT = {
    # Otherwise /health generates a token: it takes a second, and says 503 while generation is paused for a weight
    # update, whereupon the router refuses new requests.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # When a scheduler dies, end at once instead of examining it for five seconds.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    # SGLang's other HTTP server, which knows nothing of the keys.
    "SGLANG_RUST_SERVER": "0",
}
#: memory is reserved for the longest answer of every request: one that is computed again, because it had to make room
#: for another, gets other rounding errors. And MKL's sums do not depend on where a tensor lies in memory.
_DETERMINISTIC_ENVIRONMENT = {
    "MKL_CBWR": "AUTO,STRICT",
    "SGLANG_INIT_NEW_TOKEN_RATIO": "1.0",
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "1.0",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(2**30),
}
#: where torch looks for the other ranks, instead of an address
_MEETING_POINT = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
#: an option with which SGLang needs addresses: several groups of ranks
_MEET_BY_ADDRESS = "--dp-size"
#: of the temporary folders of engines, and of the lists of their files
_PREFIX = "slime-engine-"
#: where the lists are, one path per line. Like the files of SGLang in them, and unlike TMPDIR, which may belong to one
#: run and vanish with it. Locks work there on every machine.
_LISTS = Path("/dev/shm")
#: what SGLang calls its load reports and message queues; it never removes them
_SHARED_MEMORY = r"/dev/shm/sgl(?:ang_loads|_shm)_[\w.-]+"
#: seconds between two looks at the files of an engine that starts
_LOOK_S = 1.0
#: a GPU server gets this long to end by itself, so that it frees its memory in order
_CUDA_GRACE_S = 15.0


@dataclass(frozen=True)
class EnginePart:
    """The place of a server in an engine over several nodes. Only the first one's answers requests."""

    #: of its node among those of the engine
    rank: int
    nodes: int
    #: HOST:PORT at which the first one waits for the others
    meeting: str
    #: seconds that the servers may wait for each other: one may start, or take new weights, so much later
    timeout_s: float


@dataclass(frozen=True)
class EngineSpec:
    """One SGLang server: an engine, or one node's part of it.

    Attributes:
        model_path: A model folder.
        log_path: Where the server's output goes.
        host: Address to listen on.
        port: Port to listen on; 0: a free one.
        tp_size: Tensor-parallel ranks of the engine.
        part: The server's place in an engine over several nodes, each of which has one; None: it is the whole engine.
        device: Kind of machine.
        threads: CPU threads of each rank; not on GPUs.
        extra_args: SGLang's command line as the user set it (`["--dtype", "bfloat16"]`); overrides every default.
        random_seed: SGLang's seed.
        routed_experts: Whether requests may ask which experts computed each token.
        compared: Whether its weights will be compared with the trainer's.
        deterministic: Whether a request's tokens and log-probs must not depend, to the last bit, on other requests.
        releases_memory: Whether it will be asked to release its memory.
        devices: The GPUs that it sees; empty: those that this process sees.
        fork_server: Address of the host's `ForkServer`; not on GPUs.
        keys: What its clients must present; None: whoever can reach its port can use and change it.
    """

    model_path: str
    log_path: Path
    host: str = LOOPBACK
    port: int = 0
    tp_size: int = 1
    part: EnginePart | None = None
    device: Literal["cpu", "cuda"] = "cuda"
    threads: int = 1
    extra_args: Sequence[str] = ()
    random_seed: int | None = None
    routed_experts: bool = False
    compared: bool = False
    deterministic: bool = False
    releases_memory: bool = False
    devices: Sequence[str] = ()
    fork_server: Path | None = None
    keys: EngineKeys | None = None

    @classmethod
    def of(cls, config: RunConfig, model_arguments: Sequence[str], log_path: Path) -> EngineSpec:
        """What a run's configuration says of each of its engines; `model_arguments` are those that its model adds."""
        return cls(
            model_path=str(config.checkpoint.hf_checkpoint),
            log_path=log_path,
            tp_size=config.cluster.rollout_num_gpus_per_engine,
            device=config.device,
            extra_args=[*engine_options(config), *model_arguments],
            routed_experts=config.rollout.use_rollout_routing_replay,
            compared=config.sync.check_weight_update_equal,
            deterministic=config.run.deterministic,
            releases_memory=config.cluster.colocate and config.cluster.offload_rollout,
        )


def engine_fork_server(spec: EngineSpec, log_path: Path) -> ForkServer:
    """A process that imports SGLang once for all engines of a host, which are then forked in half a second each.

    Importing SGLang takes 6 to 8 seconds of CPU, nearly all of an engine's start. The engines share the memory too.

    Args:
        spec: Any of the engines; SGLang reads some of its environment while it is imported.
        log_path: Where the output goes.
    """
    # Threads do not survive a fork, and a process whose parent has had some would wait for them: see `serve_forked`.
    environment = {**server_environment(spec), "OMP_NUM_THREADS": "1"}
    return ForkServer(partial(prepare, spec.device), env=environment, log_path=log_path)


class Scratch:
    """The temporary folder of an engine, which only this user can enter, and its files elsewhere.

    They are listed where the next engine finds them: making a folder removes what killed engines left behind.
    """

    def __init__(self) -> None:
        """Make it, in the folder for temporary files. Raises `OSError`."""
        for left in _LISTS.glob(f"{_PREFIX}*"):
            _remove_unused(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._list_path = _LISTS / self.path.name
        self._list = os.open(self._list_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._list, fcntl.LOCK_EX)
        self._listed: set[Path] = set()
        self.remember([self.path])  # from now on the list counts as left behind when it is not locked

    def remember(self, files: Iterable[Path]) -> None:
        """Add the engine's files to the list."""
        new = {*files} - self._listed
        self._listed |= new
        with suppress(OSError):  # no memory left for shared files
            os.write(self._list, "".join(f"{path}\n" for path in new).encode())

    def cleanup(self) -> None:
        """Remove the folder and the files."""
        shutil.rmtree(self.path, ignore_errors=True)
        for path in self._listed - {self.path}:
            path.unlink(missing_ok=True)
        self._list_path.unlink(missing_ok=True)
        os.close(self._list)


def _remove_unused(listed: Path) -> None:
    with suppress(OSError):  # somebody else's, in use, or just removed
        lock = os.open(listed, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid != os.getuid():
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (paths := listed.read_text(encoding="utf-8", errors="replace").splitlines()):
                return  # just made, and not locked yet
            for path in map(Path, paths):
                if re.fullmatch(_SHARED_MEMORY, str(path)):
                    path.unlink(missing_ok=True)
                elif path.name == listed.name:
                    shutil.rmtree(path, ignore_errors=True)
            listed.unlink()
        finally:
            os.close(lock)


class EngineServer(SupervisedProcess):
    """The SGLang server that a spec describes."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.fork_server is not None and not platform_of(spec.device).forks_engines:
            raise EngineError("a fork server is for CPU engines only: a CUDA context does not survive a fork")
        self.spec = spec
        self._reserved = None if spec.port else ReservedPort(spec.host)
        self.port = spec.port if self._reserved is None else self._reserved.number
        self.url = http_url(spec.host, self.port)
        super().__init__(f"the engine at {self.url}", spec.log_path)
        self.control = EngineControl(self.url, spec.keys, tp_size=spec.tp_size)
        self._scratch: Scratch | None = None
        self._looked_at = -math.inf

    def launch(self) -> Child:
        """Start the process."""
        arguments = server_arguments(self.spec, self.port)
        environment = server_environment(self.spec)
        self._scratch = Scratch()
        if self.spec.part is None and not _is_set(_MEET_BY_ADDRESS, self.spec.extra_args):
            # The ranks of this engine meet in a file of this user. SGLang's default, a TCP store, listens on every
            # interface and lets anybody write to it.
            environment[_MEETING_POINT] = f"file://{self._scratch.path}/ranks"
        if self.spec.device != "cuda":
            # SGLang leaves its sockets behind when it ends. Not on a GPU host, where the temporary folder also holds
            # compiled kernels worth keeping.
            environment = {"TMPDIR": str(self._scratch.path), **environment}
        if self.spec.fork_server is not None:
            serve = partial(serve_forked, self.spec.device, arguments, environment, self.spec.keys)
            return ForkedChild(self.spec.fork_server, serve, log_path=self.log_path)
        keys = None if self.spec.keys is None else asdict(self.spec.keys)
        environment = {**os.environ, **environment}
        arguments = [self.spec.device, *arguments]
        return launch_child("engine", arguments, secret=keys, env=environment, log_path=self.log_path)

    def copy_folder(self) -> Path:
        """A folder on this node for a copy of the weights, which goes with the server.

        Its path is the same on all nodes of an engine, and nobody without the keys can guess it.
        """
        assert self._scratch is not None
        if self.spec.part is None:
            return self._scratch.path / "weights"
        secret = f"{self.spec.keys and self.spec.keys.admin} {self.spec.part.meeting}"
        link = Path(tempfile.gettempdir()) / f"{_PREFIX}{hashlib.sha256(secret.encode()).hexdigest()}"
        link.unlink(missing_ok=True)  # of a server that was killed
        link.symlink_to(self._scratch.path)
        self._scratch.remember([link])
        return link / "weights"

    def _find_shared_memory(self) -> None:
        """Find its files while it lives: processes that have been killed tell nothing."""
        if self._scratch is not None:
            self._scratch.remember(_shared_memory_files(self.pid))

    def is_ready(self) -> bool:
        """Whether it answers requests. Its files are looked for until it does: it may be killed before."""
        if time.monotonic() - self._looked_at > _LOOK_S:
            self._looked_at = time.monotonic()
            self._find_shared_memory()
        try:
            self.control.health(timeout_s=2.0)
        except SlimeError:
            return False
        self._find_shared_memory()
        return True

    def stop(self, grace_s: float | None = None) -> None:
        """End the server and everything it started, and remove the files it leaves behind.

        Args:
            grace_s: Seconds between SIGTERM and SIGKILL; None: what the device needs.
        """
        self._find_shared_memory()
        on_gpu = self.spec.device == "cuda"
        super().stop(grace_s=(_CUDA_GRACE_S if on_gpu else 0.0) if grace_s is None else grace_s)
        if self._reserved is not None:
            self._reserved.release()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def _shared_memory_files(group: int | None) -> set[Path]:
    """Shared-memory files of SGLang in process group `group`."""
    found: set[Path] = set()
    for pid in living_members(group) if group is not None else ():
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found.update(map(Path, re.findall(_SHARED_MEMORY, maps)))
    return found


def server_environment(spec: EngineSpec) -> dict[str, str]:
    """What is added to the environment of the server."""
    environment = _ENVIRONMENT | on_interface_of(spec.host)
    if spec.part is not None:
        # Otherwise SGLang looks for the address of the way to the internet, which a node may not have.
        environment["SGLANG_HOST_IP"] = spec.host
    if spec.deterministic:
        environment |= _DETERMINISTIC_ENVIRONMENT
    if spec.releases_memory and spec.device == "cuda":
        # Otherwise the memory of CUDA graphs is not the memory saver's, and `--enable-memory-saver` leaves it in use.
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    if spec.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(spec.devices)
    return environment | platform_of(spec.device).engine_environment(spec)


def server_arguments(spec: EngineSpec, port: int) -> list[str]:
    """SGLang's command line for the server on `port`."""
    arguments = ["--model-path", spec.model_path, "--host", spec.host, "--port", str(port)]
    for flag, value in _defaults(spec).items():
        if not _is_set(flag, spec.extra_args):
            arguments += [flag] if value is None else [flag, value]
    return [*arguments, *spec.extra_args]


def _defaults(spec: EngineSpec) -> dict[str, str | None]:
    """Flags the user may override; None marks a switch."""
    defaults: dict[str, str | None] = {
        "--tp-size": str(spec.tp_size),
        # `wait_ready` probes for readiness; a warm-up request would only delay it.
        "--skip-server-warmup": None,
        # One log line for each request costs more than parsing the request.
        "--log-level-http": "warning",
        "--gc-threshold": str(COLLECT_AFTER),
    }
    if spec.part is not None:
        defaults |= {
            "--nnodes": str(spec.part.nodes),
            "--node-rank": str(spec.part.rank),
            "--dist-init-addr": spec.part.meeting,
            "--dist-timeout": str(math.ceil(spec.part.timeout_s)),
        }
    if spec.random_seed is not None:
        defaults["--random-seed"] = str(spec.random_seed)
    if spec.routed_experts:
        defaults["--enable-return-routed-experts"] = None
    if spec.compared:
        # On GPUs, the shared experts of some models are stored among the routed ones unless this is set.
        defaults["--disable-shared-experts-fusion"] = None
    if spec.deterministic:
        # What is cached, and how a prompt is cut into chunks, depends on earlier and other requests.
        defaults |= {
            "--enable-deterministic-inference": None,
            "--disable-radix-cache": None,
            "--chunked-prefill-size": "-1",
        }
    if spec.releases_memory and spec.device == "cuda":
        # The trainer sends its weights again, but it has none of a draft model.
        defaults |= {"--enable-memory-saver": None, "--enable-draft-weights-cpu-backup": None}
    return defaults | platform_of(spec.device).engine_options(spec)


def _is_set(flag: str, arguments: Sequence[str]) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in arguments)
