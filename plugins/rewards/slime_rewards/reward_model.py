"""Reward from a Hugging Face sequence-classification model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from slime.errors import ConfigError
from slime.plugin import Context, Reward, Sample
from slime_rewards.batching import Batcher
from slime_rewards.options import RewardModelOptions

#: characters that are tokenized for each token that the model may read
_CHARS_PER_TOKEN = 32


class RewardModel:
    """An output of a sequence-classification model for prompt and response, or the sigmoid of it. Needs no label.

    Each worker process (`--reward-workers`) loads the model once and scores several samples at once. The model's input
    is prompt and response, as a conversation in the chat template of its own tokenizer, or concatenated if it has no
    template; of longer texts the last `max_tokens` tokens (and at most 32 characters per token). It computes in float32
    without dropout, so the samples that share a batch affect only the last digits.
    """

    def __init__(self, options: RewardModelOptions, context: Context) -> None:
        """Initialize.

        Raises:
            ConfigError: There is no such folder, or the model has no such output.
        """
        self._options = options
        if not Path(options.model_path).is_dir():
            raise ConfigError(f"model_path {options.model_path} is not a folder")
        torch.set_num_threads(options.threads)
        self._tokenizer = AutoTokenizer.from_pretrained(
            options.model_path, truncation_side="left", trust_remote_code=False
        )
        model = AutoModelForSequenceClassification.from_pretrained(
            options.model_path, dtype=torch.float32, trust_remote_code=False, weights_only=True
        )
        if options.index >= model.config.num_labels:
            raise ConfigError(
                f"index is {options.index}, and {options.model_path} has {model.config.num_labels} outputs"
            )
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(options.device).eval()
        self._max_chars = options.max_tokens * _CHARS_PER_TOKEN
        self._thread = ThreadPoolExecutor(1, "reward-model")
        self._batcher = Batcher(self._batch, options.batch_size, options.batch_wait_s, concurrency=1)
        context.logger.info("loaded the reward model %s", options.model_path)

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return await self._batcher.ask([self._text(sample) for sample in samples]) if samples else []

    async def _batch(self, texts: Sequence[str]) -> list[Reward]:
        loop = asyncio.get_running_loop()
        return [Reward(value) for value in await loop.run_in_executor(self._thread, self._values, list(texts))]

    def _values(self, texts: list[str]) -> list[float]:
        with torch.inference_mode():
            inputs = self._tokenizer(
                texts,
                padding=True,
                truncation=True,
                max_length=self._options.max_tokens,
                add_special_tokens=self._tokenizer.chat_template is None,  # a template adds its own
                return_tensors="pt",
            )
            if inputs["input_ids"].shape[1] == 0:
                return [0.0] * len(texts)
            outputs = self._model(**inputs.to(self._options.device)).logits[:, self._options.index]
            values: list[float] = (outputs.sigmoid() if self._options.output == "sigmoid" else outputs).tolist()
            return values

    def _text(self, sample: Sample) -> str:
        prompt: Any = sample.prompt
        if self._tokenizer.chat_template is None:
            text = prompt if isinstance(prompt, str) else "\n".join(str(m.get("content", "")) for m in prompt)
            return (str(text) + sample.response)[-self._max_chars :]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*messages, {"role": "assistant", "content": sample.response}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))[-self._max_chars :]
