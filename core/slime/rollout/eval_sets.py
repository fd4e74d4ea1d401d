"""Held-out prompts, read once and handed out afresh for every evaluation."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.eval_sets import EvalSetSettings, eval_sets
from slime.data.dataset import PromptFile
from slime.data.tokenize import prompt_ids
from slime.types import Group, Sample

if TYPE_CHECKING:
    from slime.config import RunConfig


@dataclass(frozen=True)
class EvalSet:
    """The prompts of one held-out set, tokenised."""

    settings: EvalSetSettings
    #: one pending sample per prompt, never touched
    prompts: list[Sample]

    def groups(self) -> list[Group]:
        """Fresh pending samples; their indices, and so their seeds, are the same every time."""
        copies = self.settings.n_samples
        return [
            Group(
                number,
                [
                    Sample(
                        group_index=number,
                        index=number * copies + copy,
                        prompt=deepcopy(prompt.prompt),
                        tokens=list(prompt.tokens),
                        label=prompt.label,
                        metadata=deepcopy(prompt.metadata),
                    )
                    for copy in range(copies)
                ],
            )
            for number, prompt in enumerate(self.prompts)
        ]


def load_eval_sets(config: RunConfig, tokenizer: Any) -> list[EvalSet]:
    """All sets of the configuration, in its order.  Raises `DataError` with file and line."""
    return [_load(one, config, tokenizer) for one in eval_sets(config)]


def _load(one: EvalSetSettings, config: RunConfig, tokenizer: Any) -> EvalSet:
    context = config.rollout.rollout_max_context_len
    limits = [one.max_prompt_len, None if context is None else context - one.max_response_len]
    limit = min((limit for limit in limits if limit is not None), default=None)
    file = PromptFile(
        one.path,
        input_key=one.input_key,
        label_key=one.label_key,
        metadata_key=one.metadata_key,
        tool_key=config.data.tool_key,
    )
    try:
        rows = list(file)
    finally:
        file.close()
    return EvalSet(
        one,
        [
            Sample(
                prompt=row.prompt,
                tokens=prompt_ids(
                    row,
                    tokenizer,
                    apply_chat_template=one.apply_chat_template,
                    max_tokens=limit,
                    template_kwargs=config.data.apply_chat_template_kwargs,
                ),
                label=row.label,
                metadata=row.metadata,
            )
            for row in rows
        ],
    )
