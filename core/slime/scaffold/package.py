"""Writes the files of a new plugin package."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from slime import __version__
from slime.errors import ConfigError
from slime.plugin import API_VERSION
from slime.scaffold.names import Names

#: ends the names of templates, so that no tool takes them for source; stripped from what is written
_ENDING = ".tmpl"
#: the folder of templates that becomes the package's module
_MODULE = "module/"


def write_package(names: Names, into: Path) -> Path:
    """Write the package to a new folder in `into`; returns it.

    Raises `ConfigError` where the folder is there already, without touching it, and where it cannot be written.
    """
    folder = into / names.distribution
    if not into.is_dir():
        raise ConfigError(f"--into {into} is no folder")
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
    words = {
        "kind": names.kind.replace("_", "-"),
        "kind_title": names.title.removesuffix(f" {names.plugin}"),
        "distribution": names.distribution,
        "module": names.module,
        "plugin": names.plugin,
        "component": names.component,
        "Class": names.class_name,
        "api": str(API_VERSION),
        "slime_range": _range(__version__),
    }
    texts: dict[str, str] = {}
    for folder in ("package", names.kind):
        for path, text in _templates(files("slime.scaffold") / "templates" / folder):
            where = path.replace(_MODULE, f"{names.module}/")
            texts[where] = Template(text).substitute(words)
    return dict(sorted(texts.items()))


def _templates(folder: Traversable, before: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _templates(entry, f"{before}{entry.name}/")
        elif entry.name.endswith(_ENDING):
            found.append((before + entry.name.removesuffix(_ENDING), entry.read_text(encoding="utf-8")))
    return found


def _range(version: str) -> str:
    """From this version on, to the next major one.  In between, the plugin API number tells what fits."""
    major, minor, *_ = version.split(".")
    return f">={major}.{minor},<{int(major) + 1}"
