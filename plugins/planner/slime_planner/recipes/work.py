"""A translation in progress: what the tables of docs/migrating.md say of each option that `rules` leaves to them."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from slime.config.flag_table import component_option, find_flag
from slime.config.flags import UNAVAILABLE
from slime.registry.original_names import instead_of
from slime_planner.recipes.prompts import count_prompts, place_of
from slime_planner.recipes.recipe import Framework, Option, Recipe
from slime_planner.recipes.shell import UNKNOWN

#: the end of a text of the tables that says an option is not needed
DROP = re.compile(r"[;:,]? ?drop (it|the flag)\b")
#: the beginning of a text of the tables that names one flag alone
_ONE_FLAG = re.compile(r"`--([\w.-]+)`")
#: a text of the tables that says the words to write
WRITE = re.compile(r"write ((?:--[\w.-]+(?: (?!--|with |or |and )[^\s,:;(]+)*\s*)+)(\(.*\))?")


@dataclass(frozen=True)
class Stated:
    """A flag of slime with its words, and the option that says so."""

    flag: str  #: without dashes
    words: tuple[str, ...]
    option: Option


@dataclass
class Translation:
    """What becomes of a recipe."""

    recipe: Recipe
    stated: list[Stated] = field(default_factory=list)
    terms: list[tuple[str, str]] = field(default_factory=list)  #: several rewards: a function and its weight
    by_hand: dict[str, str] = field(default_factory=dict)  #: option -> what to do
    unneeded: dict[str, str] = field(default_factory=dict)  #: option -> why it can be left out
    without: list[str] = field(default_factory=list)  #: options without a counterpart


@functools.cache
def _of_frameworks() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = tomllib.loads(
        Path(__file__).with_name("frameworks.toml").read_text(encoding="utf-8")
    )
    return found


def renamed(framework: Framework) -> Mapping[str, str]:
    """Newer spellings of options -> those of the tables."""
    return _of_frameworks()["renamed"].get(framework, {})


def defaults(framework: Framework) -> Mapping[str, str]:
    """Options -> values that a run of the framework has without saying so."""
    return _of_frameworks()["defaults"][framework]


class Translator:
    """A translation in progress. Options in `done` need nothing more."""

    def __init__(self, recipe: Recipe) -> None:
        stated = {option.name for option in recipe.options}
        self.recipe, self.result, self.done = recipe, Translation(recipe), set[str]()
        unsaid = [
            Option(name, tuple(value.split()), stated=False)
            for name, value in defaults(recipe.framework).items()
            if name not in stated
        ]
        self.options = [*recipe.options, *unsaid]
        self._by_name = {option.name: option for option in self.options}
        for option in recipe.options:
            if any(UNKNOWN in value for value in option.values):
                self.by_hand(option.name, "its value is the output of a command: write it yourself")

    def get(self, name: str) -> str:
        """The value of an option, or an empty text."""
        return self._by_name[name].value if name in self._by_name and name not in self.result.by_hand else ""

    def is_on(self, name: str) -> bool:
        """Whether a switch is on."""
        return name in self._by_name and self._by_name[name].is_on

    def number(self, name: str, otherwise: int = 1) -> Fraction:
        """The value of an option as a number."""
        try:
            return Fraction(self.get(name))
        except (ValueError, ZeroDivisionError):
            return Fraction(otherwise)

    def say(self, name: str, flag: str, *words: str) -> None:
        """`--flag words` follows from the option `name`."""
        option = self._by_name.get(name, Option(name, (), stated=False))
        self.done.add(name)
        self.result.stated.append(Stated(flag, words, option))

    def whole(self, name: str, flag: str, value: Fraction, what: str) -> None:
        """`--flag value` follows from `name`, if the value is a whole number."""
        if value.denominator == 1 and value > 0:
            self.say(name, flag, str(value))
        else:
            self.by_hand(name, f"--{flag} would be {float(value):g}, {what}, which is no whole number")

    def by_hand(self, name: str, what: str) -> None:
        """Somebody has to do something about this option."""
        self.done.add(name)
        self.result.by_hand[name] = what

    def unneeded(self, name: str, why: str) -> None:
        """The option is not needed here."""
        self.done.add(name)
        if name in self._by_name and self._by_name[name].stated:
            self.result.unneeded[name] = why

    def by_table(self, option: Option) -> None:
        """What the tables say of this option; without a row, the flag of the same name."""
        framework = self.recipe.framework
        text = instead_of("flags" if framework == "THUDM's slime" else framework, option.name)
        if text is None:
            self._same_name(option)
        elif DROP.search(text) is not None:
            self.unneeded(option.name, DROP.sub("", text))
        elif (written := WRITE.fullmatch(text)) is not None:
            self._write(option, written[1].split())
        elif (one := _ONE_FLAG.match(text)) is not None and len(set(_ONE_FLAG.findall(text))) == 1:
            if self._is_off(option, one[1]):
                self.unneeded(option.name, "off, as here")
            else:
                self.say(option.name, one[1], *self._words(option, one[1]))
        else:
            self.by_hand(option.name, text)

    def _same_name(self, option: Option) -> None:
        name = option.name.replace("_", "-")
        flag = find_flag(name)
        if (
            self.recipe.framework == "verl"
            or (flag is None and component_option(name) is None)
            or (flag is not None and flag.target == UNAVAILABLE)
        ):
            self._without(option)
        elif self._is_off(option, name):
            self.unneeded(option.name, "off, as here")
        else:
            self.say(option.name, name, *self._words(option, name))

    def _without(self, option: Option) -> None:
        if option.stated:
            self.result.without.append(option.name)

    def _write(self, option: Option, words: list[str]) -> None:
        """Say the words of the table: one in capital letters is the option's value, as is what a last flag lacks."""
        said: list[tuple[str, list[str]]] = []
        for word in words:
            if word.startswith("--"):
                said.append((word[2:], []))
            else:
                said[-1][1].append(option.value if word.isupper() else word)
        last, after = said[-1]
        flag = find_flag(last)
        if not after and option.values and not (flag is not None and flag.is_switch):
            after += option.values
        for name, values in said:
            self.say(option.name, name, *values)

    def _is_off(self, option: Option, name: str) -> bool:
        flag = find_flag(name)
        return flag is not None and flag.is_switch and not option.is_on and bool(option.values)

    def _words(self, option: Option, name: str) -> tuple[str, ...]:
        flag = find_flag(name)
        if flag is not None and flag.is_switch:
            return ()
        return option.values

    def rollouts(self, name: str, prompts_from: str, *, most: int | None = None, uses: int = 1) -> None:
        """`--num-rollout` for the epochs in `name`, over the prompts of the option `prompts_from`.

        Each batch is trained on in `uses` rollouts.
        """
        per_rollout = self._said("rollout-batch-size")
        count = count_prompts(self.recipe.path, self._by_name[prompts_from].values) if self.get(prompts_from) else None
        count = most if count is None else min(count, most or count)
        if count is None or per_rollout is None:
            shown = per_rollout or "--rollout-batch-size"
            times = f" x {uses} uses of a batch" if uses > 1 else ""
            self.by_hand(name, f"--num-rollout: {self.get(name)} epochs x prompts / {shown}{times}")
        else:
            self.say(name, "num-rollout", str(max(1, int(self.number(name) * count / per_rollout) * uses)))

    def _said(self, flag: str) -> int | None:
        return next((int(one.words[0]) for one in self.result.stated if one.flag == flag and one.words), None)

    def data(self, name: str, flag: str = "prompt-data") -> None:
        """Prompt files; a name of the Hugging Face Hub gets `hf://`."""
        if name in self._by_name and self.get(name):
            places = [place_of(self.recipe.path, value) for value in self._by_name[name].values]
            words = places if flag == "prompt-data" else [word for one in places for word in (_stem(one), one)]
            self.say(name, flag, *words)

    def interval(self, name: str, flag: str, steps: Fraction = Fraction(1)) -> None:
        """An interval in optimizer steps, or -1 for none."""
        if not self.get(name):
            return
        every = self.number(name, -1)
        if every <= 0:
            self.unneeded(name, "off, as here")
        else:
            self.say(name, flag, str(max(1, round(every / steps))))


def _stem(place: str) -> str:
    return re.sub(r"\W+", "_", place.rstrip("/").rpartition("/")[2].partition(".")[0]) or "held_out"
