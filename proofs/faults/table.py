"""The faults, each with the moment at which it is injected, and what must be said about it."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proofs.faults.target import Bench, Target

#: seconds that a dead, and a hung part may stay unnoticed
DEAD_S, HUNG_S = 5.0, 30.0
#: seconds until Ctrl-C is answered, and until a Ray cluster that does not answer is given up
ANSWER_S, REACH_S = 0.2, 10.0
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    #: when it happens, for the table
    phase: str
    #: waits for the moment, and injects the fault
    inject: Callable[[Target], None]
    #: what the output must contain, as a regular expression
    says: str
    within_s: float
    flags: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    exit_codes: tuple[int, ...] = (1,)
    #: for the runs of the continuous integration
    core: bool = False
    #: a command that runs the run
    prefix: Sequence[str] = ()
    #: what the output must contain besides, as regular expressions
    also: Sequence[str] = ()
    #: whether the last lines say how the run can be continued
    continues: bool = True
    #: makes what the run needs, in the given folder; returns more flags
    prepare: Callable[[Bench, Path], Sequence[str]] | None = None


def _running(target: Target) -> None:
    target.wait_for_step()


def _in_phase(text: str) -> Callable[[Target], None]:
    """The moment at which a file of the run's logs appears."""

    def wait(target: Target) -> None:
        target.wait_until((target.logs / text).exists, text)
        time.sleep(1.0)

    return wait


def _send(role: str, signum: int, moment: Callable[[Target], None] = _running) -> Callable[[Target], None]:
    def inject(target: Target) -> None:
        moment(target)
        target.wait_until(lambda: _exists(target, role), role)
        target.signal(role, signum)

    return inject


def _exists(target: Target, role: str) -> bool:
    try:
        return target.pid(role) > 0
    except RuntimeError:
        return False


def _component(target: Target) -> None:
    target.wait_until(target.moment().exists, "the component's note")


def _says(text: str) -> Callable[[Target], None]:
    """The moment at which the run says something."""

    def wait(target: Target) -> None:
        target.wait_until(lambda: re.search(text, target.output()), text)

    return wait


def _interrupt(times: int) -> Callable[[Target], None]:
    def inject(target: Target) -> None:
        target.wait_for_step()
        for number in range(times):
            if number:
                answered = ("interrupted", "still ending")[number - 1]
                target.wait_until(lambda text=answered: text in target.output(), f"answer to Ctrl-C {number}")
            if target.process.poll() is None:
                target.interrupt()

    return inject


