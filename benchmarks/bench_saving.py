"""What `--async-save` costs: steps of one trainer rank with and without a checkpoint being written beside them.

    python benchmarks/bench_saving.py [--shape 50M] [--saves 3] [--every 4] [--threads 2] [--folder DIR]

The rank and its checkpoints are slime's; the steps are those of bench_training.py. A checkpoint is begun every
`--every` steps, as `--save-interval` does. It costs a pause, in which the state is copied, and slows down the steps
during which it is written, hashed and flushed. The cost is the time of both, in percent of the steps of one interval
and of one step. It is that of the rank; the rollout process writes its few kilobytes beside it. The last step counts as
a whole, though the checkpoint may be complete before its end. Flushing costs nothing on a tmpfs: `--folder` should be
on a disk. CPU seconds are those of the whole process, and mean something on a busy machine too.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Took:
    """Seconds of something, and CPU seconds of the process meanwhile."""

    wall: float
    cpu: float


def timed(call: Any) -> Took:
    """What a call takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def measure(rank: Any, batch: Any, folder: Path, saves: int, every: int) -> dict[str, list[Took]]:
    """What steps, pauses and blocking saves take."""
    from slime.run.checkpoint.files import record_files
    from slime.train.checkpoint_io import BackgroundWrite

    def record(part: Path) -> None:
        record_files(folder, [path for path in part.rglob("*") if path.is_file()])

    def begin(part: Path, write: Any) -> None:
        part.mkdir()
        rank.save(part, write)
        write.start(partial(record, part))

    def save(part: Path) -> None:
        part.mkdir()
        rank.save(part)
        record(part)

    step = partial(rank.train, batch)
    timed(step)  # warm-up
    found: dict[str, list[Took]] = {"step": [], "step while writing": [], "pause": [], "save without --async-save": []}
    for number in range(saves):
        found["step"] += [timed(step) for _ in range(every)]
        write: Any = BackgroundWrite()
        begun = timed(partial(begin, folder / f"background-{number}", write))
        while not write.written:
            found["step while writing"].append(timed(step))
        ended = timed(write.finish)
        found["pause"].append(Took(begun.wall + ended.wall, begun.cpu + ended.cpu))
        found["save without --async-save"].append(timed(partial(save, folder / f"foreground-{number}")))
    return found


def main() -> None:
    """Print the tables."""
    from bench_training import LR, RESPONSE, SHAPES, TOGETHER, make_model, samples
    from tests.train.harness import RankLauncher, make_config

    from slime.engine.ports import LOOPBACK, free_port

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="50M")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: the folder for temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-saving-", dir=options.folder) as name:
        folder = Path(name)
        make_model(folder / "model", options.shape)
        config = make_config(
            folder / "model",
            loss_type="sft_loss",
            calculate_per_token_loss=True,
            threads_per_rank=options.threads,
            micro_batch_size=TOGETHER,
            megatron={"lr": LR},
        )
        rank = RankLauncher(0, 1, free_port(LOOPBACK)).start(config)
        gc.freeze()  # as every long-lived process of a run does
        found = measure(rank, samples(RESPONSE), folder, options.saves, options.every)
        size = sum(path.stat().st_size for path in (folder / "background-0").rglob("*") if path.is_file())
        rank.close()
    print(
        f"checkpoints of {size / 2**20:.0f} MiB, {options.threads} threads\n\n| | wall s | CPU s |\n| --- | --- | --- |"
    )
    for what, took in found.items():
        print(f"| {what} | {median(took, 'wall'):.2f} | {median(took, 'cpu'):.2f} |")
    per_save = len(found["step while writing"]) / options.saves
    for unit in ("wall", "cpu"):
        step = median(found["step"], unit)
        slower = per_save * (median(found["step while writing"], unit) - step)
        cost = median(found["pause"], unit) + slower
        print(
            f"\n{unit}: a checkpoint costs {cost:.2f} s: {100 * cost / step:.1f} % of the step at which it is begun,"
            f" {100 * cost / (options.every * step):.1f} % of {options.every} steps; it is written during"
            f" {per_save:.1f} steps",
            end="",
        )
    print()


def median(took: list[Took], unit: str) -> float:
    """The median of wall or CPU seconds; 0 if a checkpoint was written before a step could run beside it."""
    return statistics.median(getattr(one, unit) for one in took) if took else 0.0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
