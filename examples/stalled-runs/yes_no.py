"""Questions that are answered with y or n, two thirds of them with y, and lessons for a model that guesses.

The data of the run whose entropy collapses: see docs/reading-a-run.md.
"""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

#: how many of the questions of train.jsonl are answered with y; of those for evaluation it is half
YES = Fraction(2, 3)
#: how often the teacher of the warm start is right
RIGHT = 0.6
WARM_START_STEPS = 300


def question(rng: random.Random, yes: bool) -> str:
    """A random question with this answer, such as `58 more than 27?`."""
    low, high = sorted(rng.sample(range(10, 100), 2))
    return f"{high} more than {low}?" if yes else f"{low} more than {high}?"


def lesson(rng: random.Random) -> tuple[str, str]:
    """A question and the teacher's answer; both answers are equally frequent."""
    yes = rng.random() < 0.5
    right = rng.random() < RIGHT
    return question(rng, yes), _answer(yes == right)


def make_yes_no(folder: Path, *, train: int = 1800, held_out: int = 256, seed: int = 0) -> None:
    """Write train.jsonl and held_out.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for name, rows, share in (("train", train, YES), ("held_out", held_out, Fraction(1, 2))):
        yes = int(rows * share)
        labels = [True] * yes + [False] * (rows - yes)
        rng.shuffle(labels)
        lines = [
            json.dumps({"prompt": [{"role": "user", "content": question(rng, label)}], "label": _answer(label)})
            for label in labels
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _answer(yes: bool) -> str:
    """One token, so that an answer is right or wrong and never half of each."""
    return "y" if yes else "n"
