"""The table of flags: every name, what it takes, and where its value goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from slime.config.values import Arity, ValueType
from slime.errors import did_you_mean

#: targets that are not sections of the run configuration
MEGATRON, SGLANG, PLUGINS, UNAVAILABLE = "megatron", "sglang", "plugins", "unavailable"


@dataclass(frozen=True)
class Flag:
    """One spelling of one option."""

    name: str  #: without leading dashes: "rollout-batch-size"
    target: str  #: a section of `slime.config.options.SECTIONS`, or one of the targets above
    key: str  #: the name of its value there
    type: ValueType
    help: str = ""
    default: str = ""
    #: what a switch stores; its negation stores the opposite
    on: bool = True
    #: another spelling of the flag of this name
    alias_of: str | None = None
    #: words come in pairs, and repeating the flag adds to it
    pairs: bool = False

    @property
    def spelled(self) -> str:
        """As on a command line."""
        return f"--{self.name}"

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.type.arity is Arity.SWITCH


@dataclass(frozen=True)
class Found:
    """A flag as it was written: `--no-NAME` finds the switch NAME, `negated`."""

    flag: Flag
    negated: bool = False


class FlagTable:
    """All flags.  Megatron's and SGLang's tables are read from the installed packages when first needed."""

    def __init__(
        self,
        own: Iterable[Flag],
        *,
        megatron: Callable[[], Iterable[Flag]],
        sglang: Callable[[], Iterable[Flag]],
    ) -> None:
        self._loaders = {MEGATRON: megatron, SGLANG: sglang}
        self._tables: dict[str, dict[str, Flag]] = {"": {flag.name: flag for flag in own}}

    def _table(self, target: str) -> dict[str, Flag]:
        if target not in self._tables:
            # What Megatron and slime both call by one name is slime's: there it is checked and acted upon.
            own = {flag.key for flag in self._tables[""].values()} if target == MEGATRON else set()
            self._tables[target] = {flag.name: flag for flag in self._loaders[target]() if flag.key not in own}
        return self._tables[target]

    def find(self, name: str) -> Found | None:
        """The flag called `name` (no leading dashes), exactly; None where there is none.  slime's own win."""
        for target in self._targets(name):
            table = self._table(target)
            if name in table:
                return Found(table[name])
            for positive in _positives(name, target):
                flag = table.get(positive)
                if flag is not None and flag.is_switch:
                    return Found(flag, negated=True)
        return None

    def find_key(self, target: str, key: str) -> Found | None:
        """The flag that a key of the run file's table `target` names (dashes or underscores)."""
        name = key.replace("_", "-")
        if target == SGLANG:
            name = f"sglang-{name}"
        table = self._table(target if target in self._loaders else "")
        # Megatron has a few names with capitals or its own underscores; fields are found by key as well.
        flag = table.get(name) or next((f for f in table.values() if f.target == target and f.key == key), None)
        if flag is not None and flag.target == target:
            return Found(flag)
        own = self._tables[""].get(name)
        return Found(own) if own is not None and own.target == UNAVAILABLE else None

    def nearest(self, name: str, *, within: str | None = None) -> str:
        """` Did you mean --X?` for an unknown name, or an empty string."""
        targets = self._targets(name) if within is None else [within]
        return did_you_mean(f"--{name}", [flag.spelled for target in targets for flag in self._table(target).values()])

    def keys(self, target: str) -> list[str]:
        """The keys that a table of the run file may have."""
        if target in self._loaders:
            prefix = "sglang-" if target == SGLANG else ""
            names = [flag.name.removeprefix(prefix) for flag in self._table(target).values()]
        else:
            # "plugins.allow" is the key "allow" of [plugins].
            names = [flag.name.split(".")[-1] for flag in self._tables[""].values() if flag.target == target]
        return [name.replace("-", "_") for name in names]

    def own(self) -> Iterator[Flag]:
        """slime's own flags, in the order of the sections."""
        return iter(self._tables[""].values())

    def of(self, target: str) -> Iterator[Flag]:
        """Megatron's or SGLang's flags."""
        return iter(self._table(target).values())

    @staticmethod
    def _targets(name: str) -> list[str]:
        if name.startswith(("sglang-", "no-sglang-")):
            return [SGLANG]
        return ["", MEGATRON]


def _positives(name: str, target: str) -> Iterator[str]:
    """Names of the switches that `name` may negate."""
    if target == SGLANG:
        for prefix in ("sglang-no-", "no-sglang-"):
            if name.startswith(prefix):
                yield "sglang-" + name.removeprefix(prefix)
        return
    for prefix in ("no-", "disable-") if target == MEGATRON else ("no-",):
        if name.startswith(prefix):
            yield name.removeprefix(prefix)
