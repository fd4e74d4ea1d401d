"""`make nightly`: the tests and proofs that take too long for every push, one part after the other.

    python -m proofs.nightly [PART ...] [--list]

When a part passes, `proofs/last_passed.toml` gets its date, commit and duration; a part that fails keeps the row of the
last time it passed. `--list` prints that file with the parts that have never passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

from slime_planner.devices import find_packages

ROOT = Path(__file__).parents[1]
LAST_PASSED = Path(__file__).with_name("last_passed.toml")


@dataclass(frozen=True)
class Part:
    """One part of the nightly run."""

    #: arguments of Python
    arguments: tuple[str, ...]
    minutes_at_most: int
    summary: str
    #: whether it says something only with the packages of requirements/gpu.txt
    for_gpu_packages: bool = False


PYTEST = ("-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "nightly")
PARTS = {
    "tests": Part(PYTEST, 120, "examples, tutorials, installs, fuzzing, browsers"),
    "faults": Part(("-m", "proofs.faults", "--loaded"), 120, "each part of a run is killed, stopped or broken once"),
    "chaos": Part(("-m", "proofs.chaos"), 90, "a hundred faults in one run"),
    "kill-points": Part(("-m", "proofs.kill_points"), 90, "runs killed at 20 random moments and continued"),
    "soak": Part(("-m", "proofs.soak"), 90, "thousands of steps in which nothing grows"),
    "mutants": Part(("-m", "proofs.mutants"), 240, "single-line changes that no test notices"),
    "gpu-set": Part(
        ("-m", "proofs.gpu_set"), 20, "modules and engines' command lines with the packages for GPUs", True
    ),
    "no-gpu": Part(("-m", "proofs.no_gpu"), 60, "training steps and turns on a stand-in for a GPU", True),
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m proofs.nightly", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--list", action="store_true", help="print when each part last passed")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; expected some of {', '.join(PARTS)}")
    if options.list:
        print_last_passed()
        return 0
    failed = [name for name in options.parts or PARTS if not run(name, PARTS[name])]
    print_last_passed()
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run(name: str, part: Part) -> bool:
    """Run one part and record it if it passes. One that cannot run here says so, and is not recorded."""
    if part.for_gpu_packages and not find_packages().cuda:
        print(f"=== {name}: skipped, the packages for GPUs are not installed: make install DEVICE=cuda", flush=True)
        return True
    print(f"=== {name}: {part.summary} (at most {part.minutes_at_most} minutes)", flush=True)
    began = time.monotonic()
    try:
        command = [sys.executable, *part.arguments]
        done = subprocess.run(command, cwd=ROOT, timeout=60 * part.minutes_at_most, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name} had not finished after {part.minutes_at_most} minutes", flush=True)
        return False
    if done.returncode == 0:
        minutes = round((time.monotonic() - began) / 60, 1)
        rows = last_passed() | {name: {"date": date.today(), "commit": commit(), "minutes": minutes}}
        LAST_PASSED.write_text(tomli_w.dumps(rows), encoding="utf-8")
    return done.returncode == 0


def last_passed() -> dict[str, dict[str, Any]]:
    """Part -> its date, commit and minutes when it last passed."""
    return tomllib.loads(LAST_PASSED.read_text(encoding="utf-8")) if LAST_PASSED.exists() else {}


def print_last_passed() -> None:
    """Print a line for each part."""
    rows = last_passed()
    for name in PARTS:
        row = rows.get(name)
        when = "has not passed yet" if row is None else "{date}, {commit}, {minutes} minutes".format(**row)
        print(f"{name:12} {when}")


def commit() -> str:
    """The commit that is checked out; with `+` if files differ from it, other than the record itself."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    record = LAST_PASSED.relative_to(ROOT)
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{record}")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
