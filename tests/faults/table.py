"""The faults, each with the moment at which it is injected, and what must be said about it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.target import Bench, Target

#: seconds that a dead, and a hung part may stay unnoticed
DEAD_S, HUNG_S = 5.0, 30.0
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


def _interrupt(times: int) -> Callable[[Target], None]:
    def inject(target: Target) -> None:
        target.wait_for_step()
        for number in range(times):
            if number:
                time.sleep(0.3)
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


def _small_disk(size: str) -> Sequence[str]:
    """A command that runs another with a small file system of its own under /mnt."""
    return "unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={size} none /mnt && exec "$@"', "sh"


_PARTS = {
    "trainer-0": ("trainer rank 0", r"trainer rank 0 \(pid \d+"),
    "trainer-1": ("trainer rank 1", r"trainer rank 1 \(pid \d+"),
    "engine-0": ("engine, HTTP server", r"engine 0"),
    "scheduler": ("engine, scheduler", r"engine 0"),
    "detokenizer": ("engine, detokenizer", r"engine 0"),
    "router": ("router", r"the router (at|\(pid)"),
    "rollout": ("rollout process", r"rollout process"),
    "raylet": ("Ray's raylet", r"raylet"),
    "gcs_server": ("Ray's GCS", r"gcs_server|GCS"),
}
_CORE = {("trainer-1", KILL), ("trainer-0", STOP), ("scheduler", STOP)}


def _signals() -> list[Fault]:
    rows = []
    for role, (title, says) in _PARTS.items():
        for signum in (KILL, STOP):
            name = f"{'kill -9' if signum == KILL else 'SIGSTOP'} of {title}"
            within_s = DEAD_S if signum == KILL else HUNG_S
            core = (role, signum) in _CORE
            rows.append(Fault(name, "steps", _send(role, signum), says, within_s, core=core))
    starting = _in_phase("engine-0.log")
    rows += [
        Fault(
            "kill -9 of trainer rank 1", "starting", _send("trainer-1", KILL, starting), _PARTS["trainer-1"][1], DEAD_S
        ),
        Fault(
            "SIGSTOP of trainer rank 1", "starting", _send("trainer-1", STOP, starting), _PARTS["trainer-1"][1], HUNG_S
        ),
        Fault("SIGSTOP of engine, HTTP server", "starting", _send("engine-0", STOP, starting), "engine 0", HUNG_S),
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
                    core=(component, fault) in {("estimator", "spin"), ("generator", "sleep")},
                )
            )
    return rows


def _at_start(_: Target) -> None:
    """The fault is there when the run starts."""


def _others() -> list[Fault]:
    save = ("--save", "/mnt/saved", "--save-interval", "1")
    return [
        Fault("Ctrl-C", "steps", _interrupt(1), "interrupt", DEAD_S, exit_codes=(130,)),
        Fault("Ctrl-C three times", "steps", _interrupt(3), "interrupt", DEAD_S, exit_codes=(130, -2)),
        Fault(
            "no Ray at --ray-address", "starting", _at_start, "--ray-address", 15.0, ("--ray-address", "127.0.0.1:1")
        ),
        Fault(
            "Ray's memory monitor kills a worker",
            "starting",
            _at_start,
            r"memory",
            30.0,
            environment={"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"},
        ),
        Fault("full disk", "saving", _at_start, r"free|No space left", 60.0, save, prefix=_small_disk("3m")),
        Fault("damaged newest checkpoint", "loading", _at_start, "saved", 60.0, prepare=_damage_newest),
    ]


FAULTS = [*_signals(), *_components(), *_others()]
