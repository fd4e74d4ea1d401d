"""The ways in which a function or class given by path may be called, recognised by its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime.compat.signatures import Definition, Signature
from slime.errors import PluginNotFoundError
from slime.plugin import BufferFilterSpec, ComponentSpec, DataSourceSpec, GeneratorSpec, RewardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to be called. Parameters are matched by name."""

    #: as messages show it
    text: str
    #: "package.module:Name" of what makes a component of it
    adapter: str
    #: parameters that make it this shape
    core: frozenset[str]
    #: all parameters that it can fill
    offers: frozenset[str]
    #: of a class: the method that is called; the parameters above are that method's
    method: str = ""
    #: of a class: what its constructor may ask for
    constructor: frozenset[str] = frozenset()
    #: True: only `async def`; False: only `def`; None: either
    asynchronous: bool | None = False
    #: how many values are passed by position, whatever the parameters are called; None: all are passed by name
    positional: int | None = None
    #: of a reward: called with all samples of a prompt
    whole_groups: bool = False

    def misfit(self, found: Definition) -> str | None:
        """Why a definition does not have this shape; None if it has."""
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
        return f"its constructor asks for {', '.join(sorted(surplus))}" if surplus else None

    def _misfit_of(self, called: Signature) -> str | None:
        if self.positional is not None:
            if len(called.required) > self.positional:
                return f"it asks for {len(called.required)} values and gets {self.positional}"
        elif missing := sorted(self.core - set(called.names)):
            return f"no parameter is called {' or '.join(missing)}"
        elif surplus := sorted(set(called.required) - self.offers):
            return f"nothing fills the parameter {', '.join(surplus)}"
        if self.asynchronous is not None and called.is_async != self.asynchronous:
            return "it is not an `async def`" if self.asynchronous else "it is an `async def`"
        return None


@dataclass(frozen=True, slots=True)
class Role:
    """What a reference is for: a slot of the run, or a function over a finished batch."""

    name: str
    #: as people call it
    title: str
    shapes: tuple[Shape, ...]
    #: names that need not be stated: all of one tuple are equally good, an earlier tuple is better
    usual: tuple[tuple[str, ...], ...] = ()
    #: the spec class of its component
    spec: type[ComponentSpec] = ComponentSpec

    def shape_of(self, found: Definition) -> Shape | None:
        """The first shape that a definition has."""
        return next((shape for shape in self.shapes if shape.misfit(found) is None), None)

    @property
    def expected(self) -> str:
        """All shapes, for messages."""
        return "; or ".join(shape.text for shape in self.shapes)

    def why_not(self, found: Definition) -> str:
        """Why a definition has none of the shapes: what it lacks of the nearest one."""
        # A shape whose required parameters are all there is the one that was meant.
        names = frozenset(found.signature.names) if found.signature and not found.is_class else frozenset()

        def nearness(shape: Shape) -> tuple[bool, bool, int]:
            return bool(shape.method) == found.is_class, shape.core <= names, len(shape.core & names)

        return max(self.shapes, key=nearness).misfit(found) or ""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_REWARD_ONE = Shape(
    text="(args, sample, **kwargs) -> float | dict",
    adapter="slime.compat.rewards:sample_reward",
    core=_names("sample"),
    offers=_names("args sample"),
    asynchronous=None,
)
_REWARD_SEVERAL = Shape(
    text="(args, samples, **kwargs) -> list",
    adapter="slime.compat.rewards:batch_reward",
    core=_names("samples"),
    offers=_names("args samples"),
    whole_groups=True,
    asynchronous=None,
)
_REWARD_MODEL = Shape(
    text="class (model_path) with compute_reward(prompts, responses) -> list[float]",
    adapter="slime.compat.rewards:model_reward",
    core=_names("prompts responses"),
    offers=_names("prompts responses labels"),
    method="compute_reward",
    constructor=_names("model_path args"),
    whole_groups=True,
    asynchronous=None,
)
_GENERATION = _names("args sampling_params sampling evaluation policy tokenizer")
_GENERATE_SEVERAL = Shape(
    text="async (args, samples, evaluation=False) -> list[Sample]",
    adapter="slime.compat.generators:LocalGenerator",
    core=_names("samples"),
    offers=_names("samples") | _GENERATION,
    asynchronous=True,
)
_GENERATE_ONE = Shape(
    text="async (args, sample, sampling_params, evaluation=False) -> Sample | list[Sample]",
    adapter="slime.compat.generators:LocalGenerator",
    core=_names("sample"),
    offers=_names("sample") | _GENERATION,
    asynchronous=True,
)
_DATA_SOURCE = Shape(
    text="class (dataset, args) with get_samples(num_samples) -> list[Sample]",
    adapter="slime.compat.data_sources:LocalDataSource",
    core=frozenset(),
    offers=frozenset(),
    positional=1,
    method="get_samples",
    constructor=_names("dataset args"),
)
_FILTER_GROUPS = Shape(
    text="(args, rollout_id, buffer, num_samples) -> list[list[Sample]]",
    adapter="slime.compat.filters:LocalBufferFilter",
    core=_names("rollout_id buffer"),
    offers=_names("args rollout_id buffer num_samples"),
)
_FILTER_SAMPLES = Shape(
    text="(args, buffer, num_samples) -> list[Sample]",
    adapter="slime.compat.filters:LocalBufferFilter",
    core=_names("buffer"),
    offers=_names("args buffer num_samples"),
)
_FILTER_METHOD = Shape(
    text="class (dataset, args) with buffer_filter(args, buffer, num_samples) -> list[Sample]",
    adapter="slime.compat.filters:method_filter",
    core=_names("buffer"),
    offers=_names("args rollout_id buffer num_samples"),
    method="buffer_filter",
    constructor=_names("dataset args"),
)
_KEEP_GROUP = Shape(
    text="(args, samples, **kwargs) -> bool, or an object with keep and reason",
    adapter="slime.compat.filters:SamplingFilter",
    core=_names("samples"),
    offers=_names("args samples"),
)
_MARK_SAMPLES = Shape(
    text="(args, groups) -> None",
    adapter="slime.compat.filters:batch_function",
    core=_names("groups"),
    offers=_names("args groups"),
)
_POST_PROCESS = Shape(
    text="(args, samples) -> (raw rewards, rewards)",
    adapter="slime.compat.filters:batch_function",
    core=_names("samples"),
    offers=_names("args samples"),
)

