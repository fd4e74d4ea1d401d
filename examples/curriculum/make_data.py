"""Questions of eight difficulties, and a teacher who is mostly right about the easy ones.

A row is {"prompt": [{"role": "user", "content": "say 3"}], "label": "aaa", "metadata": {"difficulty": 3}}.  The teacher
gets each letter right three times in five, so `say 1` is answered correctly in 60 % of all cases and `say 8` in 2 %.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

LONGEST = 8
TEACHER_RIGHT = 0.6


def lesson(rng: random.Random) -> tuple[str, str]:
    """A question with the teacher's answer."""
    letters = rng.randrange(1, LONGEST + 1)
    return f"say {letters}", "".join("a" if rng.random() < TEACHER_RIGHT else "b" for _ in range(letters))


def make_data(path: Path, *, copies: int = 16, seed: int = 0) -> int:
    """Write the questions in random order; returns their number."""
    questions = [letters for letters in range(1, LONGEST + 1) for _ in range(copies)]
    random.Random(seed).shuffle(questions)
    rows = [
        {"prompt": [{"role": "user", "content": f"say {n}"}], "label": "a" * n, "metadata": {"difficulty": n}}
        for n in questions
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)
