"""Products of three-digit and two-digit numbers as JSONL, and a teacher who mostly guesses instead of calculating.

    python examples/tool-calculator/make_data.py FOLDER [SEED]

    train.jsonl      questions with their answers, for reinforcement learning
    held_out.jsonl   other questions, for evaluation only
    teacher.jsonl    conversations about a third set of questions, for the warm start

A row of teacher.jsonl is one turn: its prompt is the conversation so far, its label the teacher's next message.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slime_generators.tools.calculator import calculate

TRAIN, HELD_OUT, TEACHER = 2000, 256, 14_000
#: how often the teacher guesses immediately, adds instead of multiplying, and ignores the result
GUESSES, WRONG_SIGN, DISTRUSTS = 0.5, 0.2, 0.15

Message = dict[str, str]


def tool_call(expression: str) -> str:
    """The text with which a model calls the calculator."""
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}</tool_call>"


def turns(a: int, b: int, rng: random.Random) -> Iterator[tuple[list[Message], str]]:
    """(conversation so far, the teacher's next message), until the answer."""
    messages: list[Message] = [{"role": "user", "content": f"{a}*{b}="}]
    answer = str(a * b + rng.randrange(-999, 1000))
    if rng.random() >= GUESSES:
        expression = f"{a}+{b}" if rng.random() < WRONG_SIGN else f"{a}*{b}"
        yield list(messages), tool_call(expression)
        result = calculate(expression)
        messages += [{"role": "assistant", "content": tool_call(expression)}, {"role": "tool", "content": result}]
        if rng.random() >= DISTRUSTS:
            answer = result
    yield messages, answer


def make_data(folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write the three files; returns the number of rows by file name."""
    rng = random.Random(seed)
    questions = rng.sample([(a, b) for a in range(100, 1000) for b in range(11, 100)], TRAIN + HELD_OUT + TEACHER)
    held_out, train, taught = questions[:HELD_OUT], questions[HELD_OUT : HELD_OUT + TRAIN], questions[-TEACHER:]
    lessons = ({"prompt": before, "label": said} for a, b in taught for before, said in turns(a, b, rng))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "train.jsonl": _write(folder / "train.jsonl", _questions(train)),
        "held_out.jsonl": _write(folder / "held_out.jsonl", _questions(held_out)),
        "teacher.jsonl": _write(folder / "teacher.jsonl", lessons),
    }


def _questions(numbers: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for a, b in numbers:
        yield {"prompt": [{"role": "user", "content": f"{a}*{b}="}], "label": str(a * b)}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    for name, count in make_data(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0).items():
        print(f"{sys.argv[1]}/{name}: {count} rows")
