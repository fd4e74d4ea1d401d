"""A small reward model from scratch, trained on pairs of answers of which the larger number is preferred."""

from __future__ import annotations

import random
from pathlib import Path

BATCH = 32


def make_reward_model(folder: Path, tokenizer_folder: Path, question: str, *, steps: int, seed: int = 0) -> float:
    """Train and write the model with its tokenizer; returns its accuracy on the pairs of the last 50 batches.

    Loss: -log sigmoid(r(preferred) - r(other)) (Bradley and Terry), after Ouyang et al. 2022, equation 1.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        num_labels=1,
    )
    model = Qwen3ForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def rewards(numbers: list[int]) -> torch.Tensor:
        """[BATCH]"""
        chats = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": str(number)}] for number in numbers
        ]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        return model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]

    right: list[float] = []
    for _ in range(steps):
        pairs = [sorted(rng.sample(range(10, 100), 2)) for _ in range(BATCH)]
        margin = rewards([great for _, great in pairs]) - rewards([small for small, _ in pairs])
        loss = -torch.nn.functional.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append(float((margin > 0).float().mean()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(right[-50:]) / len(right[-50:])
