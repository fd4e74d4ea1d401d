"""`slime plugins new`: writes a new plugin package that is small, complete and tested.

`templates/package` has what all kinds share, the other folders what each kind adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from slime import __version__
from slime.errors import ConfigError
from slime.plugin import API_VERSION
from slime.registry.find import find_plugins
from slime.registry.kinds import KINDS

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_LONGEST = 40
#: ends the names of templates, so that no tool takes them for source files
_ENDING = ".tmpl"
#: the folder of templates that becomes the package's module
_MODULE = "module/"


@dataclass(frozen=True, slots=True)
class Names:
    """All names that follow from one; examples are for the reward `my-reward`."""

    #: `reward`
    kind: str
    #: `slime-reward-my-reward`, which is also the folder
    distribution: str
    #: `slime_reward_my_reward`
    module: str
    #: `my_reward`: the id of the plugin and the name of its component
    plugin: str
    #: `MyReward`
    class_name: str

    @classmethod
    def of(cls, kind: str, name: str) -> Names:
        """The names for a new component of `kind`. Only metadata of the installed plugins is read.

        Raises:
            ConfigError: `name` is not a valid name, or an installed plugin of another package has it.
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
                    f"{names.plugin!r} is the id of a plugin of {found.package}, which is installed; two plugins with"
                    " one id cannot be used together. Choose another name."
                )
        return names


def write_package(names: Names, into: Path) -> Path:
    """Write the package to a new folder in `into`, and return it.

    Raises:
        ConfigError: The folder exists already (and is left alone), or cannot be written.
    """
    folder = into / names.distribution
    if not into.is_dir():
        raise ConfigError(f"--into {into} is not a folder")
    try:
        folder.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"{folder} exists already, and nothing in it was changed. Choose another NAME or --into."
        ) from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    for name, text in package_files(names).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def package_files(names: Names) -> dict[str, str]:
    """Relative path -> text of every file of the package."""
    major, minor, *_ = __version__.split(".")
    words = {
        "kind": names.kind.replace("_", "-"),
        "kind_title": KINDS[names.kind].title,
        "distribution": names.distribution,
        "module": names.module,
        "plugin": names.plugin,
        "component": names.plugin,
        "Class": names.class_name,
        "api": str(API_VERSION),
        # Up to the next major version; in between, the number of the plugin API tells what fits.
        "slime_range": f">={major}.{minor},<{int(major) + 1}",
    }
    templates = files("slime.testing.scaffold") / "templates"
    texts = {
        path.replace(_MODULE, f"{names.module}/"): Template(text).substitute(words)
        for folder in ("package", names.kind)
        for path, text in _templates(templates / folder)
    }
    return dict(sorted(texts.items()))


def _templates(folder: Traversable, parent: str = "") -> Iterator[tuple[str, str]]:
    """(relative path without the ending, text) of every template in a folder."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, f"{parent}{entry.name}/")
        elif entry.name.endswith(_ENDING):
            yield parent + entry.name.removesuffix(_ENDING), entry.read_text(encoding="utf-8")