def _damage_newest(bench: Bench, work: Path) -> Sequence[str]:
    """Let a run save twice, and change a byte of a trainer's file in the newer checkpoint; how to load it."""
    target = bench.start(work, ("--num-rollout", "2", "--save", str(work / "saved"), "--save-interval", "1"), {})
    target.process.wait(240)
    target.end()
    newest = max((path for path in (work / "saved").iterdir() if path.is_dir()), key=lambda path: path.name)
    part = max((newest / "megatron").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 0xFF
    part.write_bytes(content)
    return "--load", str(work / "saved")


#: sockets that accept connections, and never answer
_SILENT: list[socket.socket] = []


def _silent_cluster(bench: Bench, work: Path) -> Sequence[str]:
    """Something that accepts connections at --ray-address, and never answers."""
    del bench, work
    _SILENT.append(socket.create_server(("", 0)))
    return "--ray-address", f"127.0.0.1:{_SILENT[-1].getsockname()[1]}"


def _first_save(target: Target) -> None:
    """The moment at which a checkpoint is written to /mnt/saved of the run, whose /mnt is its own."""
    saved = Path(f"/proc/{target.process.pid}/root/mnt/saved")
    target.wait_until(lambda: any(saved.glob("*rollout_*")), "checkpoint")  # the run's lock is there before


def _small_disk(size: str) -> Sequence[str]:
    """A command that runs another with a small file system of its own under /mnt."""
    return "unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={size} none /mnt && exec "$@"', "sh"


_PARTS = {
    "trainer-0": ("trainer rank 0", r"trainer rank 0 \(pid \d+"),
    "trainer-1": ("trainer rank 1", r"trainer rank 1 \(pid \d+"),
    "engine-0": ("engine, HTTP server", r"engine 0.*\(pid \d+"),
    "scheduler": ("engine, scheduler", r"engine 0.* scheduler \(pid \d+"),
    "detokenizer": ("engine, detokenizer", r"engine 0.* detokenizer \(pid \d+"),
    "router": ("router", r"the router.* \(pid \d+"),
    "rollout": ("rollout process", r"rollout process \(pid \d+"),
    "raylet": ("Ray's raylet", r"\(raylet\) \(pid \d+"),
    "gcs_server": ("Ray's GCS", r"\(gcs_server\) \(pid \d+"),
}
_LOGS = {"scheduler": "engine-0", "detokenizer": "engine-0"}
_CORE = {("trainer-1", KILL)}


def _signals() -> list[Fault]:
    rows = []
    for role, (title, says) in _PARTS.items():
        for signum in (KILL, STOP):
            name = f"{'kill -9' if signum == KILL else 'SIGSTOP'} of {title}"
            within_s = DEAD_S if signum == KILL else HUNG_S
            core = (role, signum) in _CORE
            # The log of Ray's daemons goes with Ray's other files; the message has its last errors.
            also = () if role in ("raylet", "gcs_server") else (rf"/logs/{_LOGS.get(role, role)}\.log",)
            rows.append(Fault(name, "steps", _send(role, signum), says, within_s, core=core, also=also))
    starting = _in_phase("engine-0.log")
    rows += [
        Fault(
            "kill -9 of trainer rank 1", "starting", _send("trainer-1", KILL, starting), _PARTS["trainer-1"][1], DEAD_S
        ),
        Fault(
            "SIGSTOP of trainer rank 1", "starting", _send("trainer-1", STOP, starting), _PARTS["trainer-1"][1], HUNG_S
        ),
        Fault(
            "SIGSTOP of engine, HTTP server",
            "starting",
            _send("engine-0", STOP, starting),
            _PARTS["engine-0"][1],
            HUNG_S,
        ),
    ]
    return rows


def _components() -> list[Fault]:
    """Components that raise, or do not return."""
    where = r"components\.py:\d+"
    kinds = {
        "reward": ((), "reward"),
        "generator": (("--custom-generate-function-path", "BENCH/components.py:custom_generate"), "generator"),
        "filter": (("--dynamic-sampling-filter-path", "BENCH/components.py:dynamic_sampling_filter"), "filter"),
        "source": (("--data-source-path", "BENCH/components.py:Source"), "data source"),
        "estimator": (("--advantage-estimator", "faulty"), "estimator"),
    }
    rows = []
    for component, (flags, title) in kinds.items():
        for fault in ("raise", "sleep", "spin"):
            if component == "reward" and fault == "spin":
                continue  # its worker is killed as one that sleeps is
            limited = component == "reward" and fault == "sleep"
            at = "estimator on rank 1" if component == "estimator" else title
            file = r"slime_faults_impl\.py:\d+" if component == "estimator" else where
            rows.append(
                Fault(
                    f"{at} {'raises' if fault == 'raise' else f'does not return ({fault}s)'}",
                    "steps",
                    _component,
                    "no score" if limited else file,
                    DEAD_S if fault == "raise" else HUNG_S,
                    (*flags, *(("--reward.timeout-s", "10") if limited else ())),
                    {"FAULT": fault, "FAULT_IN": component},
                    core=(component, fault) == ("estimator", "spin"),
                    # A call that is ended for its time has no traceback in a log.
                    also=() if limited else (rf"logs/{'trainer-1' if component == 'estimator' else 'rollout'}\.log",),
                )
            )
    return rows


def _at_start(_: Target) -> None:
    """The fault is there when the run starts."""


def _others() -> list[Fault]:
    save = ("--save", "/mnt/saved", "--save-interval", "1")
    return [
        Fault("Ctrl-C", "steps", _interrupt(1), "interrupted", ANSWER_S, exit_codes=(130,)),
        Fault(
            "Ctrl-C three times", "steps", _interrupt(3), "ended at once", ANSWER_S, exit_codes=(130,), continues=False
        ),
        Fault(
            "nothing at --ray-address",
            "starting",
            _says("starting Ray"),
            "--ray-address",
            REACH_S,
            ("--ray-address", "127.0.0.1:1"),
        ),
        Fault(
            "no answer at --ray-address",
            "starting",
            _says("starting Ray"),
            "--ray-address",
            REACH_S,
            prepare=_silent_cluster,
        ),
        Fault(
            "Ray's memory monitor kills a worker",
            "starting",
            _says("starting [^R]"),
            r"memory",
            HUNG_S,
            environment={"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"},
        ),
        Fault("full disk", "saving", _first_save, r"bytes are free", DEAD_S, save, prefix=_small_disk("3m")),
        Fault(
            "damaged newest checkpoint",
            "loading",
            _at_start,
            r"newest intact checkpoint is .*rollout_000001",
            HUNG_S,
            exit_codes=(2,),
            continues=False,
            prepare=_damage_newest,
        ),
    ]


FAULTS = [*_signals(), *_components(), *_others()]
