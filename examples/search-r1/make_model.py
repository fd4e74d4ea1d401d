"""A small language model from scratch, as a Hugging Face folder: architecture, random weights, tokenizer.

    python examples/search-r1/make_model.py FOLDER

The model has the Qwen3 architecture and half a million parameters. The tokenizer has a token for every word of the
questions, every syllable of the names, the fixed parts of a tool call, and every byte, for any other text. Nothing is
downloaded.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from small_model import END, PAD, save_model
from world import CITY_FACTS, COUNTRY_FACTS, SYLLABLES

SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
#: pieces of a tool call: together `<tool_call>\n{"name": "search", "arguments": {"query": "..."}}\n</tool_call>`
CALL = ("<tool_call>\n", '{"name": "', "search", '", "arguments": {"', "query", '": "', '"}}', "\n</tool_call>")
WORDS = ("what is", "the ", " of ", " is ", "answer: ", "unknown", "[1] ", "[2] ", *COUNTRY_FACTS, *CITY_FACTS)


def make_tokenizer() -> Any:
    """A tokenizer with one token per piece; any other text is encoded as bytes."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    pieces = sorted((*CALL, *WORDS, *SYLLABLES), key=len, reverse=True)
    as_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    whole = ["".join(part for part, _ in as_bytes.pre_tokenize_str(piece)) for piece in pieces]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet()), *whole])}
    tokenizer = Tokenizer(BPE(vocab, [], ignore_merges=True))
    cut = Split(Regex("|".join(re.escape(piece) for piece in pieces)), "isolated")
    tokenizer.pre_tokenizer = Sequence([cut, as_bytes])
    tokenizer.decoder = ByteDecoder()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_model(folder: Path, *, seed: int = 0) -> int:
    """Write config.json, random float32 weights and the tokenizer; returns the number of parameters."""
    return save_model(
        folder,
        make_tokenizer(),
        seed=seed,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.05,  # larger than usual: with 0.02 the model takes twice as long to learn to copy
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(f"{target}: {make_model(target):,} parameters")
