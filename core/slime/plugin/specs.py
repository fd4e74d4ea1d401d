"""What a plugin declares: the spec of each kind of component, its options, and what it is built with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pluggy
from pydantic import BaseModel, ConfigDict

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
    #: schemas of the tools that the run's generator shows in prompts: data sources render prompts with them
    prompt_tools: tuple[Mapping[str, Any], ...] = ()


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
    #: `"package.module:function"`, called with options and configuration: JSON schemas of the tools that prompts show
    #: to the model. They count as part of the prompts
    prompt_tools: str = ""


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
