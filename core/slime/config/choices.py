"""Components chosen by different options: which one takes precedence, and which conflict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.config.flags import Settings
from slime.config.run_config import RunConfig
from slime.registry.function_path import is_reference
from slime.registry.kinds import SLOTS, Slot


def override(earlier: Settings, later: Settings) -> Settings:
    """All settings; where both choose a component, even by different options, `later` takes precedence.

    So `--custom-rm-path` overrides the reward of a run file, as `--reward` does.
    """
    stated = later.items.keys()
    dropped: set[tuple[str, str]] = set()
    for slot in SLOTS.values():
        options = {(slot.section, key) for key in (slot.key, slot.list_key, slot.path_key) if key is not None}
        if options & stated:
            dropped |= options - stated
    kept = {option: setting for option, setting in earlier.items.items() if option not in dropped}
    return Settings(kept | later.items, earlier.problems + later.problems)


def other_choice(config: RunConfig, slot: Slot) -> str | None:
    """The option, other than a path, that chooses the component of a slot; None if there is none."""
    options: Any = getattr(config, slot.section)
    chosen = getattr(options, slot.key)
    # A default is not a choice.
    if chosen is not None and slot.key in options.model_fields_set:
        return f"{slot.flag} {chosen}"
    return f"[[{slot.section}.{slot.list_key}]]" if slot.list_key and getattr(options, slot.list_key) else None


def choice_problems(config: RunConfig) -> Iterator[str]:
    """Components that are chosen twice, and options of functions without a function."""
    for slot in SLOTS.values():
        stated = getattr(getattr(config, slot.section), slot.path_key) if slot.path_key else None
        if stated is not None and (other := other_choice(config, slot)) is not None:
            yield f"{slot.path_flag} {stated} and {other} both choose the {slot.title}. Set only one of them"
    reward = config.reward
    if reward.group_rm and reward.custom_rm_path is None and not is_reference(reward.reward or ""):
        yield "--group-rm has no effect without --custom-rm-path: it changes how that function is called"
    if reward.reward_key is not None and reward.terms:
        yield (
            f"--reward-key {reward.reward_key} applies to a single reward, and [[reward.terms]] has several."
            " Set reward-key in the term of the function instead"
        )
