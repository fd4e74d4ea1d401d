"""Everything a plugin author imports.

A plugin is a light module named by an entry point in group `slime`. It declares `slime_api = 1` and
implements hooks that return lists of frozen specs; each spec names the class that does the work as
`"package.module:Class"`, imported only when a run uses it:

    import slime.plugin as sp

    slime_api = 1

    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="length", factory="my_reward.impl:LengthReward", summary="1 - length/100")]

Components are built as `Class(options, context)` inside the process that uses them. This module
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

from slime.architecture import Architecture, Rule
from slime.types import Group, Sample, SpecInfo, Status
from slime.watching import Curve, Curves, Note, Panel, RunView, Table, Tracker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = [
    "API_VERSION",
    "Advantages",
    "Architecture",
    "BufferFilter",
    "BufferFilterSpec",
    "ComponentSpec",
    "Context",
    "Curve",
    "Curves",
    "DataSource",
    "DataSourceSpec",
    "Estimator",
    "EstimatorBatch",
    "EstimatorSpec",
    "Family",
    "FamilySpec",
    "Generation",
    "Generator",
    "GeneratorSpec",
    "Group",
    "NoOptions",
    "Note",
    "Options",
    "Panel",
    "PanelSpec",
    "PolicyClient",
    "Reward",
    "RewardModel",
    "RewardSpec",
    "Rule",
    "RunView",
    "Sample",
    "SamplingParams",
    "Selection",
    "SpecInfo",
    "Status",
    "Table",
    "TokenBatch",
    "Tracker",
    "TrackerSpec",
    "hookimpl",
    "hookspec",
]

#: The plugin API that this slime supports. A plugin module states the one it was written for as `slime_api`.
API_VERSION = 1

hookspec = pluggy.HookspecMarker("slime")
hookimpl = pluggy.HookimplMarker("slime")


class Options(BaseModel):
    """Base of a component's options: frozen; an unknown option is an error, and so are NaN and infinity for a number.

    A field for which infinity has a meaning is declared with `Field(allow_inf_nan=True)`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NoOptions(Options):
    """For components without options."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a component may know about the run it is built for."""

    seed: int
    run_dir: Path
    logger: logging.Logger
    #: the resolved run configuration (`slime.config.RunConfig`), to be read only
    config: Any = None
    #: the tokenizer of `--hf-checkpoint`, for components of the rollout process
    tokenizer: Any = None
    #: address of the run's own engines, OpenAI-compatible below `/v1`, for components of the rollout; None if the
    #: run starts none. The engines are not up yet while components are built
    engine_url: str | None = None
    #: key of these engines: send it as `Authorization: Bearer KEY`, or give it to OpenAI's clients as API key. It is a
    #: new one in every run; write it to no file or log
    engine_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """What every kind of component declares."""

    #: selectable name, `[a-z][a-z0-9_-]*`; `PLUGIN/NAME` if two plugins share it
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
    #: how far the ratio may go below and above 1 if the run sets neither --eps-clip nor --eps-clip-high
    clip_range: tuple[float, float] = (0.2, 0.2)
    #: names that it reads from `EstimatorBatch.columns`; slime checks that every batch has them
    columns: frozenset[str] = frozenset()
    #: whether it subtracts the KL of --kl-coef (`EstimatorBatch.kl`) from the reward; otherwise --kl-coef is refused
    takes_kl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec(ComponentSpec):
    """Scores samples. `scope="group"`: `score` is called with whole groups."""

    kind: ClassVar[str] = "reward"
    scope: Literal["sample", "group"] = "sample"
    #: seconds one `score` call may take; a run overrides it with --reward.timeout-s
    timeout_s: float = 60.0
    #: whether equal samples always get equal rewards (the contract kit then checks it)
    deterministic: bool = True
    #: "process": scored in worker processes, which are killed when they hang or die. "none": in the rollout
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
    #: seconds a sample may go without progress; default: --rollout-timeout-s. --generator.timeout-s overrides it
    timeout_s: float | None = None
    #: whether `generate` can continue a sample that already has response tokens: it lets the policy continue
    #: `Sample.tokens` by at most max_new_tokens - response_length tokens, and keeps the tokens, mask, log-probs and
    #: weight versions that are there (--partial-rollout needs this)
    resumes: bool = False
    #: whether a conversation has exactly one turn, so that --max-turns would change nothing
    single_turn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec(ComponentSpec):
    """Sends the numbers of a run somewhere."""

    kind: ClassVar[str] = "tracker"


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelSpec(ComponentSpec):
    """Draws something of a run into the page of `slime view` and into `report.html`."""

    kind: ClassVar[str] = "panel"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec(ComponentSpec):
    """How models of one family are built in Megatron, and how their tensors map to Hugging Face's and the engine's."""

    kind: ClassVar[str] = "family"
    #: values of `model_type` in config.json; a run uses the family that names its model's
    model_types: tuple[str, ...]
    #: the entry of `architectures` in config.json that it implements
    causal_lm: str
    #: a small config.json with every key that the family reads, which `slime plugins check` tries it on
    example: Mapping[str, Any] = field(default_factory=dict, hash=False)
    #: why the engines cannot serve such models, which can then only be trained by a run without engines
    not_served: str = ""


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


