"""A small language model from scratch, as a Hugging Face folder; each example brings its own vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, END = "<|pad|>", "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def piece_tokenizer(special: tuple[str, ...], pieces: tuple[str, ...], pattern: str) -> Any:
    """A tokenizer that splits text by `pattern`, with a token per piece; the control tokens `special` come first."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    vocab = {token: i for i, token in enumerate([*special, *pieces])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex(pattern), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def save_model(folder: Path, tokenizer: Any, *, seed: int, **shape: Any) -> int:
    """Write tokenizer, config.json and random float32 weights; returns the number of parameters.

    The architecture is Qwen3; `shape` is passed to its configuration in transformers.
    """
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="float32",
        **shape,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())
