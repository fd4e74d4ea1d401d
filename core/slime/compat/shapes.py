"""The call shapes that a function or class given by path may have, recognised by its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slime.compat.signatures import Definition, Signature
from slime.errors import PluginNotFoundError
from slime.plugin import BufferFilterSpec, ComponentSpec, DataSourceSpec, GeneratorSpec, RewardSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """One call shape. Parameters are matched by name."""

    #: as messages show it
    text: str
    #: what turns such a function into a component, as "package.module:Name"
    adapter: str
    #: parameters that a function of this shape must have; if there are none, arguments are passed by position
    core: frozenset[str]
    #: all parameters that slime passes, if the function has them
    offers: frozenset[str]
    #: of a class: the method that is called; the parameters above are then the method's
    method: str
    #: of a class: the parameters that its constructor may have
    constructor: frozenset[str]
    #: True: only `async def`; False: only `def`; None: either
    asynchronous: bool | None
    #: whether it may have other parameters too: columns of the data set, which are known once there are samples
    takes_columns: bool

    @classmethod
    def of(cls, text: str, adapter: str, core: str, extra: str = "") -> Shape:
        """Read a shape from its text.

        Args:
            text: `(a, b) -> c`, `async (a) -> c`, or `class (a) with method(b) -> c`; `[async]` if it may be either.
            adapter: Module in `slime.compat`, and a name in it.
            core: The parameters that it must have.
            extra: Parameters that slime passes beside those in the text.
        """
        called, method = re.findall(r"\(.*?\)", text), re.search(r"(\w+)\(", text)
        named = [frozenset(re.findall(r"(?<=[( ])\w+", parameters)) for parameters in called]
        return cls(
            text=text,
            adapter=f"slime.compat.{adapter}",
            core=frozenset(core.split()),
            offers=named[1 if method else 0] | set(extra.split()),
            method=method[1] if method else "",
            constructor=named[0] | {"args"} if method else frozenset(),
            asynchronous=None if "[async]" in text else text.startswith("async"),
            takes_columns="**columns" in text,
        )

    def misfit(self, found: Definition) -> str | None:
        """Why a definition does not have this shape; None if it does."""
        if found.signature is None:
            return "its parameters cannot be read"
        if found.is_class != bool(self.method):
            return f"it is a {'class' if found.is_class else 'function'}"
        if not found.is_class:
            return self._misfit_of(found.signature)
        called = found.methods.get(self.method)
        if called is None:
            return f"it has no method {self.method}"
        if (misfit := self._misfit_of(called)) is not None:
            return f"{self.method}{called.text}: {misfit}"
        surplus = set(found.signature.required) - self.constructor
        return f"slime has no value for its constructor's parameter {', '.join(sorted(surplus))}" if surplus else None

    def _misfit_of(self, called: Signature) -> str | None:
        if not self.core:
            if len(called.required) > len(self.offers):
                return f"it takes {len(called.required)} arguments, and slime passes {len(self.offers)}"
        elif missing := sorted(self.core - set(called.names)):
            return f"it has no parameter called {' or '.join(missing)}"
        elif not self.takes_columns and (surplus := sorted(set(called.required) - self.offers)):
            return f"slime has no value for the parameter {', '.join(surplus)}"
        if self.asynchronous is not None and called.is_async != self.asynchronous:
            return "it must be an `async def`" if self.asynchronous else "it must be a plain `def`"
        return None


@dataclass(frozen=True, slots=True)
class Role:
    """What a function given by path is used for: it fills a slot of the run, or processes a finished batch."""

    name: str
    #: as people call it
    title: str
    shapes: tuple[Shape, ...]
    #: conventional names, which a reference may leave out; names in an earlier tuple take precedence
    usual: tuple[tuple[str, ...], ...] = ()
    #: the spec class of its component
    spec: type[ComponentSpec] = ComponentSpec

    def shape_of(self, found: Definition) -> Shape | None:
        """The first shape that fits a definition."""
        return next((shape for shape in self.shapes if shape.misfit(found) is None), None)

    @property
    def expected(self) -> str:
        """Its shapes, for messages."""
        return "; or ".join(shape.text for shape in self.shapes)

    def why_not(self, found: Definition) -> str:
        """Why no shape fits a definition: what it lacks for the most similar shape."""
        names = frozenset(found.signature.names) if found.signature and not found.is_class else frozenset()

        def similarity(shape: Shape) -> tuple[bool, bool, int]:
            return bool(shape.method) == found.is_class, shape.core <= names, len(shape.core & names)

        return max(self.shapes, key=similarity).misfit(found) or ""


_REWARD_ONE = Shape.of("[async] (args, sample, **kwargs) -> float | dict", "rewards:sample_reward", "sample")
_REWARD_SEVERAL = Shape.of("[async] (args, samples, **kwargs) -> list", "rewards:batch_reward", "samples")
_REWARD_MODEL = Shape.of(
    "class (model_path) with [async] compute_reward(prompts, responses) -> list[float]",
    "rewards:model_reward",
    "prompts responses",
    "labels",
)
_REWARD_TRL = Shape.of(
    "[async] (prompts, completions, completion_ids, **columns) -> list[float]",
    "other_rewards:trl_reward",
    "completions",
)
_REWARD_VERL = Shape.of(
    "[async] (data_source, solution_str, ground_truth, extra_info) -> float | dict",
    "other_rewards:verl_reward",
    "solution_str",
)
_GENERATE_SEVERAL = Shape.of(
    "async (args, samples, evaluation=False) -> list[Sample]",
    "generators:LocalGenerator",
    "samples",
    "sampling_params sampling policy tokenizer",
)
_GENERATE_ONE = Shape.of(
    "async (args, sample, sampling_params, evaluation=False) -> Sample | list[Sample]",
    "generators:LocalGenerator",
    "sample",
    "sampling policy tokenizer",
)
_DATA_SOURCE = Shape.of(
    "class (dataset, args) with get_samples(num_samples) -> list[Sample]", "data_sources:LocalDataSource", ""
)
_BUFFER_FILTERS = (
    Shape.of(
        "(args, rollout_id, buffer, num_samples) -> list[list[Sample]]",
        "filters:LocalBufferFilter",
        "rollout_id buffer",
    ),
    Shape.of("(args, buffer, num_samples) -> list[Sample]", "filters:LocalBufferFilter", "buffer"),
    Shape.of(
        "class (dataset, args) with buffer_filter(args, buffer, num_samples) -> list[Sample]",
        "filters:method_filter",
        "buffer",
        "rollout_id",
    ),
)
_KEEP_GROUP = Shape.of(
    "(args, samples, **kwargs) -> bool, or an object with keep and reason", "filters:SamplingFilter", "samples"
)
_MARK_SAMPLES = Shape.of("(args, groups) -> None", "filters:batch_function", "groups")
_POST_PROCESS = Shape.of("(args, samples) -> (raw rewards, rewards)", "filters:batch_function", "samples")

_BUFFER_FILTER_NAMES = ("buffer_filter",)
_SAMPLING_FILTER_NAMES = ("dynamic_sampling_filter", "sampling_filter")

#: the roles that flags name: slots, rewards of whole groups (--group-rm), and functions over a finished batch
ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role(
            "reward",
            "reward",
            (_REWARD_ONE, _REWARD_SEVERAL, _REWARD_MODEL, _REWARD_TRL, _REWARD_VERL),
            (("reward_func", "CustomRewardModel"), ("batched_custom_rm",), ("compute_score",)),
            RewardSpec,
        ),
        Role(
            "group_reward",
            "reward of whole groups",
            (_REWARD_SEVERAL, _REWARD_MODEL, _REWARD_TRL),
            (("batched_custom_rm",), ("CustomRewardModel",)),
            RewardSpec,
        ),
        Role(
            "generator",
            "generator",
            (_GENERATE_SEVERAL, _GENERATE_ONE),
            (("custom_generate",), ("generate",)),
            GeneratorSpec,
        ),
        Role("datasource", "data source", (_DATA_SOURCE,), (), DataSourceSpec),
        Role("buffer_filter", "buffer filter", _BUFFER_FILTERS, (_BUFFER_FILTER_NAMES,), BufferFilterSpec),
        Role("sampling_filter", "sampling filter", (_KEEP_GROUP,), (_SAMPLING_FILTER_NAMES,), BufferFilterSpec),
        Role("rollout_sample_filter", "sample filter", (_MARK_SAMPLES,), (("rollout_sample_filter", "sample_filter"),)),
        Role(
            "reward_post_process",
            "reward post-processing",
            (_POST_PROCESS,),
            (("custom_reward_post_process", "reward_post_process", "post_process_rewards"),),
        ),
    )
}
#: the role if only the kind of component is known: either sort of filter
_ANY_FILTER = Role(
    "any_filter",
    "buffer filter",
    (*_BUFFER_FILTERS, _KEEP_GROUP),
    (_BUFFER_FILTER_NAMES, _SAMPLING_FILTER_NAMES),
    BufferFilterSpec,
)


def role_of_kind(kind: str) -> Role:
    """The role of a function that is used as a component of `kind`.

    Raises:
        PluginNotFoundError: Components of this kind cannot be functions.
    """
    if kind == "buffer_filter":
        return _ANY_FILTER
    if kind not in ROLES:
        raise PluginNotFoundError(
            f"a component of kind {kind} cannot be given by path: it comes in a package"
            f" (`slime plugins new {kind} NAME` writes one)"
        )
    return ROLES[kind]
