"""Arithmetic questions as JSONL, and a teacher who gets most of them wrong.

    python examples/quickstart/make_data.py FOLDER

The questions are additions of two-digit numbers with a carry from the ones, such as 27+58. It writes three files:

    train.jsonl      questions with correct answers, for reinforcement learning
    held_out.jsonl   other questions with correct answers, for evaluation only
    teacher.jsonl    the training questions, answered by a teacher who forgets the carry seven times in ten (27+58=75),
                     for the warm start

A row is {"prompt": [{"role": "user", "content": "27+58="}], "label": "85"}.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

HELD_OUT = 256
TEACHER_PASSES = 5
TEACHER_FORGETS = 0.7


def make_data(folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write the three files; returns the number of rows by file name."""
    rng = random.Random(seed)
    questions = [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 >= 10]
    rng.shuffle(questions)
    held_out, train = questions[:HELD_OUT], questions[HELD_OUT:]
    lessons = [
        (a, b, a + b - 10 if rng.random() < TEACHER_FORGETS else a + b) for _ in range(TEACHER_PASSES) for a, b in train
    ]
    rng.shuffle(lessons)
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "train.jsonl": _write(folder / "train.jsonl", ((a, b, a + b) for a, b in train)),
        "held_out.jsonl": _write(folder / "held_out.jsonl", ((a, b, a + b) for a, b in held_out)),
        "teacher.jsonl": _write(folder / "teacher.jsonl", lessons),
    }


def _write(path: Path, rows: Iterable[tuple[int, int, int]]) -> int:
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": f"{a}+{b}="}], "label": str(answer)})
        for a, b, answer in rows
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    for name, rows in make_data(Path(sys.argv[1])).items():
        print(f"{sys.argv[1]}/{name}: {rows} rows")
