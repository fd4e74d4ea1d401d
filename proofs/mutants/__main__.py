"""`make mutants`: changes one line of slime at a time, and shows which changes no test notices.

    python -m proofs.mutants --count 100 --seed 1

Draws changes evenly over the areas of `proofs.mutants.areas`, makes each in a copy of the repository, and runs the
tests of its area there until one fails. A change that all tests accept survives. A survivor needs a test, or a row in
`equivalent.toml` with the reason why no test can notice it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from proofs.mutants.areas import AREAS, Area
from proofs.mutants.changes import Change, candidates
from proofs.mutants.copied import ROOT, Copy

#: the first tests of an area: those that start neither engines nor ranks; a change that makes one hang is noticed soon
QUICK = ("-m", "not engine and not slow and not nightly", "--timeout=60")
#: the same files' other tests, which come next
LATER = ("-m", "(engine or slow) and not nightly")
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one file."""

    area: str
    file: str  #: from the root of the repository
    change: Change
    before: str  #: the line, without indentation
    after: str  #: the changed line, without indentation

    def __str__(self) -> str:
        return f"{self.area}: {self.file}:{self.change.line}\n    - {self.before}\n    + {self.after}"


def mutants_of(name: str, area: Area) -> list[Mutant]:
    """Every mutant of an area."""
    found = []
    for path in sorted({path for pattern in area.files for path in ROOT.glob(pattern)}):
        source = path.read_text()
        lines, file = source.split("\n"), str(path.relative_to(ROOT))
        for one in candidates(source):
            line = lines[one.line - 1]
            found.append(Mutant(name, file, one, line.strip(), one.changed(line).strip()))
    return found


def draw(count: int, seed: int, areas: Mapping[str, Area] = AREAS) -> list[Mutant]:
    """`count` mutants, evenly over the areas; no line of a file twice.

    An edit changes only the draw of the lines that it touches: the order is by a hash of each line and its change.
    """

    def rank(place: int, one: Mutant) -> str:
        return hashlib.sha256(repr((seed, place, one.file, one.before, one.after)).encode()).hexdigest()

    queues = []
    for name, area in areas.items():
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for one in mutants_of(name, area):
            by_line.setdefault((one.file, one.change.line), []).append(one)
        seen: Counter[tuple[str, str]] = Counter()
        chosen = []
        for group in by_line.values():
            alike = group[0].file, group[0].before
            chosen.append(min((rank(seen[alike], one), one) for one in group))
            seen[alike] += 1
        queues.append([one for _, one in sorted(chosen)])
    dealt = [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]
    return dealt[:count]


def equivalent_changes(path: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """(file, line before, line after) -> why no test can notice the change.

    Raises:
        SystemExit: A row has no reason, or its line is not in the file any more.
    """
    found = {}
    for row in tomllib.loads(path.read_text()).get("equivalent", []):
        where = f"{path.name}: {row['file']}: {row['before']!r}"
        if not row.get("reason", "").strip():
            raise SystemExit(f"{where} has no reason")
        lines = [line.strip() for line in (ROOT / row["file"]).read_text().split("\n")]
        if row["before"] not in lines:
            raise SystemExit(f"{where} is no line of that file. Remove the row, or write today's line")
        found[row["file"], row["before"], row["after"]] = row["reason"]
    return found


def report(
    mutants: list[Mutant],
    copy: Copy,
    known: Mapping[tuple[str, str, str], str],
    areas: Mapping[str, Area] = AREAS,
    *,
    quick: bool = False,
) -> Iterator[Mutant]:
    """Run the tests for each mutant, print a verdict, and yield those that survive without a reason.

    With `quick` only the first tests of each area run.

    Raises:
        SystemExit: The first tests of an area fail without any change, so that nothing could be learned from them.
    """
    tried: set[str] = set()
    for number, mutant in enumerate(mutants, 1):
        tests, start = areas[mutant.area].tests, time.monotonic()
        reason = known.get((mutant.file, mutant.before, mutant.after))
        if reason is not None:
            print(f"{number:3}  equivalent  {mutant}\n    {reason}", flush=True)
            continue
        if mutant.area not in tried:
            tried.add(mutant.area)
            failed = copy.first_failure(*QUICK, *tests[0])
            if failed:
                raise SystemExit(f"{mutant.area}: without any change, {failed}")
        with copy.changed(mutant.file, mutant.change):
            stages = [(*QUICK, *tests[0])]
            if not quick:
                stages += [(*LATER, *tests[0]), *(("-m", "not nightly", *more) for more in tests[1:])]
            killer = next((failed for stage in stages if (failed := copy.first_failure(*stage))), None)
        seconds = f"{time.monotonic() - start:.0f} s"
        verdict = f"SURVIVED {seconds}" if killer is None else f"killed in {seconds}"
        print(f"{number:3}  {verdict}  {mutant}\n    {killer or ''}", flush=True)
        if killer is None:
            yield mutant


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m proofs.mutants", description=str(__doc__).split("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="changes to draw")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument(
        "--part", default=":", metavar="FROM:TO", help="run only these of the drawn changes (of the area)"
    )
    parser.add_argument("--area", choices=AREAS, help="run only the drawn changes of this area")
    parser.add_argument("--quick", action="store_true", help="run only the first tests of each area")
    parser.add_argument("--list", action="store_true", help="show the changes and run nothing")
    options = parser.parse_args()
    first, _, last = options.part.partition(":")
    drawn = [one for one in draw(options.count, options.seed) if options.area in (None, one.area)]
    chosen = drawn[int(first or 0) : int(last) if last else None]
    if options.list:
        print(*chosen, sep="\n")
        return
    known, start = equivalent_changes(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slime-mutants-") as folder:
        survivors = list(report(chosen, Copy(Path(folder)), known, quick=options.quick))
    print(f"{len(chosen)} changes, {len(survivors)} survived without a reason, {time.monotonic() - start:.0f} s")
    print(*survivors, sep="\n")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
