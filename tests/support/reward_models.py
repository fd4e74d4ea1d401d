"""A tiny reward model: a sequence classifier with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_models import VOCAB_SIZE, write_tiny_tokenizer


def make_tiny_reward_model(folder: Path, *, outputs: int = 1, chat: bool = True, seed: int = 0) -> Path:
    """Write the model with its tokenizer; returns the folder.

    outputs   numbers it gives
    chat      whether its tokenizer has a chat template
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    config: Any = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        num_labels=outputs,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    write_tiny_tokenizer(folder)
    if not chat:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = None
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
    return folder
