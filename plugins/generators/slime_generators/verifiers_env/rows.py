"""Writes the tasks of a taskset as rows for `--prompt-data`.

python -m slime_generators.verifiers_env.rows TASKSET [--out FILE] [--limit N] [--python PYTHON] [--path DIR,...]
                                              [--env JSON]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from slime_generators.options import VerifiersOptions
from slime_generators.verifiers_env.agent import VerifiersWorker


async def write_rows(options: VerifiersOptions, out: Path, limit: int) -> int:
    """Write at most `limit` rows (-1: all); return how many. Raises `RuntimeError` if the taskset fails."""
    worker = await VerifiersWorker.start(options, limit)
    try:
        answers = [answer async for answer in worker.answers()]
    except BaseException:
        await worker.end()
        raise
    how = await worker.end(exiting=True)
    rows = [answer["row"] for answer in answers if "row" in answer]
    if answers[-1:] != [{"complete": True}]:
        raise RuntimeError(f"taskset {options.taskset} could not be read: {how}")
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a verifiers taskset's tasks as rows for --prompt-data.")
    parser.add_argument("taskset")
    parser.add_argument("--out", type=Path, default=Path("prompts.jsonl"))
    parser.add_argument(
        "--limit", type=int, default=-1, help="maximum number of rows; -1: all (an endless taskset needs a limit)"
    )
    parser.add_argument("--python", default="")
    parser.add_argument("--path", default="")
    parser.add_argument("--env", type=json.loads, default={})
    given = parser.parse_args()
    options = VerifiersOptions(taskset=given.taskset, python=given.python, path=given.path, env=given.env)
    try:
        written = asyncio.run(write_rows(options, given.out, given.limit))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: {written} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
