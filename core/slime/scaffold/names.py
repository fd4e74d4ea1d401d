"""What a new plugin and its parts are called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime.errors import ConfigError
from slime.plugins.find import find_plugins
from slime.plugins.kinds import KINDS

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_LONGEST = 40


@dataclass(frozen=True, slots=True)
class Names:
    """All names that follow from one: for the reward `my-reward`,"""

    #: `reward`
    kind: str
    #: `slime-reward-my-reward`, which is also the folder
    distribution: str
    #: `slime_reward_my_reward`
    module: str
    #: `my_reward`: the plugin's id and its component's name
    plugin: str
    #: `MyReward`
    class_name: str

    @property
    def component(self) -> str:
        """The component's name, which is the plugin's: a package may get more of them."""
        return self.plugin

    @property
    def title(self) -> str:
        """`reward my-reward`."""
        return f"{KINDS[self.kind].title} {self.plugin}"

    @classmethod
    def of(cls, kind: str, name: str) -> Names:
        """The names for a new component of `kind`.

        Raises `ConfigError` for a name that cannot be one, or that an installed plugin of another package has.  Only
        metadata is read for it.
        """
        prefix = f"slime-{kind.replace('_', '-')}-"
        bare = name.replace("_", "-")
        if bare.startswith(prefix) and _NAME.fullmatch(bare.removeprefix(prefix)):
            raise ConfigError(
                f"{name!r} already says what kind it is. Did you mean {bare.removeprefix(prefix)}?"
                f" The package is then called {bare}."
            )
        if not _NAME.fullmatch(name) or len(name) > _LONGEST:
            near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:_LONGEST].strip("-")
            raise ConfigError(
                f"{name!r} cannot name a plugin: expected lower-case letters, digits and single dashes, beginning with"
                f" a letter, at most {_LONGEST} long." + (f" Did you mean {near}?" if near else "")
            )
        if re.fullmatch(r"slime|slime-.*|test|tests|impl|options", bare):
            raise ConfigError(f"{name!r} is a reserved word. Name the plugin after what it does.")
        names = cls(
            kind=kind,
            distribution=prefix + bare,
            module=(prefix + bare).replace("-", "_"),
            plugin=bare.replace("-", "_"),
            class_name="".join(part.capitalize() for part in bare.split("-")),
        )
        for found in find_plugins():
            if found.name == names.plugin and found.distribution != names.distribution:
                raise ConfigError(
                    f"{names.plugin!r} is the id of a plugin of {found.package}, which is installed; two plugins of"
                    " one id cannot be used together. Choose another name."
                )
        return names