_REWARD_NAMES = (("reward_func", "CustomRewardModel"), ("batched_custom_rm",))
_GROUP_REWARD_NAMES = (("batched_custom_rm",), ("CustomRewardModel",))
_BUFFER_NAMES = ("buffer_filter",)
_SAMPLING_NAMES = ("dynamic_sampling_filter", "sampling_filter")
_BUFFER_SHAPES = (_FILTER_GROUPS, _FILTER_SAMPLES, _FILTER_METHOD)
_POST_NAMES = ("custom_reward_post_process", "reward_post_process", "post_process_rewards")

#: what flags name by path: slots, rewards of whole groups (--group-rm), and functions over a finished batch
ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role("reward", "reward", (_REWARD_ONE, _REWARD_SEVERAL, _REWARD_MODEL), _REWARD_NAMES, RewardSpec),
        Role(
            "group_reward", "reward of whole groups", (_REWARD_SEVERAL, _REWARD_MODEL), _GROUP_REWARD_NAMES, RewardSpec
        ),
        Role(
            "generator",
            "generator",
            (_GENERATE_SEVERAL, _GENERATE_ONE),
            (("custom_generate",), ("generate",)),
            GeneratorSpec,
        ),
        Role("datasource", "data source", (_DATA_SOURCE,), (), DataSourceSpec),
        Role("buffer_filter", "buffer filter", _BUFFER_SHAPES, (_BUFFER_NAMES,), BufferFilterSpec),
        Role("sampling_filter", "sampling filter", (_KEEP_GROUP,), (_SAMPLING_NAMES,), BufferFilterSpec),
        Role("rollout_sample_filter", "sample filter", (_MARK_SAMPLES,), (("rollout_sample_filter", "sample_filter"),)),
        Role("reward_post_process", "reward post-processing", (_POST_PROCESS,), (_POST_NAMES,)),
    )
}
#: where only the kind of component is known: both sorts of filter
_ANY_FILTER = Role(
    "any_filter", "buffer filter", (*_BUFFER_SHAPES, _KEEP_GROUP), (_BUFFER_NAMES, _SAMPLING_NAMES), BufferFilterSpec
)


def role_of_kind(kind: str) -> Role:
    """What a reference is for where a component of `kind` is expected.

    Raises:
        PluginNotFoundError: No function can be a component of this kind.
    """
    if kind == "buffer_filter":
        return _ANY_FILTER
    if kind not in ROLES:
        raise PluginNotFoundError(
            f"there is no function path for components of kind {kind}: they come in packages"
            f" (`slime plugins new {kind} NAME` writes one)"
        )
    return ROLES[kind]
