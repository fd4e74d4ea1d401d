"""Held-out prompts, read once and handed out afresh for every evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.data.dataset import PromptFile
from slime.data.tokenize import longest_prompt, prompt_ids
from slime.types import Group, Sample

if TYPE_CHECKING:
    from slime.config import RunConfig


@dataclass(frozen=True)
class EvalSet:
    """The prompts of one held-out set, tokenised."""

    name: str
    #: one pending sample per prompt, never touched
    prompts: list[Sample]

    def groups(self, samples_per_prompt: int) -> list[Group]:
        """Fresh pending samples; their indices, and so their seeds, are the same every time."""
        return [
            Group(
                number,
                [
                    Sample(
                        group_index=number,
                        index=number * samples_per_prompt + copy,
                        prompt=prompt.prompt,
                        tokens=list(prompt.tokens),
                        label=prompt.label,
                        metadata=dict(prompt.metadata),
                    )
                    for copy in range(samples_per_prompt)
                ],
            )
            for number, prompt in enumerate(self.prompts)
        ]


def load_eval_sets(config: RunConfig, tokenizer: Any) -> list[EvalSet]:
    """The sets of `--eval-prompt-data`, in its order.  Raises `DataError` with file and line."""
    return [_load(name, path, config, tokenizer) for name, path in config.evaluation.eval_prompt_data]


def _load(name: str, path: str, config: RunConfig, tokenizer: Any) -> EvalSet:
    data = config.data
    file = PromptFile(path, input_key=data.input_key, label_key=data.label_key, metadata_key=data.metadata_key)
    response = config.evaluation.eval_max_response_len or config.rollout.rollout_max_response_len
    limit = longest_prompt(config.rollout, response)
    try:
        rows = list(file)
    finally:
        file.close()
    return EvalSet(
        name,
        [
            Sample(
                prompt=row.prompt,
                tokens=prompt_ids(row, tokenizer, apply_chat_template=data.apply_chat_template, max_tokens=limit),
                label=row.label,
                metadata=row.metadata,
            )
            for row in rows
        ],
    )
