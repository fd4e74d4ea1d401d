"""Trains a small model, by default the quickstart's, on questions and answers, in a minute or less, with plain torch.

The result is a starting point for RL: a model whose answers have the right form, but are often wrong.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from make_model import make_model

#: returns a random question and its answer
Lesson = Callable[[random.Random], tuple[str, str]]

BATCH = 32


def teach(
    folder: Path, lesson: Lesson, *, steps: int, seed: int = 0, model_maker: Callable[..., int] = make_model
) -> float:
    """Train a new model on `steps` batches of lessons and write its folder; returns the last loss per token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_maker(folder, seed=seed)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        asked, answered = [], []
        for question, answer in (lesson(rng) for _ in range(BATCH)):
            messages = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            asked.append(tokenizer.encode(text))
            answered.append([*tokenizer.encode(answer), tokenizer.eos_token_id])
        width = max(len(a) + len(b) for a, b in zip(asked, answered, strict=True))
        tokens = torch.full((BATCH, width), tokenizer.pad_token_id)
        labels = torch.full((BATCH, width), -100)
        for row, (a, b) in enumerate(zip(asked, answered, strict=True)):
            tokens[row, : len(a) + len(b)] = torch.tensor(a + b)
            labels[row, len(a) : len(a) + len(b)] = torch.tensor(b)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return float(loss.detach())


def ask_only(question: str, path: Path) -> None:
    """Write a prompt file that repeats one question."""
    path.parent.mkdir(parents=True, exist_ok=True)
    row = json.dumps({"prompt": [{"role": "user", "content": question}]})
    path.write_text(f"{row}\n" * 64, encoding="utf-8")
