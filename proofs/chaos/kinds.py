"""The kinds of faults, and how each is injected into a run and seen in what it says."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proofs.chaos.bench import ChaosRun

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ENGINES = 2
#: seconds that a fault may take until the run is as far as it would have been
PATIENCE_S = 420.0
#: seconds by which the wall clock jumps
JUMPS = (3600.0, -3600.0, 86400.0 * 400, 0.0)
#: requests to the control plane of an engine, in each weight sync
SYNC = "^/(pause_generation|begin_weight_update|update_weights|end_weight_update|flush_cache|continue_generation)"

#: the terminal's lines about a part, and about the whole run
_TROUBLE = re.compile(r"^(restarting |ending the run: |slime: error: )", re.MULTILINE)
_OUT = re.compile(r"restarting (engine \d+|the router)")
_BACK = re.compile(r"(engine \d+|the router) is back after ")
_REPEATED = re.compile(r" is back after [\d.]+ s, (\d+) requests? repeated")
_AGAIN = re.compile(r"^restart \d+ of \d+, .*", re.MULTILINE)
_FROM = re.compile(r"from (?:\S*rollout_(\d+)|where)")


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    #: what it makes the run do: restart a "part", start the "run" again, send requests "again", or "nothing"
    cures: str
    #: how many of 100 faults are of this kind
    share: float
    inject: Callable[[ChaosRun, random.Random], None]
    #: it is injected when the rollout begins, and not at a random moment of a step
    early: bool = False
    #: the log in which it is noticed, and what is said there, if the terminal says nothing
    notice: tuple[str, str] | None = None


@dataclass
class Injected:
    """What became of one fault."""

    kind: Kind
    step: int
    #: seconds until it was noticed; None: nothing was said
    found_s: float | None = None
    #: seconds until the run was as far as it would have been
    back_s: float = 0.0
    steps_repeated: int = 0
    requests_repeated: int = 0
    samples_failed: int = 0
    #: a restart of the whole run where that of a part is promised
    escalated: bool = False


def _signal(signum: int, *roles: str) -> Callable[[ChaosRun, random.Random], None]:
    def inject(run: ChaosRun, rng: random.Random) -> None:
        os.kill(run.pid(rng.choice(roles)), signum)

    return inject


def _both_engines(run: ChaosRun, rng: random.Random) -> None:
    del rng
    for pid in [run.pid(f"scheduler-{number}") for number in range(ENGINES)]:
        os.kill(pid, KILL)


def _spoil(kind: str, path: str = "^/generate", count: int = 1) -> Callable[[ChaosRun, random.Random], None]:
    def inject(run: ChaosRun, rng: random.Random) -> None:
        run.spoil(rng.randrange(ENGINES), path, kind, count)

    return inject


def _jump(run: ChaosRun, rng: random.Random) -> None:
    run.move_clock(rng.choice(JUMPS))


def _fill(run: ChaosRun, rng: random.Random) -> None:
    del rng
    assert run.place is not None
    disk = run.place.path("/mnt")
    free = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - 2**20)


def _parts(what: str) -> list[str]:
    return [f"{what}-{number}" for number in range(ENGINES)]


SENT_AGAIN = ("rollout.log", "a request is sent again")
WORKER = ("rollout.log", r"worker \d+ .*; log: |was stopped \(SIGSTOP\) and is replaced")
KINDS = (
    Kind("kill -9 of an engine's HTTP server", "part", 6, _signal(KILL, *_parts("engine"))),
    Kind("kill -9 of an engine's scheduler", "part", 6, _signal(KILL, *_parts("scheduler"))),
    Kind("kill -9 of an engine's detokenizer", "part", 4, _signal(KILL, *_parts("detokenizer"))),
    Kind("kill -9 of both engines' schedulers", "part", 2, _both_engines),
    Kind("SIGSTOP of an engine's HTTP server", "part", 3, _signal(STOP, *_parts("engine"))),
    Kind("SIGSTOP of an engine's scheduler", "part", 3, _signal(STOP, *_parts("scheduler"))),
    Kind("SIGSTOP of an engine's detokenizer", "part", 2, _signal(STOP, *_parts("detokenizer"))),
    Kind("an engine's answers are garbage", "part", 3, _spoil("garbage", count=10**6), early=True),
    Kind("socket closed amid a weight sync", "part", 3, _spoil("close", SYNC), early=True),
    Kind("truncated answer amid a weight sync", "part", 3, _spoil("truncate", SYNC), early=True),
    Kind("kill -9 of the router", "part", 6, _signal(KILL, "router")),
    Kind("SIGSTOP of the router", "part", 2, _signal(STOP, "router")),
    Kind("socket closed instead of an answer", "again", 8, _spoil("close", count=2), True, SENT_AGAIN),
    Kind("truncated answer", "again", 8, _spoil("truncate", count=2), True, SENT_AGAIN),
    Kind("garbage answer", "again", 6, _spoil("garbage"), True, SENT_AGAIN),
    Kind("answer delayed by 3 s", "nothing", 4, _spoil("delay"), early=True),
    Kind("wall clock jumps", "nothing", 5, _jump, early=True),
    Kind("kill -9 of a reward worker", "nothing", 4, _signal(KILL, "reward"), False, WORKER),
    Kind("SIGSTOP of a reward worker", "nothing", 2, _signal(STOP, "reward"), False, WORKER),
    Kind("kill -9 of a trainer rank", "run", 5, _signal(KILL, "trainer-0")),
    Kind("SIGSTOP of a trainer rank", "run", 2, _signal(STOP, "trainer-0")),
    Kind("kill -9 of the rollout process", "run", 5, _signal(KILL, "rollout")),
    Kind("SIGSTOP of the rollout process", "run", 2, _signal(STOP, "rollout")),
    Kind("kill -9 of Ray's raylet", "run", 2, _signal(KILL, "raylet")),
    Kind("kill -9 of Ray's GCS", "run", 2, _signal(KILL, "gcs_server")),
    Kind("disk of the checkpoints is full", "disk", 2, _fill, early=True),
)


def strike(run: ChaosRun, kind: Kind, rng: random.Random, *, step_s: float, save_interval: int) -> Injected:
    """Inject one fault, at a moment of the next step that chance chooses, and wait until the run has recovered.

    When it is called, the run waits for the schedule to let the next rollout begin, and so it does in the end.

    Args:
        run: The run.
        kind: The fault.
        rng: Chooses the moment and the victim.
        step_s: About how long a step takes.
        save_interval: A full disk is noticed when a checkpoint is saved.
    """
    fault = Injected(kind, run.allowed)
    seen = _Seen(run, kind)
    due = run.allowed + 1 if kind.cures != "disk" else (run.allowed // save_interval + 1) * save_interval
    if kind.early:
        kind.inject(run, rng)
    run.allow(due)
    if not kind.early:
        time.sleep(rng.uniform(0.0, 1.2 * step_s))
        kind.inject(run, rng)
    began = time.monotonic()
    while not seen.recovered(fault):
        now = time.monotonic()
        if kind.early and seen.spoiled is not None:
            began = seen.spoiled  # it begins with the first spoiled answer
        if fault.found_s is None and seen.noticed():
            fault.found_s = max(0.0, now - began)
        if run.target.process.poll() is not None:
            assert kind.cures == "disk" and "the disk is full" in seen.text, f"{kind.name}: ended:\n{seen.text}"
            assert run.place is not None
            run.place.path("/mnt/ballast").unlink()
            seen.resume()
        if now > began + PATIENCE_S:
            raise RuntimeError(f"{kind.name}: no recovery in {PATIENCE_S:.0f} s:\n{seen.text}")
        time.sleep(0.05)
    run.spoil_no_more()
    fault.back_s = time.monotonic() - began
    fault.steps_repeated, fault.escalated = seen.repeated, seen.restarts > 0 and kind.cures not in ("run", "disk")
    fault.requests_repeated = seen.requests_repeated
    done = (row for row in run.rows() if row["step"] == fault.step and "time/step" in row)
    fault.samples_failed = sum(int(row["rollout/failed"]) for row in done)
    return fault


class _Seen:
    """What a run has said and done since a fault."""

    def __init__(self, run: ChaosRun, kind: Kind) -> None:
        self._run, self._kind = run, kind
        self._said = len(run.text())
        self._noted = 0 if kind.notice is None else len(run.text(kind.notice[0]))
        self._spoiled = len(run.spoiled())
        #: of the last start of the whole run: the metrics before it, how many of them it keeps, and its first step
        self._before: list[dict[str, Any]] = []
        self._kept, self._first = len(run.rows()), -1
        self._started_at = 0
        self.restarts = self.repeated = 0
        self._resumed = False

    @property
    def text(self) -> str:
        """What the terminal has shown."""
        return self._run.text()[self._said :]

    @property
    def spoiled(self) -> float | None:
        """When the first answer was spoiled."""
        return next(iter(self._run.spoiled()[self._spoiled :]), None)

    @property
    def requests_repeated(self) -> int:
        """How many requests were sent again."""
        if self._kind.notice == SENT_AGAIN:
            log, what = SENT_AGAIN
            return self._run.text(log).count(what, self._noted)
        return sum(int(number) for number in _REPEATED.findall(self.text))

    def noticed(self) -> bool:
        """Whether it was said that something is wrong."""
        if _TROUBLE.search(self.text):
            return True
        if self._kind.notice is None:
            return False
        log, what = self._kind.notice
        return re.search(what, self._run.text(log)[self._noted :]) is not None

    def resume(self) -> None:
        """Continue a run that has ended."""
        self._again(len(self.text))
        self._resumed = True
        self.restarts = len(_AGAIN.findall(self.text))  # told again when it ended
        self._run.resume()

    def _again(self, at: int) -> None:
        self._before, self._first, self._started_at = self._run.rows(), -1, at

    def _steps(self) -> list[int]:
        """The steps done since the fault, or since the last start of the whole run."""
        rows = self._run.rows()
        if len(self._before) > self._kept and rows[: len(self._before)] == self._before:
            return []  # the run has not set them aside yet
        return [row["step"] for row in rows[self._kept :] if "time/step" in row]

    def recovered(self, fault: Injected) -> bool:
        """Whether every part is in service, and every step done that was to be done."""
        text, run = self.text, self._run
        starts = list(_AGAIN.finditer(text))
        if len(starts) > self.restarts:
            self.restarts = len(starts)
            self._again(starts[-1].start())
        out: set[str] = set()
        for line in text[self._started_at :].splitlines():
            if found := _OUT.match(line):
                out.add(found[1])
            elif found := _BACK.match(line):
                out.discard(found[1])
        if self._started_at and self._first < 0:
            if "ready after" not in text[self._started_at :]:
                return False
            found = _FROM.search(text, self._started_at)
            self._first = int(found[1] or 0) if found else 0
            # An evaluation after exactly so many rollouts stays.
            self._kept = sum(row["step"] < self._first + ("time/step" not in row) for row in self._before)
            self.repeated += max(row["step"] for row in self._before if "time/step" in row) + 1 - self._first
        to_notice = self._kind.cures != "nothing" or self._kind.notice is not None
        waiting = to_notice and fault.found_s is None
        if self._kind.cures in ("run", "disk") and not self._resumed and not self.restarts:
            return False
        done = self._first == run.allowed or run.allowed - 1 in self._steps()
        spoiling = run.is_spoiling() and self._kind.cures != "part"
        return done and not out and not waiting and not spoiling
