"""Arithmetic questions as JSONL: two-digit additions, split into disjoint training and held-out sets.

    python examples/quickstart/make_data.py FOLDER

One row: {"prompt": [{"role": "user", "content": "27+58="}], "label": "85"}.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HELD_OUT = 256


def make_data(folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write train.jsonl and held_out.jsonl; returns rows by file name."""
    questions = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(questions)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"held_out.jsonl": questions[:HELD_OUT], "train.jsonl": questions[HELD_OUT:]}
    for name, pairs in parts.items():
        with (folder / name).open("w", encoding="utf-8") as handle:
            for a, b in pairs:
                row = {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "label": str(a + b)}
                handle.write(json.dumps(row) + "\n")
    return {name: len(pairs) for name, pairs in parts.items()}


if __name__ == "__main__":
    for name, rows in make_data(Path(sys.argv[1])).items():
        print(f"{sys.argv[1]}/{name}: {rows} questions")
