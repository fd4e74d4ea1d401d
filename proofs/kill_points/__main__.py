"""`make kill-points`: kills all processes of small real runs at 20 random moments, and compares what comes of them.

    python -m proofs.kill_points [--seed 1] [--jobs 1] [--only PATTERN] [--write]

Each run has `--deterministic`. It is killed with SIGKILL, driver, Ray, ranks, rollout process and engines at once, and
continued with `slime train --resume`; some are killed again while they start. Weights, optimizer, position in the data,
metrics and samples must equal those of an undisturbed run. Writes the table of docs/reproducibility.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proofs.kill_points.points import COMMON, FLAGS, Outcome, Point, endure, fingerprint, points
from proofs.kill_points.target import Target, prepare

PAGE = Path(__file__).parents[2] / "docs" / "reproducibility.md"
BEGIN, END = "<!-- kill points: begin -->", "<!-- kill points: end -->"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m proofs.kill_points", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--only", default="", help="points whose `flags: phase` matches this regular expression")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/reproducibility.md")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write writes the table of all points: drop --only")
    chosen = [one for one in points() if re.search(options.only, f"{one.number} {one.flags}: {one.phase}")]
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    prepare(folder)
    print(f"runs in {folder}", flush=True)
    whole = {}
    for mode in {one.mode for one in chosen}:
        target = Target(folder / f"whole{mode}", (*COMMON, *FLAGS[mode]))
        target.start()
        target.wait()
        whole[mode] = fingerprint(target)
        print(f"undisturbed {mode or 'synchronous'} run: {len(whole[mode])} values", flush=True)

    def tried(point: Point) -> Outcome:
        began = time.monotonic()
        outcome = endure(point, folder / str(point.number), options.seed, whole[point.mode])
        verdict = "equal" if not outcome.different else f"DIFFERENT: {'; '.join(outcome.different[:5])}"
        row = f"{point.number} {point.flags}: {point.phase}: killed during {', then '.join(outcome.kills)}"
        print(f"{row}; repeated {outcome.repeated}; {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
        return outcome

    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(tried, chosen))
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), outcomes), encoding="utf-8")
    failed = any(outcome.different for outcome in outcomes)
    if not failed:
        shutil.rmtree(folder)
    return int(failed)


def with_table(page: str, outcomes: Sequence[Outcome]) -> str:
    """The page with a table of these outcomes between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| run | killed during | rollouts repeated | equal |", "| --- | --- | --- | --- |"]
    for outcome in outcomes:
        killed, repeated = ", then ".join(outcome.kills), ", ".join(map(str, outcome.repeated))
        equal = "yes" if not outcome.different else "no"
        lines.append(f"| {outcome.point.flags} | {killed} | {repeated} | {equal} |")
    return before + BEGIN + "\n" + "".join(f"{line}\n" for line in lines) + END + after


if __name__ == "__main__":
    sys.exit(main())
