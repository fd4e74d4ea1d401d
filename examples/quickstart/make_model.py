"""A small language model from scratch, as a Hugging Face folder: architecture, random weights, tokenizer.

    python examples/quickstart/make_model.py FOLDER

The model has the Qwen3 architecture and about one million parameters. The tokenizer has one token per character, and
a chat template. Nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from small_model import END, PAD, piece_tokenizer, save_model

SPECIAL = (PAD, END, "<|user|>", "<|assistant|>")
CHARACTERS = "0123456789+-*/=? .,:()abcdefghijklmnopqrstuvwxyz"


def make_model(folder: Path, *, seed: int = 0) -> int:
    """Write config.json, random float32 weights and the tokenizer; returns the number of parameters."""
    return save_model(
        folder,
        piece_tokenizer(SPECIAL, tuple(CHARACTERS), "."),
        seed=seed,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(f"{target}: {make_model(target):,} parameters")
