"""What one rollout process costs in front of 1 to 1,024 engines. Simulated on one machine.

    python -m benchmarks.bench_fleet [flat] [in-flight] [stragglers] [carry] [--quick]

The engines are stubs in other processes (`benchmarks/fleet/stub_engines.py`) that speak SGLang's HTTP protocol over
127.0.0.1; they have no model, and their latencies and lengths are drawn. Everything in front of them is real: client,
generator, ledger, collector, filters, the batch, the files of samples. Each row of a table is a process of its own.

- flat: the same samples in front of more and more engines.
- in-flight: more and more samples at a time.
- stragglers: time of the engines' slots that is lost to the longest responses of a batch.
- carry: tokens that the process can take in, by length of the response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.fleet.load import GROUP_SIZE, PROMPT_TOKENS, Cost, Load, run_load
from benchmarks.fleet.stub_engines import LONGEST, Fleet, lengths

ENGINES = (1, 8, 64, 256, 1024)
#: median and spread of lengths: a mean of 390 tokens, and one sample in 1,000 above 20,000
LONG_TAIL = (80, 1.8)
#: seconds one row may take
LIMIT_S = 300


def in_own_process(load: dict[str, Any]) -> dict[str, Any]:
    """Run a load in a process of its own; its cost."""
    command = [sys.executable, "-m", "benchmarks.bench_fleet", "--row", json.dumps(load)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{load}\n{done.stdout}\n{done.stderr}")
    cost: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return cost


def run_row(load: dict[str, Any]) -> dict[str, Any]:
    """In its own process: the numbers of a load."""
    median, spread, *most = load.pop("lengths")
    fleet = Fleet(
        engines=load.pop("engines"),
        lengths=lengths(median, spread, *most),
        prompt=PROMPT_TOKENS,
        step_s=load.pop("step_s", 0.0),
        hold=load.pop("hold", False),
    )
    cost: Cost = asyncio.run(run_load(Load(fleet=fleet, **load)))
    numbers = asdict(cost)
    del numbers["batches"]
    numbers["served"]["finished"] = cost.served.finished.total()
    return numbers


def table(heads: Sequence[str]) -> None:
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads), flush=True)


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def flat(engines: Sequence[int], samples: int, in_flight: int) -> None:
    """The same samples in front of more and more engines."""
    print(f"\n{samples:,} samples, {in_flight:,} in flight, long-tailed lengths\n")
    table(
        [
            "engines",
            "CPU ms a sample",
            "relative",
            "CPU µs a token",
            "loop late, p99 ms",
            "requests of an engine, least / mean / most",
            "s",
        ]
    )
    first = 0.0
    for count in engines:
        groups = samples // GROUP_SIZE
        load = {"engines": count, "lengths": LONG_TAIL, "step_s": 0.0005, "in_flight": in_flight}
        cost = in_own_process({**load, "batch": groups, "started": groups})
        sample = 1000 * cost["cpu_s"] / samples
        first = first or sample
        asked = cost["served"]["requests"]
        row(
            f"{count:,}",
            f"{sample:.3f}",
            f"{sample / first:.2f}",
            f"{1e6 * cost['cpu_s'] / cost['tokens']:.2f}",
            f"{cost['lag_p99_ms']:.1f}",
            f"{min(asked)} / {sum(asked) / count:.1f} / {max(asked)}",
            f"{cost['wall_s']:.1f}",
        )


def in_flight(loads: Sequence[tuple[int, bool]]) -> None:
    """More and more samples at a time, in front of 1,024 engines."""
    print("\n1,024 engines, all samples in flight at once\n")
    table(
        [
            "in flight",
            "requests",
            "connections",
            "CPU ms a sample",
            "KiB a sample in flight",
            "loop late, p99 ms",
            "s",
        ]
    )
    for samples, together in loads:
        groups = samples // GROUP_SIZE
        form = (24, 0.5, 64) if together else LONG_TAIL
        load = {"engines": 1024, "lengths": form, "step_s": 0.0005, "in_flight": samples, "hold": True}
        cost = in_own_process({**load, "batch": groups, "started": groups, "together": together})
        row(
            f"{samples:,}",
            "short, in messages of several" if together else "one by one",
            f"{cost['served']['connections']:,}",
            f"{1000 * cost['cpu_s'] / samples:.3f}",
            f"{1024 * (cost['mib_in_flight'] - cost['mib_before']) / samples:.1f}",
            f"{cost['lag_p99_ms']:.0f}",
            f"{cost['wall_s']:.1f}",
        )


def stragglers(groups: int, rollouts: int, step_s: float) -> None:
    """Slot time lost to the longest responses."""
    print(f"\n64 engines, {rollouts} rollouts of {groups} groups, long-tailed lengths\n")
    table(["mode", "s a rollout", "slots idle", "tokens generated and not trained on", "aborts sent"])
    for name, over, partial in (
        ("wait for all", 1.0, False),
        ("over-sampling 1.25, aborted start over", 1.25, False),
        ("over-sampling 1.25, aborted are continued", 1.25, True),
    ):
        started = int(over * groups)
        load = {"engines": 64, "lengths": LONG_TAIL, "step_s": step_s, "in_flight": started * GROUP_SIZE}
        cost = in_own_process({**load, "batch": groups, "started": started, "rollouts": rollouts, "partial": partial})
        slots = started * GROUP_SIZE * cost["wall_s"]
        made = cost["served"]["tokens"]
        row(
            name,
            f"{cost['wall_s'] / rollouts:.2f}",
            f"{1 - cost['served']['busy_s'] / slots:.0%}",
            f"{1 - cost['trained_tokens'] / made:.0%}",
            f"{cost['served']['aborts']:,}",
        )


def carry(sizes: Sequence[tuple[int, int]]) -> None:
    """Tokens that the process can take in."""
    print("\n8 engines, responses of equal lengths with log-probs\n")
    table(["tokens a response", "samples", "CPU ms a sample", "CPU µs a token", "tokens/s of one core", "p99 ms late"])
    for length, samples in sizes:
        groups = samples // GROUP_SIZE
        load = {"engines": 8, "lengths": (length, 0.0), "in_flight": min(samples, 256)}
        cost = in_own_process({**load, "batch": groups, "started": groups})
        row(
            f"{length:,}",
            f"{samples:,}",
            f"{1000 * cost['cpu_s'] / samples:.2f}",
            f"{1e6 * cost['cpu_s'] / cost['tokens']:.2f}",
            f"{cost['tokens'] / cost['cpu_s']:,.0f}",
            f"{cost['lag_p99_ms']:.0f}",
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["flat", "in-flight", "stragglers", "carry"])
    parser.add_argument("--quick", action="store_true", help="a few samples, to see that it runs")
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES)
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print(json.dumps(run_row(args.row)))
        return
    if "flat" in args.tables:
        flat(args.engines, *((512, 128) if args.quick else (8192, 2048)))
    if "in-flight" in args.tables:
        in_flight([(512, False), (512, True)] if args.quick else [(1024, False), (16384, False), (98304, True)])
    if "stragglers" in args.tables:
        stragglers(*((8, 2, 0.0002) if args.quick else (64, 8, 0.001)))
    if "carry" in args.tables:
        carry([(512, 64), (LONGEST, 8)] if args.quick else [(512, 4096), (2048, 1024), (8192, 512), (LONGEST, 128)])


if __name__ == "__main__":
    main()
