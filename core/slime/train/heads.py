"""What is taken from the last stage's output for each response token: a policy's log-probs, or a critic's value.

A head sees the output [1, L, ...] of one micro-batch and answers vectors [R_l] float32, with one entry for each
response token that is predicted on this context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.core import parallel_state
from torch import Tensor

from slime.train.logprob import log_probs_and_entropy
from slime.train.packing import MicroBatch
from slime.train.settings import TrainSettings

#: (output [1, L, ...], micro-batch) -> vectors [R_l]
TokenHead = Callable[[Tensor, MicroBatch], tuple[Tensor, ...]]


def policy_head(settings: TrainSettings, *, temperature: float) -> TokenHead:
    """Log-probs and entropy at `temperature`, from logits [1, L, V / tp]."""
    group = parallel_state.get_tensor_model_parallel_group()

    def head(logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        return log_probs_and_entropy(
            logits[0],
            micro_batch.rows,
            micro_batch.targets,
            temperature=temperature,
            vocab_size=settings.vocab_size,
            group=group,
        )

    return head


def value_head(values: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
    """The value of the state before each response token, from values [1, L, 1]: of the rows that predict the tokens."""
    return (values[0, :, 0][micro_batch.rows].float(),)
