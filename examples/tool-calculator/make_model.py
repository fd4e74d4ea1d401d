"""A small language model from scratch, as a Hugging Face folder: architecture, random weights, tokenizer.

    python examples/tool-calculator/make_model.py FOLDER

The model has the Qwen3 architecture and a third of a million parameters. The tokenizer has a token for every character,
and one for each of the two fixed parts of a tool call, so that calls are short. Nothing is downloaded.
"""

from __future__ import annotations

import re
import string
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from small_model import END, PAD, piece_tokenizer, save_model

SPECIAL = (PAD, END, "<|user|>", "<|assistant|>", "<|tool|>")
#: text around the expression in `<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>`
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')


def make_model(folder: Path, *, seed: int = 0) -> int:
    """Write config.json, random float32 weights and the tokenizer; returns the number of parameters."""
    pattern = "|".join(re.escape(part) for part in CALL) + "|[\\s\\S]"
    return save_model(
        folder,
        piece_tokenizer(SPECIAL, (*CALL, *string.printable[:95], "\n"), pattern),
        seed=seed,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        max_position_embeddings=256,
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(f"{target}: {make_model(target):,} parameters")
