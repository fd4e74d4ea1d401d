"""A small language model from scratch, as a Hugging Face folder: architecture, random weights, tokenizer.

    python examples/quickstart/make_model.py FOLDER

About one million parameters of the Qwen3 architecture, and a tokenizer of one token per character with a
chat template.  Nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

CHARACTERS = "0123456789+-*/=? .,:()abcdefghijklmnopqrstuvwxyz"
USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"

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

    special = [PAD, END, USER, ASSISTANT]
    vocab = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(special)
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
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(f"{target}: {make_model(target):,} parameters")
