"""`slime plugins --freeze` and `--compare`: whether two installations have the same plugin code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime import __version__
from slime.errors import ConfigError
from slime.plugins.find import canonical, find_plugins
from slime.plugins.pins import Pin, pins_of

_HEAD = "# slime plugins --freeze, format 1"


def freeze() -> int:
    """Print one line for each package that has plugins; no plugin's code runs."""
    print("\n".join([f"{_HEAD}, slime {__version__}", *(pin.line for pin in pins_of(find_plugins()))]))
    return 0


def compare(path: Path) -> int:
    """Print how the installed packages differ from what `path` pins; 1 when they do.

    Raises `ConfigError` for a file that `--freeze` did not write.
    """
    differences = list(_differences(_read(path), pins_of(find_plugins())))
    print("\n".join(differences) if differences else f"the installed plugin packages are those of {path}")
    return int(bool(differences))


def _read(path: Path) -> dict[str, Pin]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--compare {path}: cannot be read: {error}") from None
    if not lines or not lines[0].startswith(_HEAD):
        raise ConfigError(f"--compare {path}: expected what `slime plugins --freeze` printed, which begins {_HEAD!r}")
    pins = [Pin.read(line) for line in lines[1:] if line.strip() and not line.startswith("#")]
    return {canonical(pin.distribution): pin for pin in pins}


def _differences(wanted: dict[str, Pin], installed: list[Pin]) -> Iterator[str]:
    here = {canonical(pin.distribution): pin for pin in installed}
    for name in sorted(wanted.keys() | here.keys()):
        was, now = wanted.get(name), here.get(name)
        if was is None and now is not None:
            yield f"{now.distribution}: installed ({now.version}), but not pinned"
        elif was is not None and now is None:
            yield f"{was.distribution}: pinned ({was.version}), but not installed"
        elif was is not None and now is not None:
            for what, before, after in was.compared(now):
                yield f"{now.distribution}: {what} {after}, pinned {before}"
