"""The processes of a run on one machine: which of them have ended, are stopped, or hang.

What counts as hung must not hit a process that is merely slow: one that computes for minutes in native code, compiles,
loads a model, or waits for its turn on a busy machine. So:

- A process that is stopped (SIGSTOP) does nothing by definition. One that a debugger holds is left to its user.
- A Python process whose pulse stays away hangs if it has computed meanwhile, in code that keeps all other threads from
  running, or if all its threads sleep. Native code that lets other threads run does not stop the pulse.
- A component that blocks the event loop, or an estimator that does not return, is reported by its own process.
- An engine whose HTTP server does not answer hangs by the same rule as a pulse. If only its scheduler does not answer,
  it hangs if neither it nor a process that it has started (a compiler) computes.

Suspicion is counted in small steps between looks. If this process itself was stopped or busy, or the machine slept, the
gap counts as one step.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from slime.kit.processes import living_members
from slime.kit.processes.pulse import idle_too_long, read_pulse
from slime.observe.log import log_excerpt
from slime.run.supervise.losses import PartKind
from slime.run.supervise.traces import cause_of_death, memory_now, stack_of

#: seconds that a process may be stopped. A person may stop one for a moment.
STOPPED_S = 10.0
#: a scheduler that uses more of a processor than this computes; an idle or stuck one uses less
_BUSY_SHARE = 0.05
#: the longest gap between two looks that counts in full
_GAP_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class WatchedProcess:
    """One process of the run."""

    #: for messages: "trainer rank 1"
    name: str
    kind: PartKind
    pid: int
    log: Path | None = None
    #: the descriptor of its pulse's page, if it has one
    pulse: int | None = None
    #: a supervisor reports its end, with its exit status
    supervised: bool = False
    #: of the processes of an engine: their process group, which is the id of the HTTP server
    group: int | None = None

    @property
    def owner(self) -> str:
        """`engine 1` of `engine 1's scheduler`; the name of a part that is one process."""
        return self.name.partition("'s ")[0] if self.kind == "engine" else self.name


@dataclass(frozen=True)
class Trouble:
    """A process that has ended or hangs."""

    part: WatchedProcess
    kind: Literal["ended", "stopped", "hung"]
    #: what is the matter: "has ended"
    what: str
    #: the whole message, if it was written on another machine
    written: str | None = None

    def describe(self) -> str:
        """The whole message: the process, what is the matter, its stack if it hangs, and its last log lines."""
        if self.written is not None:
            return self.written
        part = self.part
        lines = [f"{part.name} (pid {part.pid} on {os.uname().nodename}) {self.what}."]
        if self.kind == "hung":
            lines.append("If that may take so long, raise --hang-timeout-s.")
            if stack := stack_of(part.pid, part.log):
                lines.append(f"Where it is (all threads: {part.log}):\n{stack}")
        if self.kind == "ended":
            lines.append(memory_now())
        lines.append(log_excerpt(part.log))
        return "\n".join(lines).rstrip()


@dataclass
class _Record:
    """What has been seen of one process so far."""

    part: WatchedProcess
    #: None: it had ended before it was looked at
    process: psutil.Process | None
    stopped_s: float = 0.0
    #: per sign of life (field of the pulse): its latest value, seconds since, and the processor time at that moment
    signs: dict[str, tuple[Any, float, float]] = field(default_factory=dict)
    #: of a scheduler: how long it had been silent at half the limit, and the processor time of its children then
    half: tuple[float, float] | None = None


class HostWatch:
    """Looks at the processes of one machine."""

    def __init__(self, hang_s: float) -> None:
        """`hang_s`: seconds without a sign of life after which a process counts as hung."""
        self._hang_s = hang_s
        self._records: dict[int, _Record] = {}
        #: process groups of engines that are ready, so that no more processes are to be found
        self._complete: set[int] = set()
        self._looked_at = time.monotonic()

    def add(self, part: WatchedProcess) -> None:
        """Watch one more process. If it has ended already, the next `look` says so."""
        if part.pid in self._records:
            return
        try:
            self._records[part.pid] = _Record(part, psutil.Process(part.pid))
        except psutil.NoSuchProcess:
            self._records[part.pid] = _Record(part, None)

    def kill(self, owner: str) -> None:
        """SIGKILL what is left of an engine or the router, and watch it no longer: it is started again."""
        for pid, record in [one for one in self._records.items() if one[1].part.owner == owner]:
            if record.process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    record.process.kill()
            self._complete.discard(pid)
            del self._records[pid]

    def stacks(self) -> list[tuple[WatchedProcess, str]]:
        """The stacks of the processes that have a handler for the signal: see `stack_of`."""
        by_log: dict[Path | None, list[WatchedProcess]] = {}
        for record in self._records.values():
            by_log.setdefault(record.part.log, []).append(record.part)

        def ask(parts: list[WatchedProcess]) -> list[tuple[WatchedProcess, str]]:
            return [(part, stack) for part in parts if (stack := stack_of(part.pid, part.log))]

        if not by_log:
            return []
        # Each takes a second. Those that write to the same log, as the processes of an engine do, must take turns.
        with ThreadPoolExecutor(len(by_log)) as pool:
            return [one for found in pool.map(ask, by_log.values()) for one in found]

    def look(self, *, syncing: bool = False, at_once: bool = False) -> list[Trouble]:
        """What is wrong now.

        Args:
            syncing: Weights are being sent. Meanwhile a scheduler waits for the trainer, and answers nobody.
            at_once: Report a stopped process at once, because something has failed already.
        """
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, _GAP_S), now
        troubles = []
        for record in list(self._records.values()):
            if (trouble := self._look_at(record, passed_s, syncing, at_once)) is not None:
                troubles.append(trouble)
        return troubles

    def _look_at(self, record: _Record, passed_s: float, syncing: bool, at_once: bool) -> Trouble | None:
        part = record.part
        state, computed_s = _state_of(record.process)
        if state in "ZX":
            if part.supervised or self._ended_with_server(part):
                return None
            return Trouble(part, "ended", f"has ended: {cause_of_death(part.log)}")
        if state == "t":
            return None  # a debugger holds it
        if state == "T":
            record.stopped_s += passed_s
            if at_once or record.stopped_s >= min(STOPPED_S, self._hang_s):
                return Trouble(part, "stopped", "is stopped (SIGSTOP; SIGCONT would continue it)")
            return None
        record.stopped_s = 0.0
        said = None if part.pulse is None else read_pulse(part.pid, part.pulse)
        if said is None:
            return None
        if (engine := said.get("engine")) is not None:
            self._add_engine(engine, ready="server_at" in said)
        if (stalled := said.get("stalled")) is not None:
            return Trouble(part, "hung", f"hangs: {stalled}")
        if self._silent(record, "beat", said["beat"], passed_s, computed_s, state):
            what = f"hangs: none of its Python code has run for {record.signs['beat'][1]:.0f} s"
            return Trouble(part, "hung", what)
        return None if engine is None else self._judge_engine(engine, said, passed_s, syncing)

    def _silent(self, record: _Record, sign: str, value: Any, passed_s: float, computed_s: float, state: str) -> bool:
        """Whether one sign of life has stayed away for too long."""
        known, silent_s, computed_then = record.signs.get(sign, (None, 0.0, 0.0))
        if value != known:
            record.signs[sign] = value, 0.0, computed_s
            return False
        silent_s += passed_s
        record.signs[sign] = value, silent_s, computed_then
        if silent_s >= self._hang_s and state == "S" and record.process is not None:
            state = _state_of_threads(record.process.pid)
        return idle_too_long(silent_s, computed_s - computed_then, state, self._hang_s)

    # --- engines: their processes are the children of one that is watched -------------------------

    def _add_engine(self, engine: dict[str, Any], *, ready: bool) -> None:
        """Watch the processes of an engine: the HTTP server and those that SGLang names."""
        group = engine["group"]
        if group in self._complete:
            return
        roles = {pid: "HTTP server" if pid == group else _sglang_role(pid) for pid in living_members(group)}
        if ready and any(roles[pid] for pid in roles.keys() - {group}):
            self._complete.add(group)  # finding them reads all of /proc, so not at every look
        for pid, role in roles.items():
            if role is not None and pid not in self._records:
                name, log = f"{engine['name']}'s {role}", Path(engine["log"])
                self.add(WatchedProcess(name, "engine", pid, log, supervised=pid == group, group=group))

    def _ended_with_server(self, part: WatchedProcess) -> bool:
        """Whether the HTTP server of this process's engine has ended too, which the engine's supervisor reports."""
        server = None if part.group is None else self._records.get(part.group)
        return server is not None and _state_of(server.process)[0] in "ZX"

    def _judge_engine(
        self, engine: dict[str, Any], said: dict[str, Any], passed_s: float, syncing: bool
    ) -> Trouble | None:
        """Whether the HTTP server or a scheduler has not answered the engine's supervisor for too long."""
        for record in [one for one in self._records.values() if one.part.group == engine["group"]]:
            is_server = record.part.pid == engine["group"]
            sign, question = ("server_at", "/health") if is_server else ("scheduler_at", "/server_info")
            if said.get(sign) is None or (not is_server and (syncing or "scheduler" not in record.part.name)):
                continue
            if (trouble := self._not_answering(record, sign, said[sign], passed_s, question)) is not None:
                return trouble
        return None

    def _not_answering(self, record: _Record, sign: str, at: float, passed_s: float, question: str) -> Trouble | None:
        state, computed_s = _state_of(record.process)
        if state in "TtZX":
            return None
        silent = self._silent(record, sign, at, passed_s, computed_s, state)
        _, silent_s, computed_then = record.signs[sign]
        if sign == "scheduler_at":
            if silent_s < self._hang_s / 2:
                record.half = None
                return None
            half_s, helped_then = record.half = record.half or (silent_s, _computed_by_children(record.process))
            if not silent or silent_s - half_s < self._hang_s / 2:
                return None
            # A long prompt, for example; or a compiler, which can take minutes at the first batch.
            helped_s = _computed_by_children(record.process) - helped_then
            if computed_s - computed_then + helped_s > _BUSY_SHARE * silent_s:
                return None
        if not silent:
            return None
        return Trouble(record.part, "hung", f"hangs: it has not answered {question} for {silent_s:.0f} s")


