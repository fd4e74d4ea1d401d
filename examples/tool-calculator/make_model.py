"""A small language model from scratch, as a Hugging Face folder: architecture, random weights, tokenizer.

    python examples/tool-calculator/make_model.py FOLDER

A third of a million parameters of the Qwen3 architecture.  The tokenizer has a token for every character, and one for
each of the two fixed parts of a tool call, so that a call is short.  Nothing is downloaded.
"""

from __future__ import annotations

import re
import string
import sys
from pathlib import Path

PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<|user|>", "<|assistant|>", "<|tool|>")
#: around the expression in `<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>`
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path) -> int:
    """Write the tokenizer files; returns the vocabulary size."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL, *CALL, *string.printable[:95], "\n"])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex("|".join(re.escape(part) for part in CALL) + "|[\\s\\S]"), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return len(vocab)


def make_model(folder: Path, *, seed: int = 0) -> int:
    """Write config.json, random float32 weights and the tokenizer; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = make_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PAD),
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(f"{target}: {make_model(target):,} parameters")
