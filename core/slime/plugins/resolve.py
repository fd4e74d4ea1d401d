"""Which components a run uses: the configuration's names, looked up and checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.errors import ConfigError
from slime.plugin import EstimatorSpec, Options
from slime.plugins.component import Component
from slime.plugins.limits import Limits
from slime.plugins.local import is_local

if TYPE_CHECKING:
    from slime.config import RunConfig

#: options of the run that only a critic reads
_CRITIC_OPTIONS = ("critic_lr", "critic_load", "value_clip", "num_critic_only_steps")


@dataclass(frozen=True, slots=True)
class Use:
    """One component that the configuration names."""

    #: where it is stated: "estimator", "reward", ...; of several rewards "reward[0]", "reward[1]", ...
    slot: str
    #: kind of component
    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    #: of a reward: its factor in the sum
    weight: float = 1.0
    #: the evaluation set whose own component it is; None: the run's
    eval_set: str | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A component that the run uses, with its checked options."""

    use: Use
    component: Component
    options: Options
    limits: Limits


def components_used(config: RunConfig) -> list[Use]:
    """Every component that the configuration names, rewards and filters in its order, and functions over a batch."""
    supervised = config.algorithm.loss_type == "sft_loss"
    options = config.component_options
    named = [
        ("estimator", "estimator", None if supervised else config.algorithm.advantage_estimator),
        ("reward", "reward", config.reward.reward),
        ("datasource", "datasource", config.data.data_source),
        ("generator", "generator", config.generator_name),
        ("sampling_filter", "buffer_filter", config.rollout.sampling_filter),
        ("buffer_filter", "buffer_filter", config.rollout.buffer_filter),
    ]
    uses = [Use(slot, kind, name, options.get(slot, {})) for slot, kind, name in named if name is not None]
    terms = config.reward.terms
    uses += [
        Use(f"reward[{number}]", "reward", term.name, term.options, term.weight) for number, term in enumerate(terms)
    ]
    uses += [
        Use(f"{kind}[eval.{one.name}]", kind, choice.name, choice.options, eval_set=one.name)
        for one in config.evaluation.sets
        for kind, choice in (("reward", one.reward), ("generator", one.generator))
        if choice is not None
    ]
    functions = {
        "rollout_sample_filter": config.rollout.rollout_sample_filter_path,
        "reward_post_process": config.reward.custom_reward_post_process_path,
    }
    # One that could not be found is still as the user wrote it, and told by the configuration's own checks.
    return uses + [Use(role, role, path) for role, path in functions.items() if path is not None and is_local(path)]


def check_needs(component: Component, config: RunConfig) -> None:
    """Raise `ConfigError` when the run cannot give an estimator what it says it needs."""
    spec = component.spec
    if not isinstance(spec, EstimatorSpec):
        return
    samples = config.rollout.n_samples_per_prompt
    if "group" in spec.needs and samples < 2:
        raise ConfigError(
            f"{component.title} compares the samples of one prompt with each other, but --n-samples-per-prompt is"
            f" {samples}: every advantage would be 0. Use at least 2."
        )
    coef = config.algorithm.kl_coef
    if coef != 0 and not spec.takes_kl:
        raise ConfigError(
            f"--kl-coef {coef:g} takes KL off the reward, which {component.title} does not do."
            " Use --use-kl-loss --kl-loss-coef, which adds KL to the loss."
        )


def check_critic_options(components: Iterable[Component], config: RunConfig) -> None:
    """Raise `ConfigError` for options of a critic where no component needs one, and so none is trained."""
    if any(isinstance(one.spec, EstimatorSpec) and "critic" in one.spec.needs for one in components):
        return
    options = config.algorithm
    stated = [
        f"--{name.replace('_', '-')} {getattr(options, name)}"
        for name in _CRITIC_OPTIONS
        if getattr(options, name) != type(options).model_fields[name].default
    ]
    if stated:
        estimator = options.advantage_estimator
        run = "supervised training" if options.loss_type == "sft_loss" else f"the estimator {estimator}"
        raise ConfigError(
            f"{', '.join(stated)}: {run} trains no critic. Drop what is stated of one, or choose an estimator that"
            " needs a critic (`slime plugins show NAME` tells)"
        )
