"""Whether what a run holds grows, and a table of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from proofs.soak.processes import Held, Snapshot

#: what a process may hold more at the end than after the warm-up: MiB, at least and as a share; descriptors; threads
_MIB, _SHARE, _COUNT = 6.0, 0.03, 2


def growing(snapshots: Sequence[Snapshot]) -> list[str]:
    """What grows between the first and the last third of `snapshots`, one line each."""
    third = max(1, len(snapshots) // 3)
    first, last = snapshots[:third], snapshots[-third:]
    problems = []
    for name, unit, of in _quantities(snapshots[-1]):
        before, after = (statistics.median(of(one) for one in part) for part in (first, last))
        allowed = max(_MIB, _SHARE * before) if unit == "MiB" else _COUNT
        if after - before > allowed:
            problems.append(f"{name} grows: {before:.4g} {unit} became {after:.4g}, {allowed:.3g} more are allowed")
    return problems


def _quantities(snapshot: Snapshot) -> Iterator[tuple[str, str, Callable[[Snapshot], float]]]:
    """Name, unit and value of everything that must not grow."""

    def of(role: str, field: str) -> Callable[[Snapshot], float]:
        return lambda one: getattr(one.processes.get(role, Held()), field)

    for role in snapshot.processes:
        yield f"memory of {role}", "MiB", of(role, "mib")
        yield f"descriptors of {role}", "", of(role, "descriptors")
        yield f"threads of {role}", "", of(role, "threads")
    yield "number of processes", "", lambda one: len(one.processes)
    yield "memory of all processes", "MiB", lambda one: sum(held.mib for held in one.processes.values())
    yield "entries in /dev/shm", "", lambda one: one.shared
    yield "temporary files", "", lambda one: one.temporary
    yield "deleted files that are open", "", lambda one: one.deleted


def table(snapshots: Sequence[Snapshot], steps: Sequence[int]) -> str:
    """What was held at the looks nearest to `steps`, in the notation of the documentation."""
    chosen = [min(snapshots, key=lambda one: abs(one.step - step)) for step in steps]
    lines = ["| MiB, descriptors, threads | " + " | ".join(f"step {one.step}" for one in chosen) + " |"]
    lines.append("| --- |" + " --- |" * len(chosen))
    for role in chosen[-1].processes:
        held = [one.processes.get(role, Held()) for one in chosen]
        lines.append(f"| {role} | " + " | ".join(f"{h.mib:.1f}, {h.descriptors}, {h.threads}" for h in held) + " |")
    for name, field in (
        ("entries in /dev/shm", "shared"),
        ("temporary files", "temporary"),
        ("deleted, open", "deleted"),
    ):
        lines.append(f"| {name} | " + " | ".join(str(getattr(one, field)) for one in chosen) + " |")
    return "\n".join(lines)
