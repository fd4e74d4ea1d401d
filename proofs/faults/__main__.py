"""`make faults`: injects every fault into a small real run, and writes the table of docs/reliability.md.

`python -m proofs.faults [--loaded] [--only PATTERN] [--write]`
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from proofs.faults.measure import Outcome, measure
from proofs.faults.table import FAULTS
from proofs.faults.target import Bench

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
#: characters of a message in the table
_WIDTH = 140
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m proofs.faults", description=__doc__)
    parser.add_argument("--loaded", action="store_true", help="keep every core busy with two endless loops")
    parser.add_argument("--only", default="", help="faults whose name or phase matches this regular expression")
    parser.add_argument("--write", action="store_true", help="replace the rows in docs/reliability.md")
    options = parser.parse_args()
    # In the background of a shell it would be ignored, by the runs as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = [fault for fault in FAULTS if re.search(options.only, f"{fault.name} ({fault.phase})")]
    folder = Path(tempfile.mkdtemp(prefix="slime-faults-"))
    bench = Bench.make(folder)
    outcomes = []
    for number, fault in enumerate(chosen):
        outcome = measure(fault, bench, folder / str(number), under_load=options.loaded)
        outcomes.append(outcome)
        if options.write:
            PAGE.write_text(table_with(PAGE.read_text(encoding="utf-8"), [outcome]), encoding="utf-8")
        verdict = "ok" if not outcome.problems else "; ".join(outcome.problems)
        print(f"{fault.name} ({fault.phase}): {_seconds(outcome.found_s)}, code {outcome.code}: {verdict}")
        print(f"    {outcome.message}", flush=True)
    failed = [outcome for outcome in outcomes if outcome.problems]
    for outcome in failed:
        print(f"\n=== {outcome.fault.name} ({outcome.fault.phase}) ===\n{outcome.output[-4000:]}")
    if not failed:
        shutil.rmtree(folder)
    else:
        print(f"the runs are in {folder}")
    return 1 if failed else 0


def table_with(page: str, outcomes: list[Outcome]) -> str:
    """The page with the rows of these faults replaced in its table; the others stay."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = dict(re.findall(r"^(\| [^|]+ \| [^|]+ \|)(.*)$", table, re.MULTILINE))
    rows |= dict(map(_row, outcomes))
    names = [_key(fault.name, fault.phase) for fault in FAULTS]
    lines = [key + rows[key] for key in names if key in rows]
    head = "| fault | while | found after | message | exit code |\n| --- | --- | --- | --- | --- |\n"
    return before + BEGIN + "\n" + head + "".join(f"{line}\n" for line in lines) + END + after


def _key(name: str, phase: str) -> str:
    return f"| {name} | {phase} |"


def _row(outcome: Outcome) -> tuple[str, str]:
    message = outcome.message.replace("|", "\\|")
    message = re.sub(r"/\S*slime-faults-\w+/", "…/", message)
    message = re.sub(r"\bon \S+\)", "on HOST)", re.sub(r"\bpid \d+", "pid N", message))
    key = _key(outcome.fault.name, outcome.fault.phase)
    message = message if len(message) <= _WIDTH else f"{message[:_WIDTH]}…"
    return key, f" {_seconds(outcome.found_s)} | `{message}` | {outcome.code} |"


def _seconds(value: float | None) -> str:
    return "not" if value is None else f"{value:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
