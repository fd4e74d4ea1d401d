"""What a function path may be for, and the call shapes that each of them takes."""

from __future__ import annotations

from collections.abc import Mapping

from slime.errors import PluginNotFoundError
from slime.plugin import BufferFilterSpec, DataSourceSpec, GeneratorSpec, RewardSpec
from slime.plugins.local.shapes import Role, Shape


def _names(*names: str) -> frozenset[str]:
    return frozenset(names)


_REWARD_ONE = Shape(
    "(args, sample, **kwargs) -> float | dict",
    core=_names("sample"),
    offers=_names("args", "sample"),
    adapter="slime.adapters.rewards:sample_reward",
)
_REWARD_SEVERAL = Shape(
    "(args, samples, **kwargs) -> list",
    core=_names("samples"),
    offers=_names("args", "samples"),
    adapter="slime.adapters.rewards:batch_reward",
    whole_groups=True,
)
_REWARD_MODEL = Shape(
    "class (model_path) with compute_reward(prompts, responses) -> list[float]",
    core=_names("prompts", "responses"),
    offers=_names("prompts", "responses", "labels"),
    adapter="slime.adapters.rewards:model_reward",
    method="compute_reward",
    constructor=_names("model_path", "args"),
    whole_groups=True,
)
_GENERATION = ("args", "sampling_params", "sampling", "evaluation", "policy", "tokenizer")
_GENERATE_SEVERAL = Shape(
    "async (args, samples, evaluation=False) -> list[Sample]",
    core=_names("samples"),
    offers=_names("samples", *_GENERATION),
    adapter="slime.adapters.generators:BatchGenerator",
    asynchronous=True,
)
_GENERATE_ONE = Shape(
    "async (args, sample, sampling_params, evaluation=False) -> Sample | list[Sample]",
    core=_names("sample"),
    offers=_names("sample", *_GENERATION),
    adapter="slime.adapters.generators:SampleGenerator",
    asynchronous=True,
)
_DATA_SOURCE = Shape(
    "class (dataset, args) with get_samples(num_samples) -> list[Sample]",
    core=_names(),
    offers=_names(),
    by_place=1,
    adapter="slime.adapters.data_sources:LocalDataSource",
    method="get_samples",
    constructor=_names("dataset", "args"),
    asynchronous=False,
)
_FILTER_GROUPS = Shape(
    "(args, rollout_id, buffer, num_samples) -> list[list[Sample]]",
    core=_names("rollout_id", "buffer"),
    offers=_names("args", "rollout_id", "buffer", "num_samples"),
    adapter="slime.adapters.filters:GroupsBufferFilter",
    asynchronous=False,
)
_FILTER_SAMPLES = Shape(
    "(args, buffer, num_samples) -> list[Sample]",
    core=_names("buffer"),
    offers=_names("args", "buffer", "num_samples"),
    adapter="slime.adapters.filters:SamplesBufferFilter",
    asynchronous=False,
)
_FILTER_METHOD = Shape(
    "class (dataset, args) with buffer_filter(args, buffer, num_samples) -> list[Sample]",
    core=_names("buffer"),
    offers=_names("args", "rollout_id", "buffer", "num_samples"),
    adapter="slime.adapters.filters:method_filter",
    method="buffer_filter",
    constructor=_names("dataset", "args"),
    asynchronous=False,
)
_KEEP_GROUP = Shape(
    "(args, samples, **kwargs) -> bool, or an object with keep and reason",
    core=_names("samples"),
    offers=_names("args", "samples"),
    adapter="slime.adapters.filters:SamplingFilter",
    asynchronous=False,
)
_MARK_SAMPLES = Shape(
    "(args, groups) -> None",
    core=_names("groups"),
    offers=_names("args", "groups"),
    adapter="slime.plugins.local.functions:load_sample_filter",
    asynchronous=False,
)
_POST_PROCESS = Shape(
    "(args, samples) -> (raw rewards, rewards)",
    core=_names("samples"),
    offers=_names("args", "samples"),
    adapter="slime.plugins.local.functions:load_reward_post_process",
    asynchronous=False,
)

_BUFFER_NAMES = ("buffer_filter",)
_SAMPLING_NAMES = ("dynamic_sampling_filter", "sampling_filter")

#: what a run file and a command line name by path
ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role(
            "reward",
            "reward",
            (_REWARD_ONE, _REWARD_SEVERAL, _REWARD_MODEL),
            (("reward_func", "CustomRewardModel"), ("batched_custom_rm",)),
            RewardSpec,
        ),
        Role(
            "group_reward",
            "reward of whole groups",
            (_REWARD_SEVERAL, _REWARD_MODEL),
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
        Role(
            "buffer_filter",
            "buffer filter",
            (_FILTER_GROUPS, _FILTER_SAMPLES, _FILTER_METHOD),
            (_BUFFER_NAMES,),
            BufferFilterSpec,
        ),
        Role("sampling_filter", "sampling filter", (_KEEP_GROUP,), (_SAMPLING_NAMES,), BufferFilterSpec),
        Role("rollout_sample_filter", "sample filter", (_MARK_SAMPLES,), (("rollout_sample_filter", "sample_filter"),)),
        Role(
            "reward_post_process",
            "reward post-processing",
            (_POST_PROCESS,),
            (("custom_reward_post_process", "reward_post_process", "post_process_rewards"),),
        ),
    )
}
#: where only the kind of component is known: both sorts of filter
_ANY_FILTER = Role(
    "any_filter",
    "buffer filter",
    (*ROLES["buffer_filter"].shapes, *ROLES["sampling_filter"].shapes),
    (_BUFFER_NAMES, _SAMPLING_NAMES),
    BufferFilterSpec,
)


def role_of_kind(kind: str) -> Role:
    """What a reference is for where a component of `kind` is expected.

    Raises `PluginNotFoundError` for a kind that no function can be.
    """
    if kind == "buffer_filter":
        return _ANY_FILTER
    if kind not in ROLES:
        raise PluginNotFoundError(
            f"there is no function path for components of kind {kind}: they come in packages"
            f" (`slime plugins new {kind} NAME` writes one)"
        )
    return ROLES[kind]
