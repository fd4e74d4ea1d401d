"""Sums of two-digit numbers with a carry as JSONL, and a teacher who solves and reviews them, both badly.

    python examples/multi-agent/make_data.py FOLDER [SEED]

    train.jsonl      questions with their answers, for reinforcement learning
    held_out.jsonl   other questions, for evaluation only
    teacher.jsonl    the training questions, solved, reviewed and solved again by the teacher, for the warm start

A row of teacher.jsonl is one turn: its prompt is the conversation so far, its label the teacher's next message.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 256
TEACHER_PASSES = 4
#: how often the teacher forgets the carry, gives a wrong verdict, and forgets the carry when asked again
FORGETS, MISJUDGES, FORGETS_AGAIN = 0.6, 0.3, 0.5

Message = dict[str, str]


def turns(a: int, b: int, rng: random.Random) -> Iterator[tuple[list[Message], str]]:
    """(conversation so far, the teacher's next message): an answer, a verdict on it, perhaps another answer."""
    right, forgetful = str(a + b), str(a + b - 10)
    asked: list[Message] = [{"role": "user", "content": f"{a}+{b}="}]
    answer = forgetful if rng.random() < FORGETS else right
    yield list(asked), answer
    asked.append({"role": "assistant", "content": answer})
    truth, lie = ("yes", "no") if answer == right else ("no", "yes")
    yield [*asked, {"role": "user", "content": "ok?"}], lie if rng.random() < MISJUDGES else truth
    yield [*asked, {"role": "user", "content": "no"}], forgetful if rng.random() < FORGETS_AGAIN else right


def make_data(folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write the three files; returns the number of rows by file name."""
    rng = random.Random(seed)
    questions = [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 >= 10]
    rng.shuffle(questions)
    held_out, train = questions[:HELD_OUT], questions[HELD_OUT:]
    lessons = [
        {"prompt": before, "label": said}
        for _ in range(TEACHER_PASSES)
        for a, b in train
        for before, said in turns(a, b, rng)
    ]
    rng.shuffle(lessons)
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "train.jsonl": _write(folder / "train.jsonl", _questions(train)),
        "held_out.jsonl": _write(folder / "held_out.jsonl", _questions(held_out)),
        "teacher.jsonl": _write(folder / "teacher.jsonl", lessons),
    }


def _questions(numbers: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for a, b in numbers:
        yield {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "label": str(a + b)}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    for name, count in make_data(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0).items():
        print(f"{sys.argv[1]}/{name}: {count} rows")
