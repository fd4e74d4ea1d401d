"""What components receive and return, apart from samples. Tensors are named with their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response. Field names are the engine's."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    #: whether the response is scored on a held-out prompt and never trained on; not sent to the engine
    evaluation: bool = False
    routed_from: int = 0  #: tokens of the prompt whose experts earlier answers have: `Answers.routed_tokens`


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine answered for one request. T = number of generated tokens."""

    tokens: list[int]  #: [T]
    log_probs: list[float]  #: [T] at the sampling temperature
    finish_reason: str  #: "stop", "length" or "abort"
    weight_versions: list[str]
    meta: Mapping[str, Any] = field(default_factory=dict)  #: the engine's `meta_info`, without `routed_experts`
    #: [P + T - 1 - F, layers, experts per token] the experts of each token from F = `routed_from` on but the last, of a
    #: prompt of P tokens; None without --use-rollout-routing-replay
    routed_experts: NDArray[np.integer[Any]] | None = field(default=None, compare=False)
    routed_from: int = 0  #: as in the request's `SamplingParams`


@dataclass(frozen=True, slots=True)
class Reward:
    """One sample's score; `parts` are logged separately."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    #: name -> [T], a number for each response token, NaN where there is none: added to `Sample.columns`
    columns: Mapping[str, Sequence[float] | NDArray[np.floating[Any]]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Selection:
    """A buffer filter's decision: indices into the buffer it was shown."""

    keep: list[int]
    drop: dict[int, str] = field(default_factory=dict)  #: index -> reason


@dataclass(frozen=True, slots=True)
class EstimatorBatch:
    """The whole batch of one rollout, identical on every rank, so that statistics never depend on the
    parallel layout. N samples; sample i has T_i response tokens. All tensors are float32 on the CPU unless noted.
    """

    rewards: Tensor  #: [N]
    group_ids: Tensor  #: [N] int64; equal for the samples of one prompt
    #: [N] int64; equal for the samples that came from one rollout of one prompt, which count once in statistics
    rollout_ids: Tensor
    loss_masks: list[Tensor]  #: N x [T_i], 1 where the token is trained on
    #: N x [T_i] KL of the trainer to the reference, with --kl-coef or if the estimator needs a reference; else None. By
    #: --kl-reward-type; default: log pi / pi_ref (k1). 0 where a token is not trained on
    kl: list[Tensor] | None = None
    #: N x [T_i] critic values, if the estimator needs a critic; else None
    values: list[Tensor] | None = None
    #: name -> [N], the parts of the rewards (`rollout/reward/NAME`); NaN where a sample does not have the part
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    #: N x metadata of the sample: what its row states and what generator and rewards added
    metadata: Sequence[dict[str, Any]] = field(default_factory=list)
    #: name -> N x [T_i], NaN where there is no number: `engine_logprob`, and the columns of generators and rewards
    columns: Mapping[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advantages:
    """An estimator's answer: one advantage per response token, zero where the mask is zero."""

    advantages: list[Tensor]  #: N x [T_i]
    returns: list[Tensor] | None = None  #: N x [T_i] targets for a critic


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of one micro-batch, concatenated. All [M] float32 on the trainer's device.

    `sequence_ids` [M] int64 numbers the samples of the micro-batch 0..S-1, for sequence-level ratios.
    """

    log_probs: Tensor  #: with gradient
    old_log_probs: Tensor
    #: log pi - log pi_old, with gradient, 0 where the mask is 0; with `ratio="sequence"` in the spec, its mean over
    #: the trained tokens of the sequence, the same for all of them
    log_ratio: Tensor
    advantages: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor
    num_sequences: int
    eps_clip: float
    eps_clip_high: float
    #: dual clip (`--eps-clip-c`): bound of the ratio where the advantage is negative; None: unbounded
    eps_clip_c: float | None = None
