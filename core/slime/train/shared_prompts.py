"""Prompts that are computed once for several samples (`--share-prompts`): which samples are packed together.

Samples of a prompt begin with the same tokens, whose hidden states, keys and values are the same in all of them. So all
but the last token of a prompt with P tokens are packed once, and each sample continues them with tokens of its own: the
last of the prompt, and its response without the last (T in all, which predict the response). Of n samples,
(n - 1)(P - 1) tokens are saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch
    from slime.train.settings import TrainSettings

#: Samples share the tokens of their prompt if that saves at least this part of their tokens. With less, attention with
#: a mask costs more than the other layers save.
_LEAST_SAVED = 0.15
#: most elements of the mask of a sample that shares its prompt
_MASK_OF_SAMPLE = 1 << 22


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Samples that are packed together, of which the first `shared` tokens are the same and packed once."""

    samples: tuple[int, ...]  #: their indices in the batch
    shared: int = 0


def group_by_prompt(
    batch: TrainBatch, samples: Sequence[int], costs: Mapping[int, float], *, max_tokens: int, max_cost: float
) -> list[PrefixGroup]:
    """The samples with these indices, those of one prompt together where that saves time.

    Args:
        batch: The rollout's samples.
        samples: Which of them.
        costs: Time that each of them takes alone, in any unit.
        max_tokens: Of the samples that are packed together, each counted whole: attention keeps keys and values for
            each of them.
        max_cost: Of the samples that are packed together.
    """
    by_prompt: dict[bytes, list[int]] = {}
    found = []
    responses = batch.response_lengths.tolist()
    for i in samples:
        response = responses[i]
        if response * (len(batch.tokens[i]) - 1) > _MASK_OF_SAMPLE:
            found.append(PrefixGroup((i,)))
        else:
            by_prompt.setdefault(batch.tokens[i][:-response].tobytes(), []).append(i)
    for same in by_prompt.values():
        for part in _parts(batch, same, costs, max_tokens, max_cost):
            shared = _shared_tokens(len(batch.tokens[part[0]]), [responses[i] for i in part])
            found += [PrefixGroup(tuple(part), shared)] if shared else [PrefixGroup((i,)) for i in part]
    return found


def _parts(
    batch: TrainBatch, samples: Sequence[int], costs: Mapping[int, float], max_tokens: int, max_cost: float
) -> list[list[int]]:
    """The samples in parts within both limits, or of one sample."""
    parts: list[list[int]] = []
    tokens, cost = math.inf, math.inf
    for i in samples:
        tokens, cost = tokens + len(batch.tokens[i]), cost + costs[i]
        if tokens <= max_tokens and cost <= max_cost:
            parts[-1].append(i)
        else:
            parts.append([i])
            tokens, cost = len(batch.tokens[i]), costs[i]
    return parts


def _shared_tokens(first: int, responses: Sequence[int]) -> int:
    """How many tokens to pack once for samples of one prompt; 0 if it does not pay.

    Args:
        first: Tokens of the first sample.
        responses: Those of each sample's response.
    """
    shared = first - responses[0] - 1
    saved = (len(responses) - 1) * shared
    return shared if saved and saved >= _LEAST_SAVED * (len(responses) * shared + sum(responses)) else 0


def can_share_prompts(settings: TrainSettings, chunks: Sequence[Any], device_type: str) -> bool:
    """Whether attention, and whatever else looks at several tokens, knows of prefixes (`slime.train.attention`).

    TransformerEngine and layers of a model family's own do not, nor does context parallelism. Routers of experts count
    tokens for their losses, and multi-token prediction looks at the next ones. On GPUs it has not been measured. The
    answer is the same on every rank, as pipeline stages must run the same micro-batches.
    """
    transformer = settings.transformer
    return (
        device_type == "cpu"
        and not settings.use_transformer_engine
        and settings.layer_specs is None
        and transformer.context_parallel_size == 1
        and transformer.num_moe_experts is None
        and not any(getattr(chunk, "looks_ahead", False) for chunk in chunks)
    )
