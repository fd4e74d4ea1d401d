"""Sums of fractions, and a teacher who mostly adds the denominators too.

A row is {"prompt": [{"role": "user", "content": "1/6+2/6="}], "label": "1/2"}. Labels are in lowest terms; an answer
need not be, since the reward `math` compares values: 3/6 is right, and the teacher's 3/12 is wrong.
"""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

TEACHER_RIGHT = 0.3
HELD_OUT = 128


def lesson(rng: random.Random) -> tuple[str, str]:
    """A question with the teacher's answer."""
    a, b, below = rng.randrange(1, 10), rng.randrange(1, 10), rng.randrange(2, 10)
    return f"{a}/{below}+{b}/{below}=", f"{a + b}/{below if rng.random() < TEACHER_RIGHT else 2 * below}"


def make_data(folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write train.jsonl and held_out.jsonl; returns the number of rows by file name."""
    questions = [(a, b, below) for a in range(1, 10) for b in range(1, 10) for below in range(2, 10)]
    random.Random(seed).shuffle(questions)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"held_out.jsonl": questions[:HELD_OUT], "train.jsonl": questions[HELD_OUT:]}
    for name, part in files.items():
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{a}/{below}+{b}/{below}="}],
                "label": str(Fraction(a + b, below)),
            }
            for a, b, below in part
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {name: len(part) for name, part in files.items()}
