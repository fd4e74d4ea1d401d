"""Questions of several steps, and a small model that has learned from a teacher who guesses half of the steps.

    python examples/credit-by-turn/make_task.py FOLDER [SEED]

    train.jsonl      questions with their answers and steps, for reinforcement learning
    held_out.jsonl   other questions, for evaluation only
    warm_start/      a Qwen3 of a third of a million parameters, trained on the teacher's conversations

The questions' metadata says what each step adds: it is the fact by which turns are judged.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from small_model import END, PAD, piece_tokenizer, save_model
from teach import teach

TRAIN, HELD_OUT = 2000, 128
STEPS = 6
#: how often the teacher takes any number instead of the step's
GUESSES = 0.5
#: what a verb does to the total
VERBS = {" gets ": 1, " finds ": 1, " wins ": 1, " earns ": 1, " gives ": -1, " loses ": -1, " pays ": -1, " eats ": -1}
#: text around the expression of a call
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')


def question(rng: random.Random) -> dict[str, Any]:
    """Like `352 gets 7 pays 4=`, but longer, with the answer as label and the steps in the metadata."""
    start = rng.randrange(200, 900)
    steps = [(rng.choice(list(VERBS)), rng.randrange(1, 10)) for _ in range(STEPS)]
    changes = [VERBS[verb] * number for verb, number in steps]
    return {
        "prompt": [{"role": "user", "content": str(start) + "".join(f"{verb}{n}" for verb, n in steps) + "="}],
        "label": str(start + sum(changes)),
        "metadata": {"start": start, "changes": changes},
    }


def lesson(rng: random.Random) -> tuple[str, str]:
    """A question, and a conversation about it: a call for each step, with its number or a guess, then the answer."""
    asked = question(rng)
    total, text = asked["metadata"]["start"], ""
    for change in asked["metadata"]["changes"]:
        if rng.random() < GUESSES:
            change = rng.randrange(1, 10) * (1 if change > 0 else -1)
        text += f"{total}{change:+d}".join(CALL) + f"{END}<|tool|>{total + change}{END}<|assistant|>"
        total += change
    return asked["prompt"][0]["content"], f"{text}{total}"


def make_model(folder: Path, *, seed: int) -> int:
    """Write a random model, and a tokenizer with a token for each verb, digit, sign and part of a call."""
    pieces = (*CALL, *VERBS)
    pattern = "|".join([*map(re.escape, pieces), "[\\s\\S]"])
    return save_model(
        folder,
        piece_tokenizer((PAD, END, "<|user|>", "<|assistant|>", "<|tool|>"), (*pieces, *"0123456789+-="), pattern),
        seed=seed,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        max_position_embeddings=256,
    )


def make_data(folder: Path, *, seed: int = 0) -> None:
    """Write the questions."""
    rng = random.Random(seed)
    unique = {}
    while len(unique) < TRAIN + HELD_OUT:
        row = question(rng)
        unique[row["prompt"][0]["content"]] = json.dumps(row) + "\n"
    rows = list(unique.values())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held_out.jsonl").write_text("".join(rows[:HELD_OUT]), encoding="utf-8")
    (folder / "train.jsonl").write_text("".join(rows[HELD_OUT:]), encoding="utf-8")


def make_task(folder: Path, *, seed: int = 0, steps: int = 800) -> None:
    """Write the questions, and the model after `steps` batches of the teacher's conversations."""
    make_data(folder, seed=seed)
    # Another seed: the teacher's questions are others.
    loss = teach(folder / "model", lesson, steps=steps, seed=seed + 1000, model_maker=make_model)
    (folder / "model").rename(folder / "warm_start")  # which is there only if it is complete
    print(f"{folder}/warm_start: loss {loss:.3f} per token on the teacher's conversations", flush=True)


if __name__ == "__main__":
    make_task(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
