"""Start-up time of the commands that must answer at once.

    python benchmarks/bench_cli.py [--repeat 10]

The table shows wall seconds of whole processes, from start to exit, against their budgets, and which of the
heavy libraries each has imported.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers")

#: words -> seconds allowed; None where nothing is promised
COMMANDS: dict[str, float | None] = {
    "--version": 0.3,
    "--help": 0.3,
    "plugins": 0.5,
    "train --help": None,
    "train --help-megatron": None,
    "train --help-sglang": None,
}
_COMMAND = "import sys; from slime.cli.main import main; sys.exit(main(sys.argv[1:]))"
_IMPORTED = (
    f"import sys; from slime.cli.main import main; main(sys.argv[1:]); print('|', *(set({HEAVY}) & set(sys.modules)))"
)


@dataclass(frozen=True)
class Timing:
    """One command's wall seconds."""

    least: float
    median: float
    most: float
    heavy: str


def measure(words: list[str], repeat: int) -> Timing:
    """Run a command `repeat` times."""
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", _COMMAND, *words], stdout=subprocess.DEVNULL, check=True, timeout=60)
        seconds.append(time.perf_counter() - started)
    told = subprocess.run(
        [sys.executable, "-c", _IMPORTED, *words], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    heavy = told.stdout.splitlines()[-1].rpartition("|")[2].strip()
    return Timing(min(seconds), statistics.median(seconds), max(seconds), heavy or "none")


def main() -> int:
    """Print the table; 1 when a median is over its budget or something heavy was imported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10, help="runs of each command")
    repeat = parser.parse_args().repeat
    print(f"{'command':<28}{'min':>8}{'median':>8}{'max':>8}{'budget':>8}   heavy imports")
    failed = False
    for words, budget in COMMANDS.items():
        timing = measure(words.split(), repeat)
        over = budget is not None and timing.median > budget
        failed |= over or timing.heavy != "none"
        limit = "-" if budget is None else f"{budget:.2f}"
        print(
            f"slime {words:<22}{timing.least:>8.3f}{timing.median:>8.3f}{timing.most:>8.3f}{limit:>8}   {timing.heavy}"
            + ("   OVER BUDGET" if over else "")
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
