"""Reads the command line of `slime train`.

Flags are matched exactly: no abbreviations. A flag may be written `--flag value` or `--flag=value`; a switch `--flag`,
`--no-flag` or `--flag=false`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.config.flag_table import component_option, find_flag, nearest_flag
from slime.config.flags import COMPONENT, Flag, Setting, Settings
from slime.config.value_types import Arity
from slime.registry.original_names import foreign_option_hint


class CommandLine:
    """The run file and the settings of a command line. Problems are collected in `settings.problems`."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.file: str | None = None
        self.settings = Settings()
        self._words = list(argv)
        self._last_switch = ""
        while self._words:
            word = self._words.pop(0)
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word[2:].partition("=")
                self._flag(name, value if equals else None)
            elif word.startswith("-") and len(word) > 1:
                self._problem(f"unknown option {word}: slime's options begin with two dashes")
            elif self._last_switch:
                self._problem(
                    f"unexpected {word!r} after {self._last_switch}, which takes no value"
                    f" (write {self._last_switch}={word})"
                )
            elif "=" in word and (option := foreign_option_hint(word.lstrip("+").partition("=")[0])):
                self._problem(f"unexpected {word!r}: options begin with two dashes.{option}")
            elif self.file is not None:
                self._problem(f"unexpected {word!r}: the run file is already {self.file}")
            else:
                self.file = word

    def _problem(self, text: str) -> None:
        self.settings.problems.append(text)

    def _flag(self, name: str, attached: str | None) -> None:
        self._last_switch = ""
        component = component_option(name)
        if component is not None:
            slot, key = component
            words = [attached] if attached is not None else self._take(Arity.ONE)
            if words:
                self.settings.items[COMPONENT + slot, key] = Setting(words[0], f"--{name}")
            else:
                self._problem(f"--{name} needs a value (for a switch: true or false)")
            return
        flag = find_flag(name)
        if flag is None:
            self._problem(f"unknown flag --{name}.{nearest_flag(name)}")
            # Skip its values.
            self._take(Arity.ANY)
        elif flag.is_switch:
            self._switch(flag, name, attached)
        else:
            self._valued(flag, name, attached)

    def _switch(self, flag: Flag, name: str, attached: str | None) -> None:
        words = {"true": True, "1": True, "false": False, "0": False}
        state = True if attached is None else words.get(attached.lower())
        if state is None:
            self._problem(f"--{name}: got {attached!r}, expected true or false")
            return
        self._last_switch = f"--{name}" if attached is None else ""
        self._store(flag, name, flag.on == state)

    def _valued(self, flag: Flag, name: str, attached: str | None) -> None:
        arity = flag.type.arity
        words = [attached] if attached is not None else self._take(arity)
        if not words and arity in (Arity.ONE, Arity.SOME, Arity.PAIRS):
            after = f", got the flag {self._words[0]}" if self._words else ""
            needed = "a value" if arity is Arity.ONE else "at least one value"
            self._problem(f"--{name} needs {needed} ({flag.type.describe()}){after}")
        elif arity is Arity.PAIRS and len(words) % 2:
            self._problem(f"--{name} needs {flag.type.describe()}, got {len(words)} words: {' '.join(words)}")
        else:
            self._store(flag, name, flag.type.from_words(words))

    def _store(self, flag: Flag, name: str, value: Any) -> None:
        items, option = self.settings.items, (flag.target, flag.key)
        if flag.accumulates and option in items:
            value = items[option].value + value
        items[option] = Setting(value, f"--{name}", flag)

    def _take(self, arity: Arity) -> list[str]:
        """The words that follow, up to the next flag, at most as many as `arity` allows."""
        most = 1 if arity in (Arity.ONE, Arity.OPTIONAL) else len(self._words)
        taken: list[str] = []
        while self._words and len(taken) < most and not self._words[0].startswith("--"):
            taken.append(self._words.pop(0))
        return taken
