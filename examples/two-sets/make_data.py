"""Two sets of questions of eight difficulties, and a teacher who is mostly right about the easy ones.

Rows of letters.jsonl ask for a letter n times (`say 3` is `aaa`), those of numbers.jsonl for the numbers up to n
(`count 3` is `123`). Both have n as their difficulty: {"prompt": [{"role": "user", "content": "count 3"}], "label":
"123", "metadata": {"difficulty": 3}}. The teacher gets each character right three times in five.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

LONGEST = 8
TEACHER_RIGHT = 0.6
NUMBERS = "123456789"
#: set -> its question, and the answers by difficulty
SETS = {
    "letters": ("say", ["a" * n for n in range(LONGEST + 1)]),
    "numbers": ("count", [NUMBERS[:n] for n in range(9)]),
}


def lesson(rng: random.Random) -> tuple[str, str]:
    """A question of one of the sets, with the teacher's answer."""
    question, answers = rng.choice(list(SETS.values()))
    n = rng.randrange(1, LONGEST + 1)
    return f"{question} {n}", "".join(c if rng.random() < TEACHER_RIGHT else "b" for c in answers[n])


def make_data(folder: Path, *, copies: int = 16, seed: int = 0) -> dict[str, int]:
    """Write a file for each set, in random order; returns the number of rows by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, (question, answers) in SETS.items():
        order = [n for n in range(1, LONGEST + 1) for _ in range(copies)]
        random.Random(seed).shuffle(order)
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{question} {n}"}],
                "label": answers[n],
                "metadata": {"difficulty": n},
            }
            for n in order
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        counts[f"{name}.jsonl"] = len(rows)
    return counts
