"""Start-up time of the commands that should respond immediately.

    python benchmarks/bench_cli.py [--repeat 10] [--plugins 50]

The table shows the wall seconds of each process from start to exit, their budget, the CPU seconds (more reliable on a
busy machine), and which heavy libraries the process imported. The last rows are measured with `--plugins` additional
plugins, each a separate package as `slime plugins new` writes it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from slime.registry.kinds import KINDS
from slime.testing.scaffold import Names, package_files

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers")

#: command -> seconds allowed; None: no limit
COMMANDS: dict[str, float | None] = {
    "--version": 0.3,
    "--help": 0.3,
    "plugins": 0.5,
    "train --help": None,
    "train --help-megatron": None,
    "train --help-sglang": None,
    "plan qwen3-4B --nodes 1 --gpus 8xH100-80GB": 1.0,
    "plan deepseek-v3 --nodes 16 --gpus 8xH200": 1.0,
    "plan glm4.5-355B-A32B --nodes 64 --gpus 8xH100-80GB": 1.0,
    "plan kimi-k2 --nodes 64 --gpus 8xH100-80GB": 1.0,
}
#: the same, with many plugins installed
WITH_PLUGINS: dict[str, float | None] = {"plugins": 0.5, "plugins --no-load": None, "plugins --json": 0.5}
_COMMAND = "import sys; from slime.cli.main import main; sys.exit(main(sys.argv[1:]))"
_IMPORTED = (
    f"import sys; from slime.cli.main import main; main(sys.argv[1:]); print('|', *(set({HEAVY}) & set(sys.modules)))"
)


@dataclass(frozen=True)
class Timing:
    """The times of one command."""

    least: float
    median: float
    most: float
    #: median of user and system seconds
    cpu: float
    heavy: str


def install_plugins(site: Path, count: int) -> None:
    """Write `count` packages with one plugin each to disk, as pip would."""
    for number in range(count):
        names = Names.of(list(KINDS)[number % len(KINDS)], f"bench{number}")
        for path, text in package_files(names).items():
            if path.startswith(names.module):
                (site / path).parent.mkdir(exist_ok=True)
                (site / path).write_text(text)
        info = site / f"{names.distribution.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {names.distribution}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[slime]\n{names.plugin} = {names.module}\n")


def measure(words: list[str], repeat: int, site: Path | None = None) -> Timing:
    """Run a command `repeat` times."""
    environment = {**os.environ, "PYTHONPATH": str(site)} if site else None
    seconds, cpu = [], []
    for _ in range(repeat):
        started, used = time.perf_counter(), _cpu_of_children()
        command = [sys.executable, "-c", _COMMAND, *words]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=60, env=environment)
        seconds.append(time.perf_counter() - started)
        cpu.append(_cpu_of_children() - used)
    reported = subprocess.run(
        [sys.executable, "-c", _IMPORTED, *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    heavy = reported.stdout.splitlines()[-1].rpartition("|")[2].strip()
    return Timing(min(seconds), statistics.median(seconds), max(seconds), statistics.median(cpu), heavy or "none")


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(words: str, budget: float | None, timing: Timing) -> bool:
    """Print a row; returns whether the command is over its budget or imported something heavy."""
    over = budget is not None and timing.median > budget
    limit = "-" if budget is None else f"{budget:.2f}"
    wall = f"{timing.least:>8.3f}{timing.median:>8.3f}{timing.most:>8.3f}{limit:>8}"
    print(f"slime {words:<53}{wall}{timing.cpu:>8.3f}   {timing.heavy}{'   OVER BUDGET' if over else ''}")
    return over or timing.heavy != "none"


def main() -> int:
    """Print the table; returns 1 if a median is over its budget or something heavy was imported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10, help="runs of each command")
    parser.add_argument("--plugins", type=int, default=50, help="number of additional plugins in the last rows")
    stated = parser.parse_args()
    print(f"{'command':<59}{'min':>8}{'median':>8}{'max':>8}{'budget':>8}{'cpu':>8}   heavy imports")
    failed = [show(words, budget, measure(words.split(), stated.repeat)) for words, budget in COMMANDS.items()]
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        install_plugins(site, stated.plugins)
        for words, budget in WITH_PLUGINS.items():
            timing = measure(words.split(), stated.repeat, site)
            failed.append(show(f"{words}  (+{stated.plugins} plugins)", budget, timing))
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
