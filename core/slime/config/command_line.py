"""`slime train`'s command line to settings.

Flags are matched exactly: no abbreviations.  A flag may be written `--flag value` or `--flag=value`; a
switch `--flag`, `--no-flag` or `--flag=false`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.config.flags import UNAVAILABLE, Flag, FlagTable, Found
from slime.config.own_flags import component_option, nearest_component_option
from slime.config.settings import COMPONENT, Setting, Settings
from slime.config.values import Arity


@dataclass
class CommandLine:
    """What a command line says."""

    files: list[str] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)


def parse_command_line(argv: Sequence[str], flags: FlagTable) -> CommandLine:
    """Read `argv`.  What is wrong with it is collected in `settings.problems`."""
    return _Parser(flags, list(argv)).parse()


class _Parser:
    def __init__(self, flags: FlagTable, argv: list[str]) -> None:
        self._flags = flags
        self._words = argv
        self._line = CommandLine()
        self._last_switch = ""

    def parse(self) -> CommandLine:
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
            elif self._line.files:
                self._problem(f"unexpected {word!r}: there is a run file already, {self._line.files[0]}")
            else:
                self._line.files.append(word)
        return self._line

    def _problem(self, text: str) -> None:
        self._line.settings.problems.append(text)

    def _flag(self, name: str, attached: str | None) -> None:
        self._last_switch = ""
        component = component_option(name)
        if component is not None:
            slot, key = component
            words = [attached] if attached is not None else self._take(Arity.ONE)
            if words:
                self._store(Setting(COMPONENT + slot, key, words[0], f"--{name}"))
            else:
                self._problem(f"--{name} needs a value (for a switch: true or false)")
            return
        found = self._flags.find(name)
        if found is None:
            self._problem(f"unknown flag --{name}.{nearest_component_option(name) or self._flags.nearest(name)}")
            # What follows it can only be its value.
            self._take(Arity.ANY)
            return
        if found.flag.is_switch:
            self._switch(found, name, attached)
        else:
            self._valued(found.flag, name, attached)

    def _switch(self, found: Found, name: str, attached: str | None) -> None:
        words = {None: True, "true": True, "1": True, "false": False, "0": False}
        state = words.get(attached if attached is None else attached.lower())
        if state is None:
            self._problem(f"--{name}: got {attached!r}, expected true or false")
            return
        self._last_switch = f"--{name}" if attached is None else ""
        value = found.flag.on == (state != found.negated)
        self._store(Setting(found.flag.target, found.flag.key, value, f"--{name}", found.flag))

    def _valued(self, flag: Flag, name: str, attached: str | None) -> None:
        words = [attached] if attached is not None else self._take(flag.type.arity)
        if not words and flag.type.arity in (Arity.ONE, Arity.SOME):
            after = f", got the flag {self._words[0]}" if self._words else ""
            needed = "at least one value" if flag.type.arity is Arity.SOME else "a value"
            kind = "pairs of a name and a file" if flag.pairs else flag.type.describe()
            hint = "" if flag.target == UNAVAILABLE else f" ({kind})"
            self._problem(f"--{name} needs {needed}{hint}{after}")
            return
        if flag.pairs:
            self._pairs(flag, name, words)
            return
        self._store(Setting(flag.target, flag.key, flag.type.from_words(words), f"--{name}", flag))

    def _pairs(self, flag: Flag, name: str, words: list[str]) -> None:
        """Pairs of words; repeating the flag adds to it."""
        if len(words) % 2:
            self._problem(f"--{name} needs pairs of a name and a file, got {len(words)} words: {' '.join(words)}")
            return
        pairs = [list(pair) for pair in zip(words[::2], words[1::2], strict=True)]
        items = self._line.settings.items
        before = next((s for s in items if s.target == flag.target and s.key == flag.key), None)
        if before is not None:
            items.remove(before)
            pairs = before.value + pairs
        self._store(Setting(flag.target, flag.key, pairs, f"--{name}", flag))

    def _store(self, setting: Setting) -> None:
        self._line.settings.items.append(setting)

    def _take(self, arity: Arity) -> list[str]:
        """The words that follow, up to the next flag, at most as many as `arity` allows."""
        most = 1 if arity in (Arity.ONE, Arity.MAYBE) else len(self._words)
        taken: list[str] = []
        while self._words and len(taken) < most and not self._words[0].startswith("--"):
            taken.append(self._words.pop(0))
        return taken