class PolicyClient(Protocol):
    """The engines, seen from a generator: token ids in, token ids and log-probs out."""

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """Generate one response.

        Args:
            tokens: Token ids of the prompt, and of the response so far when one is continued.
            sampling: How to sample.
            session: Requests with the same session go to the same engine, which then has their prefix cached.
        """
        ...


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
    #: N x [T_i] KL of the trainer to the reference, if the run has one; else None. By --kl-reward-type; default:
    #: log pi / pi_ref (k1). 0 where a token is not trained on
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


class Estimator(Protocol):
    """Contract of kind `estimator`. An optional method

        objective(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]

    returns per-token loss [M] and per-token metrics [M]; without it the clipped surrogate is used.
    """

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """Compute one advantage per response token.

        Args:
            batch: All samples of one rollout. It must not be changed.

        Returns:
            Tensors of the shapes of `batch.loss_masks`, zero where the mask is zero.
        """
        ...


class Family(Protocol):
    """Contract of kind `family`. It is imported before a run starts, so its module must not import torch. A family
    may also have the method

        layer_specs(spec, transformer, *, transformer_engine: bool) -> Any

    which returns Megatron's layer specs with modules of its own in them. It is called in the trainer.
    """

    def describe(self, config: Mapping[str, Any]) -> Architecture:
        """Describe the model of a `config.json`.

        Args:
            config: The file's content.

        Raises:
            ConfigError: A setting would change the computation, and the family does not have it.
        """
        ...


class RewardModel(Protocol):
    """Contract of kind `reward`."""

    def score(self, samples: Sequence[Sample]) -> list[Reward] | Awaitable[list[Reward]]:
        """Score samples.

        With `async def`, calls overlap, and one that exceeds its deadline is cancelled. With plain `def`, each worker
        process makes one call at a time, and is killed if the call exceeds its deadline.

        Args:
            samples: Finished samples; with `scope="group"`, all samples of one prompt. They must not be changed.

        Returns:
            One finite reward per sample, in the same order.
        """
        ...


class DataSource(Protocol):
    """Contract of kind `datasource`.

    slime tracks the groups it has taken: finished ones wait in its own buffer, and it generates again those that were
    cut short or were in flight when a checkpoint was saved. Nothing is returned to the source.

    A source may also have these methods:

    generated(groups)   called once per batch with copies of the generated and scored groups, including those that a
                        filter dropped, so that a curriculum can learn which prompts are hard.
    metrics()           numbers by name, logged with every rollout.
    close()             called once, when the run ends.
    """

    def take(self, n: int) -> list[Group]:
        """Take the next prompts.

        Args:
            n: Number of prompts.

        Returns:
            `n` groups of `n_samples_per_prompt` pending samples. No `Group.index` and no `Sample.index` is used twice
            in a run.
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

    A filter that keeps state between calls may also have `state_dict()`, which returns JSON-ready state, and
    `load_state_dict(state)`, as data sources do. Checkpoints save the state; a filter that loads it makes the same
    choices as the one that was saved.
    """

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Choose groups to train on.

        Args:
            buffer: The finished groups. `Group.age` and `Group.uses` tell how old a group is and how often it was used.
            want: The most groups that may be kept.

        Returns:
            Valid indices into `buffer`; none is both kept and dropped. All other groups stay in the buffer.
        """
        ...


class Generator(Protocol):
    """Contract of kind `generator`.

    A generator may also have `close()`, plain or `async`, to stop what it started, such as servers and processes. It is
    called when the run ends, in the event loop that called `generate`. It may be called twice, and without an earlier
    call of `generate`.
    """

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """Generate the response to one prompt.

        Args:
            sample: A pending sample with the prompt and its tokens. It may be changed and returned.
            sampling: How to sample.
            policy: The engines that serve the policy.

        Returns:
            One or several finished samples. slime gives all of them the same `rollout_id`.
        """
        ...
