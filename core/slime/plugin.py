"""Everything a plugin author imports.

A plugin is a light module named by an entry point in group `slime`.  It declares `slime_api = 1` and
implements hooks that return lists of frozen specs; each spec names the class that does the work as
`"package.module:Class"`, imported only when a run uses it:

    import slime.plugin as sp

    slime_api = 1

    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="length", factory="my_reward.impl:LengthReward", summary="1 - length/100")]

Components are built as `Class(options, context)` inside the process that uses them.  This module
imports only pluggy and pydantic; torch appears in annotations alone.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import pluggy
from pydantic import BaseModel, ConfigDict

from slime.types import Group, Sample, SpecInfo, Status

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "API_VERSION",
    "Advantages",
    "BufferFilter",
    "BufferFilterSpec",
    "ComponentSpec",
    "Context",
    "DataSource",
    "DataSourceSpec",
    "Estimator",
    "EstimatorBatch",
    "EstimatorSpec",
    "Generation",
    "Generator",
    "GeneratorSpec",
    "Group",
    "NoOptions",
    "Options",
    "PolicyClient",
    "Reward",
    "RewardModel",
    "RewardSpec",
    "Sample",
    "SamplingParams",
    "Selection",
    "SpecInfo",
    "Status",
    "TokenBatch",
    "hookimpl",
    "hookspec",
]

#: The plugin API this slime speaks.  A plugin module states the one it was written for as `slime_api`.
API_VERSION = 1

hookspec = pluggy.HookspecMarker("slime")
hookimpl = pluggy.HookimplMarker("slime")


# --- options and context -------------------------------------------------------------------------


class Options(BaseModel):
    """Base of a component's options: frozen, and an unknown option is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoOptions(Options):
    """For components without options."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a component may know about the run it is built for."""

    seed: int
    run_dir: Path
    logger: logging.Logger
    #: the resolved run configuration (`slime.config.RunConfig`); read it, never change it
    config: Any = None
    #: the tokenizer of `--hf-checkpoint`, where the component lives in the rollout process
    tokenizer: Any = None
    #: address of the run's own engines, OpenAI-compatible below `/v1`, for components of the rollout; None where the
    #: run starts none.  They answer from the first rollout on, not yet while components are built
    engine_url: str | None = None


# --- specs: what a plugin returns from its hooks --------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """What every kind of component declares."""

    #: selectable name, `[a-z][a-z0-9_-]*`; `PLUGIN/NAME` where two plugins share it
    name: str
    #: `"package.module:Class"`, imported when a run uses the component
    factory: str
    options: type[Options] = NoOptions
    #: one line for `slime plugins`
    summary: str = ""
    #: packages that the factory needs beyond the plugin's own dependencies, as PEP 508 requirements
    requires: tuple[str, ...] = ()
    #: address of its documentation
    docs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSpec(ComponentSpec):
    """Turns rewards into advantages, and may replace the policy objective."""

    kind: ClassVar[str] = "estimator"
    #: what the kernel must provide: "group" (several samples a prompt), "critic", "reference"
    needs: frozenset[Literal["group", "critic", "reference"]] = frozenset()
    #: whether the importance ratio is per token or per sequence
    ratio: Literal["token", "sequence"] = "token"
    #: how far the ratio may go below and above 1 where the run states neither --eps-clip nor --eps-clip-high
    clip_range: tuple[float, float] = (0.2, 0.2)
    #: whether it takes the KL of --kl-coef off the reward (`EstimatorBatch.kl`); --kl-coef is refused where not
    takes_kl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec(ComponentSpec):
    """Scores samples.  `scope="group"`: `score` is called with whole groups."""

    kind: ClassVar[str] = "reward"
    scope: Literal["sample", "group"] = "sample"
    #: seconds one `score` call may take; a run overrides it with --reward.timeout-s
    timeout_s: float = 60.0
    #: whether equal samples always get equal rewards (the contract kit then checks it)
    deterministic: bool = True
    #: "process": scored in worker processes, which are killed when they hang or die.  "none": in the rollout
    #: process itself, where a busy loop would freeze every sample; only for rewards that cannot block
    isolation: Literal["process", "none"] = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSourceSpec(ComponentSpec):
    """Where prompts come from."""

    kind: ClassVar[str] = "datasource"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferFilterSpec(ComponentSpec):
    """Chooses which buffered groups are trained on."""

    kind: ClassVar[str] = "buffer_filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec(ComponentSpec):
    """Turns one prompt sample into finished samples."""

    kind: ClassVar[str] = "generator"
    #: False for generators that never ask the policy (the run then starts no engines)
    needs_engine: bool = True
    #: seconds a sample may go without progress; default: --rollout-timeout-s.  --generator.timeout-s overrides it
    timeout_s: float | None = None
    #: whether `generate` continues a sample that has response tokens already: it asks the policy to go on after
    #: `Sample.tokens`, for at most max_new_tokens - response_length more, and keeps tokens, mask, log-probs and weight
    #: versions that are there (--partial-rollout needs it)
    resumes: bool = False


