"""`slime plugins --freeze` and `--compare`: whether two installations have the same plugin packages.

Only metadata and files are read; no plugin's code runs.
"""

from __future__ import annotations

from pathlib import Path

from slime import __version__
from slime.errors import ConfigError
from slime.registry.find import FoundPlugin, canonical, find_plugins
from slime.registry.provenance import source_of

_HEADER = "# slime plugins --freeze, format 1"


def print_pins() -> int:
    """Print one line of a pip requirements file for each package that has plugins."""
    print(f"{_HEADER}, slime {__version__}")
    for pin in _installed_pins():
        print(pin)
    return 0


def print_differences(path: Path) -> int:
    """Print how the installed packages differ from the pins in a file; returns 1 if they do.

    Raises:
        ConfigError: The file is not one that `--freeze` wrote.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--compare {path}: cannot be read: {error}") from None
    if not lines or not lines[0].startswith(_HEADER):
        raise ConfigError(
            f"--compare {path}: expected the output of `slime plugins --freeze`, which begins {_HEADER!r}"
        )
    pinned = _facts_by_package([line for line in lines if line.strip() and not line.startswith("#")])
    installed = _facts_by_package(_installed_pins())
    differences: list[str] = []
    for name in sorted(pinned.keys() | installed.keys()):
        before, now = pinned.get(name), installed.get(name)
        if before is None or now is None:
            version = (now or before or {})["version"]
            state = "installed ({}), but not pinned" if before is None else "pinned ({}), but not installed"
            differences.append(f"{name}: {state.format(version)}")
            continue
        for fact in sorted(before.keys() | now.keys()):
            if before.get(fact) != now.get(fact):
                differences.append(f"{name}: {fact} {now.get(fact, 'none')}, pinned {before.get(fact, 'none')}")
    print("\n".join(differences) if differences else f"the installed plugin packages are as in {path}")
    return int(bool(differences))


def _installed_pins() -> list[str]:
    """A pin of every package that has plugins, by name."""
    packages = {canonical(found.distribution): found for found in find_plugins()}
    return [_pin(found) for _, found in sorted(packages.items())]


def _pin(found: FoundPlugin) -> str:
    """A requirement with which pip installs the same package again; a comment states what pip cannot express."""
    source = source_of(found)
    url, commit = source.get("url"), source.get("commit")
    if source["editable"]:
        requirement = f"-e {url}"
    elif url is None:
        requirement = f"{found.distribution}=={found.version}"
    else:
        requirement = f"{found.distribution} @ {url if commit is None else f'git+{url}@{commit}'}"
    facts = [found.distribution, found.version]
    facts += [f"commit={commit}"] if commit else []
    facts += ["modified"] if source.get("dirty") else []
    facts += [f"sha256={source['hash']}"] if source["hash"] else []
    return f"{requirement}  # {' '.join(facts)}"


def _facts_by_package(pins: list[str]) -> dict[str, dict[str, str]]:
    """Package -> the facts in the comment of its pin: `version`, `commit`, `modified`, `sha256`."""
    packages = {}
    for pin in pins:
        words = pin.partition("  # ")[2].split()
        if len(words) < 2:
            raise ConfigError(f"{pin!r} is not a pin; expected a line that `slime plugins --freeze` printed")
        facts = (word.partition("=") for word in words[2:])
        packages[canonical(words[0])] = {"version": words[1]} | {name: value or "yes" for name, _, value in facts}
    return packages
