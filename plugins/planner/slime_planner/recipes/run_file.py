"""A translated recipe as a run file of slime: each value with the option it comes from, and what is lost."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from slime.config.flag_table import component_option, find_flag
from slime.config.flags import UNAVAILABLE
from slime.config.value_types import Arity
from slime_planner.recipes.work import Stated, Translation

_WIDTH = 110
#: tables of run files, in the order in which they are written
_ORDER = ("checkpoint", "data", "rollout", "reward", "estimator", "algorithm", "megatron", "evaluation")


def run_file(translation: Translation) -> str:
    """The text of the run file; what is left to do stands in its comments."""
    recipe = translation.recipe
    lines = [
        f"# The run of {recipe.path} ({recipe.framework}) for slime. Comments name the option that a value comes from."
    ]
    tables: dict[str, dict[str, tuple[Any, str]]] = {}
    for stated in translation.stated:
        for table, key, value, said in _placed(stated, recipe.framework):
            if stated.option.stated or said:
                _add(tables.setdefault(table, {}), key, value, said or stated.option.name)
    _name_trackers(tables)
    _complete(translation, tables)
    for table in sorted(tables, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)):
        lines += ["", f"[{table}]", *_aligned(tables[table])]
    for function, weight in translation.terms:
        lines += ["", "[[reward.terms]]", f"name = {_toml(function)}", f"weight = {float(weight)}"]
    lines += _lists(translation)
    return "\n".join(lines) + "\n"


def _name_trackers(tables: dict[str, dict[str, tuple[Any, str]]]) -> None:
    """Options of trackers stand beside the tracker's name: a run may have several."""
    for key, (value, _) in tables.pop("tracker", {}).items():
        name, _, option = key.partition(".")
        chosen, said = tables.setdefault("components", {}).get("tracker", (["tensorboard", name], name))
        entry = next((one for one in chosen if isinstance(one, dict) and one["name"] == name), {"name": name})
        others = [one for one in chosen if one not in (name, entry)]
        tables["components"]["tracker"] = ([*others, {**entry, option: value}], said)


def _placed(stated: Stated, framework: str) -> Iterator[tuple[str, str, Any, str]]:
    """The table, key and value of a flag, and for a default of the framework what is different here."""
    component = component_option(stated.flag)
    value: Any
    if component is not None:
        value = _scalar(" ".join(stated.words))
        yield component[0], component[1], value, "" if stated.option.stated else _differs(stated, "", framework)
        return
    flag = find_flag(stated.flag)
    if flag is None or flag.target == UNAVAILABLE:
        return
    if flag.is_switch:
        value = flag.on if not stated.words else _scalar(stated.words[0])
    elif flag.type.arity in (Arity.SOME, Arity.ANY, Arity.PAIRS):
        value = flag.type.from_words([_number(word) for word in stated.words])
    else:
        value = _typed(" ".join(stated.words), flag.type.describe())
    # In a run file a component is named in its own table.
    table, key = {"advantage_estimator": ("estimator", "name"), "reward": ("reward", "name")}.get(
        flag.key, (flag.target, flag.file_key)
    )
    said = ""
    if not stated.option.stated:
        said = (
            "" if _same(" ".join(stated.words) or "true", flag.default) else _differs(stated, flag.default, framework)
        )
    yield table, key, value, said


def _differs(stated: Stated, default: str, framework: str) -> str:
    ours = f"; slime's is {default}" if default not in ("", "None") else ""
    name = stated.option.name
    return f"default of {framework}, {name}{ours}" if stated.option.values else name


def _same(value: str, other: str) -> bool:
    try:
        return float(value) == float(other)
    except ValueError:
        return value.lower() == other.lower()


def _add(keys: dict[str, tuple[Any, str]], key: str, value: Any, said: str) -> None:
    if key in keys and isinstance(value, list) and isinstance(keys[key][0], list):
        value = keys[key][0] + [one for one in value if one not in keys[key][0]]
    keys[key] = (value, said)


def _complete(translation: Translation, tables: Mapping[str, Mapping[str, tuple[Any, str]]]) -> None:
    """What every run needs and the recipe does not say in a form that can be read."""
    needed = {
        "hf_checkpoint": ("checkpoint", "hf_checkpoint", "the model's Hugging Face folder"),
        "prompt_data": ("data", "prompt_data", "the prompt file"),
        "rollout_batch_size": ("rollout", "rollout_batch_size", "prompts in a rollout"),
        "num_rollout": ("rollout", "num_rollout", "how many rollouts to run"),
        "advantage_estimator": ("estimator", "name", "the estimator"),
    }
    for flag, (table, key, what) in needed.items():
        shown = f"--{flag.replace('_', '-')}"
        if key not in tables.get(table, {}) and not any(shown in text for text in translation.by_hand.values()):
            translation.by_hand.setdefault(shown, f"{what}: the recipe does not say it")
    rewards = {"name", "custom_rm_path"} & set(tables.get("reward", {}))
    if not rewards and not translation.terms and "data_source_path" not in tables.get("data", {}):
        translation.by_hand.setdefault(
            "--reward", "the reward, by name or as --custom-rm-path FILE.py:NAME: docs/rewards-catalogue.md"
        )


def _aligned(keys: Mapping[str, tuple[Any, str]]) -> list[str]:
    written = [(f"{key} = {_toml(value)}", said) for key, (value, said) in keys.items()]
    column = min(max(len(text) for text, _ in written), 60)
    return [f"{text:<{column}}  # {said}" for text, said in written]


def _lists(translation: Translation) -> list[str]:
    """The comments at the end: what somebody has to do, what is lost, what is not needed."""
    lines: list[str] = []
    for title, items in (
        ("To do by hand", [f"{name}: {text}" for name, text in translation.by_hand.items()]),
        ("No counterpart, so not part of this run", translation.without),
        ("Not needed here", [f"{name}: {text}" for name, text in translation.unneeded.items()]),
        ("Of the script", translation.recipe.notes),
    ):
        if items:
            lines += ["", f"# {title}:"]
        for item in items:
            clean = " ".join(item.split())
            lines += textwrap.wrap(
                clean, _WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False
            )
    return lines


def _typed(word: str, kind: str) -> Any:
    """A word as the flag's type; what is not a number stays a word, which the check of the file names."""
    if kind == "a string":
        return word
    if kind == "a whole number" or "number" in kind:
        return _number(word)
    return word


def _number(word: str) -> Any:
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return word


def _scalar(word: str) -> Any:
    """A word without a known type: a switch, a number or a text."""
    return {"true": True, "false": False}.get(word.lower(), _number(word))


def _toml(value: Any) -> str:
    text = tomli_w.dumps({"x": value}, multiline_strings=False).removeprefix("x = ").strip()
    if "\n" in text:  # a list, which tomli_w writes over several lines
        text = " ".join(text.split()).replace("[ ", "[").replace(", ]", "]").replace(" ]", "]")
        assert tomllib.loads(f"x = {text}")["x"] == value
    return text
