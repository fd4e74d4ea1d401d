"""Questions that ask for small functions, with tests, and a teacher who often writes the wrong one.

A row is {"prompt": [{"role": "user", "content": "x times 3"}], "metadata": {"tests": {"fn_name": "f", "inputs": [[0],
[1], [7]], "outputs": [0, 3, 21]}}}. A correct answer is `f=lambda x:x*3`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
INPUTS = (0, 1, 7)
TEACHER_RIGHT = 0.3


def program(operation: str, number: int) -> str:
    """The function in Python."""
    return f"f=lambda x:x{OPERATIONS[operation]}{number}"


def tests(operation: str, number: int) -> dict[str, object]:
    """What it must return."""
    wanted = {"plus": lambda x: x + number, "minus": lambda x: x - number, "times": lambda x: x * number}[operation]
    return {"fn_name": "f", "inputs": [[x] for x in INPUTS], "outputs": [wanted(x) for x in INPUTS]}


def lesson(rng: random.Random) -> tuple[str, str]:
    """A question with the teacher's answer: correct three times in ten, otherwise with a random operation."""
    operation, number = rng.choice(list(OPERATIONS)), rng.randrange(2, 100)
    said = operation if rng.random() < TEACHER_RIGHT else rng.choice(list(OPERATIONS))
    return f"x {operation} {number}", program(said, number)


def make_data(folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write train.jsonl and held_out.jsonl; returns the number of rows by file name."""
    questions = [(operation, number) for operation in OPERATIONS for number in range(2, 100)]
    random.Random(seed).shuffle(questions)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"held_out.jsonl": questions[:48], "train.jsonl": questions[48:]}
    for name, part in files.items():
        rows = [
            {
                "prompt": [{"role": "user", "content": f"x {operation} {number}"}],
                "metadata": {"tests": tests(operation, number)},
            }
            for operation, number in part
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {name: len(part) for name, part in files.items()}