def _state_of(process: psutil.Process | None) -> tuple[str, float]:
    """The state of its main thread (`T` stopped, `t` held by a debugger, `Z` or `X` ended); its processor time."""
    with contextlib.suppress(psutil.Error, OSError):  # it ends now
        if process is not None and process.is_running():
            words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return words[0], (int(words[11]) + int(words[12])) / _TICKS
    return "X", 0.0


def _state_of_threads(pid: int) -> str:
    """`S` if all threads sleep, else that of one which does not. There may be hundreds, so it is not always asked."""
    states = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                states.add(Path(task, "stat").read_text().rpartition(")")[2].split()[0])
    return next((state for state in ("R", "D") if state in states), "S")


def _computed_by_children(process: psutil.Process | None) -> float:
    """Processor time of all processes that this one has started, of ended ones as well."""
    if process is None:
        return 0.0
    total = 0.0
    with contextlib.suppress(psutil.Error):
        total += sum(process.cpu_times()[2:4])
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += sum(child.cpu_times()[:4])
    return total


def _sglang_role(pid: int) -> str | None:
    """What SGLang calls one of its processes, `scheduler_TP0` for example; None for others.

    A process that one of them starts has its title too, at least until it runs another program, and may end.
    """
    try:
        title = _title(pid)
        inherited = title.startswith("sglang::") and title == _title(psutil.Process(pid).ppid())
    except (psutil.Error, OSError):
        return None
    return title.removeprefix("sglang::").strip() if title.startswith("sglang::") and not inherited else None


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
