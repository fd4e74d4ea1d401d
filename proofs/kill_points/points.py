"""Where a run is killed, and what has to be equal afterwards."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from proofs.kill_points.target import (
    DELETING,
    EVALUATE,
    EVALUATION,
    GENERATE,
    ROLLOUTS,
    SAVE,
    START,
    SYNC,
    TRAIN,
    WRITING,
    Target,
)
from slime.observe.metrics import depends_on_time, read_metrics

ANY = "any moment"
#: longest delay between the moment at which something is seen to begin, and the kill
_DELAY_S = {START: 12.0, GENERATE: 0.3, TRAIN: 0.02, SYNC: 0.02, EVALUATION: 0.3, WRITING: 0.5, DELETING: 0.3, ANY: 1.0}
#: how often a run is continued and killed again because the moment had passed
_TRIES = 4
SYNCHRONOUS = ""
ASYNCHRONOUS = "--async"
COMMON = (
    "--deterministic", "--use-tis", "--rollout-shuffle", "--advantage-estimator", "grpo", "--entropy-coef", "0.1",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8", "--lr", "1e-3",
    "--sglang-max-total-tokens", "16384", "--custom-rm-path", str(Path(__file__).with_name("reward.py")),
    "--num-rollout", str(ROLLOUTS), "--save-interval", str(SAVE), "--save-keep-last", "1",
    "--eval-interval", str(EVALUATE), "--skip-eval-before-train",
)  # fmt: skip
FLAGS = {SYNCHRONOUS: (), ASYNCHRONOUS: ("--async", "--async-buffer-size", "2")}


@dataclass(frozen=True)
class Point:
    """One run that is killed."""

    number: int
    mode: str
    #: what it does when it is killed
    phase: str
    #: whether it is killed again while it starts
    twice: bool = False
    async_save: bool = False

    @property
    def flags(self) -> str:
        """How the run differs from others."""
        return " ".join(filter(None, (self.mode, "--async-save" if self.async_save else ""))) or "synchronous"


def points() -> list[Point]:
    """The points of `make kill-points`."""
    of_mode = [
        (START, False, False), (GENERATE, False, False), (TRAIN, True, False), (SYNC, False, False),
        (EVALUATION, False, False), (WRITING, True, False), (WRITING, False, True), (DELETING, False, False),
        (ANY, False, True), (ANY, True, False),
    ]  # fmt: skip
    chosen = [(mode, *one) for mode in (SYNCHRONOUS, ASYNCHRONOUS) for one in of_mode]
    return [
        Point(number, mode, phase, twice, async_save)
        for number, (mode, phase, twice, async_save) in enumerate(chosen, start=1)
    ]


@dataclass
class Outcome:
    """What became of a run that was killed."""

    point: Point
    #: what it did at each kill, and how many rollouts were trained on and had to be repeated
    kills: list[str] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    hit: bool = False
    #: what differs from the undisturbed run
    different: list[str] = field(default_factory=list)


def endure(point: Point, work: Path, seed: int, whole: dict[str, str]) -> Outcome:
    """Kill a run at `point`, continue it to its end, and compare it with the undisturbed run."""
    chance, outcome = random.Random(f"{seed} {point.number}"), Outcome(point)
    target = Target(work, (*COMMON, *FLAGS[point.mode], *(("--async-save",) if point.async_save else ())))
    target.start()
    for _ in range(_TRIES):
        if outcome.hit or not _reached(target, point.phase, chance):
            break
        _kill(target, outcome)
        outcome.hit = point.phase == ANY or point.phase in outcome.kills[-1].split(" + ")
        target.start()
    if outcome.hit and point.twice and _reached(target, START, chance):
        _kill(target, outcome)
        target.start()
    target.wait()
    mine = fingerprint(target)
    outcome.different = sorted(name for name in mine.keys() | whole.keys() if mine.get(name) != whole.get(name))
    if not outcome.hit:
        outcome.different.append(f"never killed during: {point.phase}")
    return outcome


def _kill(target: Target, outcome: Outcome) -> None:
    doing = target.kill()
    outcome.kills.append(" + ".join(doing))
    outcome.repeated.append(max(0, target.steps() - target.saved()))


def _reached(target: Target, phase: str, chance: random.Random) -> bool:
    """Wait until the run is in a phase, and then for a random time; False if it ended before."""
    if phase == START:
        time.sleep(chance.uniform(0.5, _DELAY_S[START]))
        if target.is_ready:
            target.locate()
        return not target.ended
    if not target.wait_until(lambda: target.is_ready):
        return False
    target.locate()
    step = chance.randrange(ROLLOUTS - 2)
    if not target.wait_until(lambda: target.steps() >= step, every_s=0.05):
        return False
    delay_s = chance.uniform(0, _DELAY_S[phase])
    if phase == ANY:
        time.sleep(delay_s)
        return not target.ended
    while target.wait_until(lambda: phase in target.phases()):
        time.sleep(delay_s)
        if phase in target.phases():
            return True
        delay_s /= 2  # on a fast machine it is over: the next one
    return False


def fingerprint(target: Target) -> dict[str, str]:
    """Hashes of all that a run is: weights, optimizer, data position, ledger, samples, metrics, kept checkpoints."""
    found = {}
    last = target.checkpoints / f"rollout_{ROLLOUTS:06d}"
    for path in (
        *sorted(last.rglob("*.distcp")),
        *sorted(last.rglob("common.pt")),
        *sorted((last / "rollout").iterdir()),
    ):
        found[str(path.relative_to(last))] = hashlib.sha256(path.read_bytes()).hexdigest()
    state = json.loads((last / "state.json").read_text(encoding="utf-8"))
    for name in ("rollouts_done", "weight_version", "trained_at"):
        found[f"state.json: {name}"] = str(state[name])
    for path in sorted((target.run_dir / "rollouts").rglob("*")):
        if path.is_file():
            found[str(path.relative_to(target.run_dir))] = hashlib.sha256(_content(path)).hexdigest()
    for name, number in _numbers(target):
        found[name] = number
    found["checkpoints"] = str(sorted(path.name for path in target.checkpoints.iterdir()))
    return found


def _content(path: Path) -> bytes:
    """The bytes of a file; of a Parquet file, those of its columns: zstd does not always pack equal bytes alike."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    table, stream = pq.read_table(path).combine_chunks(), pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as written:
        written.write_table(table)
    return stream.getvalue().to_pybytes()


def _numbers(target: Target) -> Iterator[tuple[str, str]]:
    for row in read_metrics(target.run_dir):
        for name, value in row.items():
            if not depends_on_time(name):
                yield f"metrics.jsonl: step {row['step']}: {name}", repr(value)
