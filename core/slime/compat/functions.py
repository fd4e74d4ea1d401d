"""Turns functions given by path into components.

`--custom-rm-path custom_rm.py` becomes the reward `/path/to/custom_rm.py:reward_func`, a component like any other. Each
file is probed once, by the process that the user started; the components are plain data, which it sends to the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.compat.probe import ProbedFile, probe
from slime.compat.rewards import ModelOptions, RequiredModelOptions, ScoreOptions
from slime.compat.shapes import ROLES, Role, Shape, role_of_kind
from slime.compat.signatures import Definition
from slime.config import RunConfig
from slime.config.choices import other_choice
from slime.config.eval_options import EvalSetOptions
from slime.errors import PluginConflictError, PluginLoadError, PluginNotFoundError, SlimeError, did_you_mean
from slime.plugin import NoOptions, Options, RewardSpec
from slime.registry.component import LocalComponent, found_locally
from slime.registry.function_path import LocalFunction, Reference, is_reference
from slime.registry.kinds import BATCH_FUNCTIONS, SLOTS, Slot, kind_of

#: what `slime.kit.sessions` has for generate functions
_OF_SESSIONS = ("build_loss_mask", "generate_single")


def find_function(kind: str, text: str, role: Role | None = None) -> LocalComponent:
    """The function that a reference names, as a component. Its file is probed, not run in this process.

    Args:
        kind: Kind of component, or the name of a function over a finished batch.
        text: `FILE.py`, `FILE.py:NAME` or `package.module:NAME`.
        role: What it is used for, if that is known more exactly than by its kind.

    Raises:
        ConfigError: The text is not a reference.
        PluginNotFoundError: There is no such file, module or name, or it does not fit any call shape.
        PluginLoadError: It cannot be imported, or uses names that nothing defines.
        PluginConflictError: The reference has no name, and several functions fit.
    """
    role = role or role_of_kind(kind)
    reference = Reference.parse(text)
    probed = probe(reference)
    found = _guessed(role, probed) if reference.name is None else _named(reference.name, probed)
    shape = role.shape_of(found)
    if shape is None:
        raise PluginNotFoundError(
            f"{found.file}:{found.line}: got {found}, which cannot be a {role.title}: {role.why_not(found)}."
            f" Expected (parameters are passed by name): {role.expected}"
        )
    if found.undefined:
        raise PluginLoadError(_undefined(found))
    function = LocalFunction(
        Reference(reference.file, reference.module, found.name),
        probed.path,
        hashlib.sha256(probed.source).hexdigest(),
        probed.source if reference.file is not None else None,
    )
    spec = _spec(role, shape, found, function)
    return LocalComponent(kind, spec, found_locally(function), f"{found.file}:{found.line}", function, role.title)


def _named(name: str, probed: ProbedFile) -> Definition:
    for found in probed.definitions:
        if found.name == name:
            return found
    names = [own.name for own in probed.definitions if own.own and own.name[0] != "_"]
    has = f"It defines {', '.join(names)}." if names else "It defines nothing public."
    raise PluginNotFoundError(f"{probed.path} has no {name}.{did_you_mean(name, names)} {has}")


def _undefined(found: Definition) -> str:
    names = sorted(found.undefined)
    ours = [name for name in names if name in _OF_SESSIONS]
    hint = f" Add `from slime.kit.sessions import {', '.join(ours)}` at its top" if ours else ""
    return (
        f"{found.file}:{min(found.undefined.values())}: {found.name} uses {', '.join(names)}, which its file neither"
        f" defines nor imports.{hint}"
    )


def _guessed(role: Role, probed: ProbedFile) -> Definition:
    """The definition for a reference without a name: the one with a conventional name, else the only one that fits."""
    for names in role.usual:
        if usual := [found for found in probed.definitions if found.name in names]:
            return _only(usual, probed)
    own = [found for found in probed.definitions if found.own and found.name[0] != "_"]
    fitting = [found for found in own if role.shape_of(found) is not None]
    # A base class of another candidate is not a candidate.
    bases = {name for found in fitting for name in found.ancestors - {found.name}}
    if fitting := [found for found in fitting if found.name not in bases]:
        return _only(fitting, probed)
    has = "; ".join(f"line {found.line}: {found} ({role.why_not(found)})" for found in own) or "nothing public"
    usual_names = [name for names in role.usual for name in names]
    called = f", preferably called {usual_names[0]}" if usual_names else ""
    raise PluginNotFoundError(
        f"{probed.path} has nothing that can be a {role.title}. Got {has}. Expected{called} (parameters are"
        f" passed by name): {role.expected}"
    )


def _only(candidates: list[Definition], probed: ProbedFile) -> Definition:
    if len(candidates) > 1:
        choices = " or ".join(f"{probed.path.name}:{found.name} (line {found.line})" for found in candidates)
        raise PluginConflictError(f"{probed.path} has several candidates: write {choices}")
    return candidates[0]


def _spec(role: Role, shape: Shape, found: Definition, function: LocalFunction) -> Any:
    where = function.reference.module or function.path.stem
    common: dict[str, Any] = {"name": f"{where}.{found.name}", "factory": shape.adapter, "summary": shape.text}
    if role.spec is not RewardSpec:
        return role.spec(options=NoOptions, **common)
    options: type[Options] = ScoreOptions
    if found.is_class:
        required = found.signature is not None and "model_path" in found.signature.required
        options = RequiredModelOptions if required else ModelOptions
    # It may not be deterministic.
    scope = "sample" if shape.core & {"sample", "solution_str"} else "group"
    return RewardSpec(options=options, scope=scope, deterministic=False, **common)  # type: ignore[arg-type]  # a dict of mixed values


# --- a run's functions -----------------------------------------------------------------------------


@dataclass
class PlacedFunctions:
    """A configuration that names functions as components."""

    config: RunConfig
    #: the components, for `slime.registry.load_plugins`
    components: list[LocalComponent] = field(default_factory=list)
    #: what is wrong with the configuration's references, each with its flag
    problems: list[str] = field(default_factory=list)

    def has_failed(self, name: str) -> bool:
        """Whether a name is a reference that was not found; `problems` has the reason."""
        return is_reference(name) and all(name != one.id for one in self.components)

    def find(self, kind: str, text: str, flag: str, role: Role | None = None) -> LocalComponent | None:
        """The component that a reference names; None if it was not found, with the reason added to `problems`."""
        try:
            component = find_function(kind, text, role)
        except SlimeError as error:
            self.problems.append(f"{flag} {text}: {error}")
            return None
        if component not in self.components:
            self.components.append(component)
        return component


def place_functions(config: RunConfig, only: str | None = None) -> PlacedFunctions:
    """Replace every function given by path by the name of its component: its absolute path and its name.

    References that are not found are left unchanged. Calling it again changes nothing. `only` a kind of component is
    looked for, if a command uses no other.
    """
    placed = PlacedFunctions(config)
    for slot in SLOTS.values():
        if only in (None, kind_of(slot.name).name):
            _place_slot(placed, slot)
    for name, (section, key) in () if only else BATCH_FUNCTIONS.items():
        text = getattr(getattr(config, section), key)
        if text is not None and (found := placed.find(name, text, f"--{key.replace('_', '-')}")) is not None:
            placed.config = placed.config.with_options(section, **{key: found.id})
    sets = [_placed_set(placed, one, only) for one in config.evaluation.sets]
    if sets != config.evaluation.sets:
        placed.config = placed.config.with_options("evaluation", sets=sets)
    return placed


def _place_slot(placed: PlacedFunctions, slot: Slot) -> None:
    config, kind = placed.config, kind_of(slot.name)
    options = getattr(config, slot.section)
    grouped = slot.name == "reward" and config.reward.group_rm
    role = ROLES.get("group_reward" if grouped else slot.name)
    by_path = getattr(options, slot.path_key) if slot.path_key else None
    changed: dict[str, Any] = {}
    if by_path is not None and other_choice(config, slot) is None:
        found = placed.find(kind.name, by_path, slot.path_flag, role)
        if found is not None:
            changed = {slot.path_key or "": None, slot.key: found.id}
    elif not slot.repeated and is_reference(getattr(options, slot.key) or ""):
        found = placed.find(kind.name, getattr(options, slot.key), slot.flag, role if grouped else None)
        changed = {} if found is None else {slot.key: found.id}
    if slot.list_key is not None:
        stated = getattr(options, slot.list_key)
        where = f"[[{slot.section}.{slot.list_key}]]"
        several = [_placed_choice(placed, kind.name, choice, where) for choice in stated]
        changed |= {slot.list_key: several} if several != stated else {}
    if changed:
        placed.config = config.with_options(slot.section, **changed)
    if slot.name == "datasource" and by_path is not None and changed:
        _place_own_filter(placed, changed[slot.key])


def _place_own_filter(placed: PlacedFunctions, source: str) -> None:
    """Use the `buffer_filter` method of a data source class, unless the run has another buffer filter."""
    rollout = placed.config.rollout
    if rollout.buffer_filter is not None or rollout.buffer_filter_path is not None:
        return
    reference = Reference.parse(source)
    method = _named(reference.name or "", probe(reference)).methods.get("buffer_filter")
    if method is not None and method.module != "slime.kit.readers.data_source":
        found = placed.find("buffer_filter", source, SLOTS["datasource"].path_flag, ROLES["buffer_filter"])
        if found is not None:
            placed.config = placed.config.with_options("rollout", buffer_filter=found.id)


def _placed_set(placed: PlacedFunctions, one: EvalSetOptions, only: str | None) -> EvalSetOptions:
    choices: Mapping[str, Any] = {"reward": one.reward, "generator": one.generator}
    return one.model_copy(
        update={
            kind: _placed_choice(placed, kind, choice, f"[[evaluation.sets]] {one.name}: {kind}")
            for kind, choice in choices.items()
            if choice is not None and only in (None, kind)
        }
    )


def _placed_choice(placed: PlacedFunctions, kind: str, choice: Any, where: str) -> Any:
    """The choice of a component in a list, or by an evaluation set, with its function placed."""
    if not is_reference(choice.name):
        return choice
    found = placed.find(kind, choice.name, where)
    return choice if found is None else choice.model_copy(update={"name": found.id})
