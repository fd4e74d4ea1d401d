"""Flags that name a function of the user's own, as the component names they stand for.

`--custom-rm-path custom_rm.py` becomes the reward `local:/path/to/custom_rm.py:reward_func`, and so on: from there
on it is a component like any other.  Paths are made absolute, since actors may work elsewhere, and a name that was left
to be guessed is written down.  Nothing is run: the files are read as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.config.eval_options import EvalSetOptions
from slime.config.run_config import COMPONENTS, KIND_OF_SLOT, RunConfig
from slime.config.settings import Settings
from slime.errors import SlimeError
from slime.plugins.local import ROLES, Reference, Target, find_target, is_local
from slime.plugins.local.definitions import Class
from slime.plugins.local.roles import role_of_kind


@dataclass(frozen=True, slots=True)
class FunctionFlag:
    """One flag that names a function."""

    section: str
    key: str
    role: str
    #: the slot whose component it chooses; None where it is no component
    slot: str | None = None

    @property
    def flag(self) -> str:
        """As written on a command line."""
        return f"--{self.key.replace('_', '-')}"


FUNCTION_FLAGS = (
    FunctionFlag("reward", "custom_rm_path", "reward", "reward"),
    FunctionFlag("rollout", "custom_generate_function_path", "generator", "generator"),
    FunctionFlag("data", "data_source_path", "datasource", "datasource"),
    FunctionFlag("rollout", "dynamic_sampling_filter_path", "sampling_filter", "sampling_filter"),
    FunctionFlag("rollout", "buffer_filter_path", "buffer_filter", "buffer_filter"),
    FunctionFlag("rollout", "rollout_sample_filter_path", "rollout_sample_filter"),
    FunctionFlag("reward", "custom_reward_post_process_path", "reward_post_process"),
)


def without_rivals(earlier: Settings, later: Settings) -> Settings:
    """`earlier` without its choices of components that `later` chooses in another way.

    So that `--custom-rm-path` wins over a run file's reward, as `--reward` does.
    """
    ways = {slot: {place} for slot, place in COMPONENTS.items()}
    ways["reward"].add(("reward", "terms"))
    for flag in FUNCTION_FLAGS:
        if flag.slot is not None:
            ways[flag.slot].add((flag.section, flag.key))
    stated = {(setting.target, setting.key) for setting in later.items}
    dropped = {place for places in ways.values() if places & stated for place in places - stated}
    kept = [setting for setting in earlier.items if (setting.target, setting.key) not in dropped]
    return Settings(kept, earlier.problems)


def place_functions(config: RunConfig) -> RunConfig:
    """The configuration with every function it names by path in its place.

    What cannot be placed is left as stated, for `function_problems` to tell.  Doing it twice changes nothing.
    """
    for flag in FUNCTION_FLAGS:
        stated = getattr(getattr(config, flag.section), flag.key)
        if stated is None or _rival(config, flag) is not None:
            continue
        try:
            target = _target(config, flag, stated)
        except SlimeError:
            continue
        if flag.slot is None:
            config = _with(config, flag.section, {flag.key: str(target.reference)})
            continue
        config = _with(config, flag.section, {flag.key: None})
        config = _with_component(config, flag.slot, str(target.reference))
        if flag.slot == "datasource" and config.rollout.buffer_filter is None and _chooses(target):
            config = _with_component(config, "buffer_filter", str(target.reference))
    for slot, (section, key) in COMPONENTS.items():
        name = getattr(getattr(config, section), key)
        if name is not None and (placed := _absolute(config, slot, name)) != name:
            config = _with_component(config, slot, placed)
    terms = [term.model_copy(update={"name": _absolute(config, "reward[]", term.name)}) for term in config.reward.terms]
    if terms != config.reward.terms:
        config = _with(config, "reward", {"terms": terms})
    sets = [_placed_set(config, one) for one in config.evaluation.sets]
    return _with(config, "evaluation", {"sets": sets}) if sets != config.evaluation.sets else config


def function_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the functions that a configuration names by flag; the files are read for it."""
    for flag in FUNCTION_FLAGS:
        stated = getattr(getattr(config, flag.section), flag.key)
        if stated is None:
            continue
        if (rival := _rival(config, flag)) is not None:
            yield f"{flag.flag} {stated} and {rival} both choose the {ROLES[flag.role].title}: state one of them"
            continue
        try:
            _target(config, flag, stated)
        except SlimeError as error:
            yield f"{flag.flag} {stated}: {error}"
    reward = config.reward
    if reward.group_rm and reward.custom_rm_path is None and not is_local(reward.reward or ""):
        yield "--group-rm has no effect: it says how the function of --custom-rm-path is called"
    if reward.reward_key is not None and reward.terms:
        yield (
            f"--reward-key {reward.reward_key} chooses a part of the run's only reward, and [[reward.terms]] are"
            " several; state reward-key in the term of a function"
        )


def _target(config: RunConfig, flag: FunctionFlag, stated: str) -> Target:
    grouped = flag.role == "reward" and config.reward.group_rm
    return find_target(ROLES["group_reward" if grouped else flag.role], Reference.parse(stated))


def _chooses(target: Target) -> bool:
    """Whether a data source class has a `buffer_filter` of its own: it then is the run's."""
    method = target.definition.methods.get("buffer_filter") if isinstance(target.definition, Class) else None
    return method is not None and method.source.module != "slime.data.data_source"


def _rival(config: RunConfig, flag: FunctionFlag) -> str | None:
    """Another choice of the same component."""
    if flag.slot is None:
        return None
    section, key = COMPONENTS[flag.slot]
    options: Any = getattr(config, section)
    chosen = getattr(options, key)
    # What has a default is chosen only where the user says so.
    if chosen is not None and key in options.model_fields_set:
        return f"--{key.replace('_', '-')} {chosen}"
    return "[[reward.terms]]" if flag.slot == "reward" and config.reward.terms else None


def _with_component(config: RunConfig, slot: str, name: str) -> RunConfig:
    section, key = COMPONENTS[slot]
    return _with(config, section, {key: name})


def _absolute(config: RunConfig, slot: str, name: str) -> str:
    """A component's name; of a reference the one with the path and the name in it that it stands for."""
    if not is_local(name):
        return name
    grouped = slot == "reward" and config.reward.group_rm
    kind = KIND_OF_SLOT.get(slot, slot.removesuffix("[]"))
    try:
        role = ROLES["group_reward"] if grouped else role_of_kind(kind)
        return str(find_target(role, Reference.parse(name)).reference)
    except SlimeError:
        return name


def _placed_set(config: RunConfig, one: EvalSetOptions) -> EvalSetOptions:
    """An evaluation set with the functions it names in their places."""
    placed = {
        kind: choice.model_copy(update={"name": _absolute(config, f"{kind}[]", choice.name)})
        for kind, choice in (("reward", one.reward), ("generator", one.generator))
        if choice is not None
    }
    return one.model_copy(update=placed)


def _with(config: RunConfig, section: str, values: dict[str, Any]) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
