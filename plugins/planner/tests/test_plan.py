"""A dry run with the planner, and without it."""

from __future__ import annotations

from tests.cli.conftest import Slime


def test_without_the_planner_only_its_lines_are_missing(dry_run: Slime) -> None:
    planned, bare = dry_run(), dry_run("--plugins.deny", "planner")
    assert bare.code == planned.code == 0, bare
    labels = [line[:13].strip() for line in planned.out.splitlines()]
    assert labels[labels.index("devices") + 1] == "planned for" and "weight sync" in labels
    first, last = labels.index("planned for"), labels.index("network")
    assert bare.out.splitlines() == planned.out.splitlines()[:first] + planned.out.splitlines()[last:]
