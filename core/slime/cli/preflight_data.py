"""Prompt files before a run: every row read, every prompt counted in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cli.preflight_model import ModelFacts
from slime.config import RunConfig
from slime.config.eval_sets import eval_sets
from slime.data import PromptFile, check_prompt_lengths
from slime.errors import ConfigError


@dataclass(frozen=True)
class DataFacts:
    """One prompt file."""

    name: str  #: "training", or an evaluation set
    path: Path
    rows: int
    longest: int  #: tokens of its longest prompt
    limit: int  #: tokens a prompt may have

    def __str__(self) -> str:
        return f"{self.path}: {self.rows} rows, longest prompt {self.longest} of at most {self.limit} tokens"


@dataclass(frozen=True)
class PromptSet:
    """One file to check, and how long its responses may be."""

    name: str
    path: Path
    response: int
    input_key: str
    label_key: str | None
    metadata_key: str
    apply_chat_template: bool
    #: the option that limits its prompts, where one does
    max_prompt: int | None


def prompt_sets(config: RunConfig, *, with_engines: bool) -> Iterator[PromptSet]:
    """The files the configuration names.  Without engines responses come from the data, and leave what they leave."""
    response = config.rollout.rollout_max_response_len if with_engines else 1
    data = config.data
    if data.prompt_data is not None:
        yield PromptSet(
            "training",
            Path(data.prompt_data),
            response,
            data.input_key,
            data.label_key,
            data.metadata_key,
            data.apply_chat_template,
            config.rollout.rollout_max_prompt_len,
        )
    for one in eval_sets(config):
        yield PromptSet(
            one.name,
            Path(one.path),
            one.max_response_len if with_engines else 1,
            one.input_key,
            one.label_key,
            one.metadata_key,
            one.apply_chat_template,
            one.max_prompt_len,
        )


def check_data(config: RunConfig, prompts: PromptSet, model: ModelFacts | None, tokenizer: Any | None) -> DataFacts:
    """Read one file whole.

    Without a tokenizer, prompts are not counted.  Raises `DataError` for the first bad row, `ConfigError` when
    no prompt would have room.
    """
    file = PromptFile(
        prompts.path, input_key=prompts.input_key, label_key=prompts.label_key, metadata_key=prompts.metadata_key
    )
    try:
        limit = longest = 0
        if tokenizer is not None and model is not None:
            limit = prompt_room(config, model, prompts.response, prompts.max_prompt)
            longest = check_prompt_lengths(
                file, tokenizer, apply_chat_template=prompts.apply_chat_template, max_tokens=limit
            )
        return DataFacts(prompts.name, prompts.path, len(file), longest, limit)
    finally:
        file.close()


def prompt_room(config: RunConfig, model: ModelFacts, response: int, max_prompt: int | None) -> int:
    """Tokens a prompt may have beside a response of `response` tokens, at most `max_prompt`.

    Raises `ConfigError` when that is none, and for a context the engines would not accept.
    """
    engine_context = int(config.sglang.get("context_length", model.context))
    context = config.rollout.rollout_max_context_len or engine_context
    if context > engine_context:
        whose = (
            "--sglang-context-length is" if "context_length" in config.sglang else f"the model in {model.folder} has"
        )
        raise ConfigError(f"--rollout-max-context-len {context} is too long: {whose} {engine_context}")
    if response >= context:
        raise ConfigError(
            f"a response of {response} tokens (--rollout-max-response-len, --eval-max-response-len) leaves no room for"
            f" a prompt in the context of {context} tokens. Shorten responses"
        )
    return min(max_prompt or context, context - response)
