"""Run on the first node: waits until all nodes are in its Ray cluster, and names those that are not.

A file that asks the run to end ends the waiting too: no step has been made that would have to be saved.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slime_launch.job import PREEMPTED

_INTERVAL_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m slime_launch.wait_for_nodes HOST:PORT --timeout-s N --stop FILE NAME...`; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("names", nargs="+")
    stated = parser.parse_args(argv)

    import ray

    ray.init(address=stated.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        missing = wait_for(stated.names, _present, stated.timeout_s, stated.stop)
    finally:
        ray.shutdown()
    if stated.stop.exists():
        print("slime launch: asked to end before the run has begun", file=sys.stderr)
        return PREEMPTED
    if missing:
        print(
            f"slime launch: {len(missing)} of {len(stated.names)} nodes have not joined the Ray cluster"
            f" {stated.address} within {stated.timeout_s:g} s: {', '.join(missing)}. Their logs are beside that of this"
            " node",
            file=sys.stderr,
        )
    return 1 if missing else 0


def wait_for(names: Sequence[str], present: Callable[[], set[str]], timeout_s: float, stop: Path) -> list[str]:
    """Wait until all names are present, or `stop` is; those that are missing at the end."""
    deadline = time.monotonic() + timeout_s
    while missing := sorted(set(names) - present()):
        if time.monotonic() > deadline or stop.exists():
            return missing
        time.sleep(_INTERVAL_S)
    return []


def _present() -> set[str]:
    import ray

    return {node["NodeName"] for node in ray.nodes() if node["Alive"]}


if __name__ == "__main__":
    sys.exit(main())
