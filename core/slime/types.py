"""The data that crosses every boundary: `Sample`, `Group` and the types of their fields.

A `Sample` is the only currency between user code and the kernel.  A `Group` is the samples of one
prompt; it is identified by its `index`, which they have as `group_index`, never by its position in a
list or the shape of a tensor.
This module imports nothing but the standard library.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Status(Enum):
    """The state of a sample."""

    PENDING = "pending"  #: not finished; it may have a begun response
    COMPLETED = "completed"  #: the model ended it (end-of-sequence or a stop condition)
    TRUNCATED = "truncated"  #: it hit the response or context limit
    ABORTED = "aborted"  #: generation was cut off from outside; partial tokens are kept
    FAILED = "failed"  #: generation or reward raised; `Sample.failure` says why


@dataclass
class SpecInfo:
    """Speculative-decoding counters of one response, as the engine reports them."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


# Inside `Sample` the bare names mean its class attributes, which type checkers refuse as types.
_Status: TypeAlias = Status
_SpecInfo: TypeAlias = SpecInfo


@dataclass
class Sample:
    """One prompt with one response.

    Tokens are `prompt tokens + response tokens`, so `len(tokens) - response_length` is the prompt
    length P.  `loss_mask`, `rollout_log_probs` have one entry per response token (length T).
    """

    Status: ClassVar[type[Status]] = Status
    SpecInfo: ClassVar[type[SpecInfo]] = SpecInfo

    #: which prompt it belongs to; siblings of one prompt share it
    group_index: int | None = None
    #: unique within a run
    index: int | None = None
    #: text, or a chat as a list of {"role", "content"} messages
    prompt: str | list[dict[str, Any]] = ""
    #: token ids of prompt and response, exactly as the engine consumed and produced them
    tokens: list[int] = field(default_factory=list)
    #: response as text, for people and rewards only
    response: str = ""
    #: number of response tokens T
    response_length: int = 0
    #: the expected answer, where the data has one
    label: str | None = None
    #: a number, or named numbers
    reward: float | dict[str, Any] | None = None
    #: [T] 1 = train on this token, 0 = do not; None means all ones
    loss_mask: list[int] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    multimodal_inputs: Any | None = None
    multimodal_train_inputs: Any | None = None

    #: versions of the weights that produced the response, in order, without repeats
    weight_versions: list[str] = field(default_factory=list)
    #: [T] log-probabilities of the response tokens under the engine that sampled them: `Generation.log_probs`, and the
    #: column `engine_logprob`
    rollout_log_probs: list[float] | None = None
    #: [P + T - 1, layers, experts per token] numbers of the experts that computed each token but the last in the
    #: engine; of layers without experts, zeros. Set with --use-rollout-routing-replay
    rollout_routed_experts: NDArray[np.integer[Any]] | None = field(default=None, compare=False)

    #: keep the sample in the group's statistics but out of the loss
    remove_sample: bool = False
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    #: seconds spent outside the engine (tools, environments)
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = field(default_factory=_SpecInfo)

    #: samples that came from one rollout of one prompt (not a `Rollout`, which is of many) share it and count once in
    #: the loss; set by slime to the `index` of the sample that was requested
    rollout_id: int | None = None
    #: the engine's own word for why generation ended ("stop", "length", "abort", ...)
    finish_reason: str | None = None
    #: why the sample is FAILED or ABORTED, in one line
    failure: str | None = None
    #: numbers that the generator reports of this sample, such as {"tools/search/calls": 2}; slime logs the mean of each
    #: over the samples that have it, as `rollout/NAME` and `eval/SET/NAME`
    metrics: dict[str, float] = field(default_factory=dict)
    #: name -> [T] numbers, one for each response token, NaN where there is none: what the generator and the rewards
    #: know of single tokens. slime stores them as float32, hands them to the estimator and logs them
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict, compare=False)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens P."""
        return len(self.tokens) - self.response_length

    @property
    def reward_value(self) -> float | None:
        """The scalar the estimator sees: the reward itself, or its `score` entry."""
        if isinstance(self.reward, dict):
            return float(self.reward["score"])
        return None if self.reward is None else float(self.reward)

    @property
    def trainable(self) -> bool:
        """Whether the sample may enter a training batch: generated, and nothing went wrong."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` reverses it."""
        row = asdict(self)
        return row | self._encoded()

    def to_row(self) -> dict[str, Any]:
        """`to_dict` without copies: it shares its lists with the sample, for those who write it out at once."""
        return {**vars(self), "spec_info": vars(self.spec_info), **self._encoded()}

    def _encoded(self) -> dict[str, Any]:
        """The fields that JSON has no type for."""
        fields: dict[str, Any] = {"status": self.status.value}
        if self.columns:
            import numpy as np

            # Not as numbers: JSON would turn float32 into text and NaN into something else.
            fields["columns"] = {
                name: base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()
                for name, values in self.columns.items()
            }
        if (routes := self.rollout_routed_experts) is not None:
            encoded = base64.b64encode(routes.tobytes()).decode()
            fields["rollout_routed_experts"] = {"dtype": routes.dtype.name, "shape": routes.shape, "base64": encoded}
        return fields

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Sample:
        """Rebuild a sample written by `to_dict`."""
        row = dict(row)
        row["status"] = Status(row["status"])
        row["spec_info"] = SpecInfo(**row["spec_info"])
        if (routes := row.get("rollout_routed_experts")) is not None:
            import numpy as np

            flat = np.frombuffer(base64.b64decode(routes["base64"]), dtype=routes["dtype"])
            row["rollout_routed_experts"] = flat.reshape(routes["shape"])
        if columns := row.get("columns"):
            import numpy as np

            row["columns"] = {
                name: np.frombuffer(base64.b64decode(encoded), dtype="<f4").astype(np.float32)
                for name, encoded in columns.items()
            }
        return cls(**row)


@dataclass
class Group:
    """All samples of one prompt."""

    index: int
    samples: list[Sample]
    #: rollouts since the one it was generated for; set by slime before a buffer filter sees the group
    age: int = 0
    #: times it was trained on (--max-reuse keeps groups for another time)
    uses: int = 0
