"""The cost of running a response's code in the sandbox.

    python benchmarks/bench_code_reward.py [--programs 40] [--at-once 2]

The first part measures wall and CPU time of an empty program: with `subprocess` alone, and with each isolation level
that the machine permits. The second measures how many samples the reward `code` scores per second, with three tests
each and `--at-once` threads (for as many worker processes): for programs that end, and for programs that loop until
their CPU limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slime.plugin import RewardModel
from slime.registry.plugin_set import survey_plugins
from slime.testing import make_context, make_sample
from slime_sandbox import Isolation, machine_isolation, python_argv, run_program_sync

#: a Python that unprivileged users may run; without namespaces they may not have access to one in a home folder
SYSTEM_PYTHON = Path("/usr/bin/python3")
TESTS = {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [2, 4, 6]}
RIGHT = "def f(x):\n    return 2 * x\n"
LOOP = "while True: pass"
LOOP_CPU_S = 0.5


def cpu_s() -> float:
    """CPU seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(name: str, run: Callable[[], object], times: int) -> None:
    """Print wall and CPU time of one call."""
    run()
    started, cpu = time.monotonic(), cpu_s()
    for _ in range(times):
        run()
    wall, used = (time.monotonic() - started) / times, (cpu_s() - cpu) / times
    print(f"{name:<28} {1000 * wall:8.1f} ms   {1000 * used:8.1f} ms CPU")


def one_program(times: int) -> None:
    """Measure with `subprocess` alone, then with each isolation level."""
    argv = [*python_argv("-c", "pass")]
    measure("bare", lambda: subprocess.run(argv, check=True), times)
    best = machine_isolation().isolation
    for isolation in Isolation:
        if isolation.rank > best.rank:
            continue
        program = argv if isolation is Isolation.NAMESPACES else [str(SYSTEM_PYTHON), "-I", "-c", "pass"]
        if not Path(program[0]).exists():
            print(f"{isolation.value:<28} left out: there is no {program[0]}")
            continue
        measure(isolation.value, lambda p=program, i=isolation: run_program_sync(p, isolation=i), times)


def rewards(code: str, times: int, at_once: int, **options: float) -> None:
    """Samples a second."""
    [component] = [one for one in survey_plugins().components() if one.id == "rewards/code"]
    reward: RewardModel = component.build(component.spec.options(**options), make_context())
    sample = make_sample("", code, label=None, metadata={"tests": TESTS})
    samples = [dataclasses.replace(sample, index=n) for n in range(times)]
    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as threads:
        [first, *_] = threads.map(lambda one: reward.score([one]), samples)
    seconds = time.monotonic() - started
    assert isinstance(first, list)
    print(f"{times} samples worth {first[0].value:g} each, {at_once} at once: {times / seconds:.1f} samples/s")


def main() -> int:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=2)
    args = parser.parse_args()
    one_program(args.programs)
    rewards(RIGHT, args.programs, args.at_once)
    rewards(LOOP, max(2, args.programs // 4), args.at_once, cpu_s=LOOP_CPU_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
