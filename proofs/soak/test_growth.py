"""What counts as growth in `make soak`."""

from __future__ import annotations

from proofs.soak.growth import growing, table
from proofs.soak.processes import Held, Snapshot


def snapshots(mib: float = 0.0, descriptors: float = 0.0, shared: float = 0.0) -> list[Snapshot]:
    """Looks at a run of 1,000 steps, with what grows in each step."""
    return [
        Snapshot(
            step,
            {"driver": Held(100.0 + mib * step, int(40 + descriptors * step), 8), "rollout": Held(300.0, 60, 30)},
            shared=int(1 + shared * step),
            temporary=11,
            deleted=4 + step % 2,
        )
        for step in range(0, 1000, 10)
    ]


def test_what_stays_within_its_noise_does_not_grow() -> None:
    assert growing(snapshots()) == []
    assert growing(snapshots(mib=0.002)) == []


def test_each_thing_that_grows_is_named() -> None:
    assert growing(snapshots(mib=0.05)) == [
        "memory of driver grows: 108 MiB became 141.5, 6 more are allowed",
        "memory of all processes grows: 408 MiB became 441.5, 12.2 more are allowed",
    ]
    [problem] = growing(snapshots(descriptors=0.01))
    assert problem.startswith("descriptors of driver grows")
    [problem] = growing(snapshots(shared=0.01))
    assert problem.startswith("entries in /dev/shm grows")


def test_the_table_has_a_row_for_each_process() -> None:
    rows = table(snapshots(mib=0.01), [0, 500, 2000]).splitlines()
    assert rows[0] == "| MiB, descriptors, threads | step 0 | step 500 | step 990 |"
    assert "| driver | 100.0, 40, 8 | 105.0, 40, 8 | 109.9, 40, 8 |" in rows
    assert "| temporary files | 11 | 11 | 11 |" in rows
