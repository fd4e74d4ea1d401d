"""A checkpoint's `plugins.json` against the plugins of the run that continues it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slime.errors import PluginLoadError, PluginNotFoundError
from slime.plugins.component import Component
from slime.plugins.local import LOCAL_DISTRIBUTION
from slime.plugins.provenance import FORMAT


def check_saved(
    saved: Mapping[str, Any], now: Mapping[str, Any], find: Callable[[str, str], Component], *, strict: bool
) -> Iterator[str]:
    """What differs, as warnings; `saved` and `now` are contents of `plugins.json`.

    - a component that is no longer installed raises `PluginNotFoundError`, with what to install; a file of the user's
      own may have moved, and is compared with the run's only where that has the same path;
    - one of another distribution or version, or whose code has changed under one version: a warning, and where
      plugins are `strict`, a `PluginLoadError`;
    - another component in its place, or other options: a warning, since a run may mean it.
    """
    if saved.get("format") != FORMAT:
        raise PluginLoadError(f"plugins.json has format {saved.get('format')!r}, this slime reads format {FORMAT}")
    #: how code changed -> the components it changed for, which often come from one distribution
    changes: dict[str, list[str]] = {}
    for slot, was in saved["used"].items():
        made = f"the checkpoint was made with {was['kind']} {was['id']}"
        try:
            if was["distribution"] != LOCAL_DISTRIBUTION:
                find(was["kind"], was["id"])
        except PluginNotFoundError as error:
            raise PluginNotFoundError(
                f"{made} of {was['distribution']} {was['version']}, which is missing. {error}"
            ) from None
        use = now["used"].get(slot)
        if use is None or use["id"] != was["id"]:
            yield f"{made}, this run has {'none' if use is None else use['id']} as {slot}"
            continue
        if (changed := _code_changed(was, use)) is not None:
            changes.setdefault(changed, []).append(f"{was['kind']} {was['id']}")
        for name in ("options", "limits", "weight"):
            if use[name] != was[name]:
                yield f"{made} with {name} {was[name]}, this run has {use[name]}"
    for changed, components in changes.items():
        message = f"the checkpoint was made with {', '.join(components)} {changed}"
        if strict:
            raise PluginLoadError(f"{message}, and [plugins] strict is on")
        yield message


def _code_changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """How the code of a component differs; None where it does not, as far as is known."""
    if (now["distribution"], now["version"]) != (was["distribution"], was["version"]):
        old, new = (f"{one['distribution']} {one['version']}" for one in (was, now))
        return f"of {old}, now it is of {new}"
    for name in ("commit", "hash", "dirty"):
        old, new = was["source"].get(name), now["source"].get(name)
        if old is not None and new is not None and old != new:
            return f"of {was['distribution']} {was['version']} with {name} {str(old)[:12]}, now it is {str(new)[:12]}"
    return None