# --- what components exchange with the kernel -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response.  Field names are the engine's."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    #: whether the response is scored on a held-out prompt and never trained on; the engine is not told
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine answered for one request.  T = number of generated tokens."""

    tokens: list[int]  #: [T]
    log_probs: list[float]  #: [T] at the sampling temperature
    finish_reason: str  #: "stop", "length" or "abort"
    weight_versions: list[str]
    meta: Mapping[str, Any] = field(default_factory=dict)  #: the engine's `meta_info`, untouched


class PolicyClient(Protocol):
    """The engines, seen from a generator: token ids in, token ids and log-probs out."""

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """One response to `tokens`.  Requests with one `session` go to one engine (prefix cache)."""
        ...


@dataclass(frozen=True, slots=True)
class Reward:
    """One sample's score; `parts` are logged apart."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Selection:
    """A buffer filter's decision: indices into the buffer it was shown."""

    keep: list[int]
    drop: dict[int, str] = field(default_factory=dict)  #: index -> reason


@dataclass(frozen=True, slots=True)
class EstimatorBatch:
    """The whole batch of one rollout, on every rank alike, so that statistics never depend on the
    parallel layout.  N samples; sample i has T_i response tokens.  All tensors float32 on CPU unless said.
    """

    rewards: Tensor  #: [N]
    group_ids: Tensor  #: [N] int64; equal for the samples of one prompt
    #: [N] int64; equal for the samples that came from one rollout of one prompt, which count once in statistics
    rollout_ids: Tensor
    loss_masks: list[Tensor]  #: N x [T_i], 1 where the token is trained on
    #: N x [T_i] KL of the trainer to the reference, where the run has one; else None.  By --kl-reward-type: log pi /
    #: pi_ref (k1) unless the run says otherwise
    kl: list[Tensor] | None = None
    #: N x [T_i] critic values, where the estimator needs a critic; else None
    values: list[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Advantages:
    """An estimator's answer: one advantage per response token, zero where the mask is zero."""

    advantages: list[Tensor]  #: N x [T_i]
    returns: list[Tensor] | None = None  #: N x [T_i] targets for a critic


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of one micro-batch, concatenated.  All [M] float32 on the trainer's device.

    `sequence_ids` [M] int64 numbers the samples of the micro-batch 0..S-1, for sequence-level ratios.
    """

    log_probs: Tensor  #: with gradient
    old_log_probs: Tensor
    #: log pi - log pi_old, with gradient, 0 where the mask is 0; where the spec says `ratio="sequence"`, its mean over
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


class Estimator(Protocol):
    """Contract of kind `estimator`.  An optional method

        objective(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]

    returns per-token loss [M] and per-token metrics [M]; without it the clipped surrogate is used.
    """

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per token.  Must not change its input."""
        ...


class RewardModel(Protocol):
    """Contract of kind `reward`."""

    def score(self, samples: Sequence[Sample]) -> list[Reward] | Awaitable[list[Reward]]:
        """One reward per sample, in the same order, finite.

        `async def`: calls overlap, and one that outlasts its deadline is cancelled.  Plain `def`: one call at a time
        in each worker process, and a call that outlasts its deadline ends with its process.
        """
        ...


class DataSource(Protocol):
    """Contract of kind `datasource`.

    slime keeps account of what it took: finished groups wait in its own buffer, and those whose generation was cut
    short, or that a checkpoint had in flight, it hands out again by itself.  Nothing comes back to the source.

    A source may have more methods:

    generated(groups)   called once for each batch with copies of what was generated for it, scored, groups included
                        that a filter dropped.  A curriculum learns from it what was hard.
    put(groups)         takes groups back that shall be generated another time; they come first in later `take`s, as
                        pending samples with the indices they had.  slime itself never calls it: it is for sources
                        around another source.
    metrics()           numbers by name, logged with every rollout.
    close()             called once, when the run ends.
    """

    def take(self, n: int) -> list[Group]:
        """The next `n` prompts as groups of `n_samples_per_prompt` pending samples.

        No `Group.index` and no `Sample.index` is used twice in a run.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state: a source that loads it yields the same next groups."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        ...


class BufferFilter(Protocol):
    """Contract of kind `buffer_filter`.

    A filter that remembers something between calls may have two methods more, as data sources have them:
    `state_dict()`, JSON-ready, and `load_state_dict(state)`.  A checkpoint holds the state; a filter that loads it
    chooses as the one that gave it would have.
    """

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep at most `want` groups; indices valid and disjoint.  `Group.age` and `Group.uses` say what was before."""
        ...


class Generator(Protocol):
    """Contract of kind `generator`.

    A generator may have one method more, `close()`, plain or `async`: it is called when the run ends, in the event loop
    that called `generate`, and ends what the generator has started, such as servers and processes.  It may be called
    twice, and without `generate` before it.
    """

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """Finished samples for one pending sample: one, or several, to which slime gives one `rollout_id`."""
        ...
