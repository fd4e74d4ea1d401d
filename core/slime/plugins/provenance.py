"""What code a run was made with: the content of `plugins.json`."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import importlib_metadata

from slime import __version__
from slime.plugin import API_VERSION
from slime.plugins.component import Component
from slime.plugins.find import FoundPlugin
from slime.plugins.limits import LIMITED_KINDS
from slime.plugins.load import LoadedPlugin
from slime.plugins.resolve import Resolved

FORMAT = 2
#: entry-point groups whose mere presence changes what engines do
ENGINE_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
_GIT_TIMEOUT_S = 10.0


def provenance_of(plugins: Sequence[LoadedPlugin], used: Mapping[str, Resolved]) -> dict[str, Any]:
    """JSON-ready:

    - `plugins`: every loaded plugin with `plugin, distribution, version, api, entry`;
    - `engine_plugins`: what is installed to change the engines (`group, name, distribution, version`);
    - `used`: slot -> the component the run uses, with `kind, id, weight, factory, options, limits` (defaults filled
      in) and its distribution's `version` and `source`: `hash` of the installed files (none for editable installs), and
      `url, editable, commit, dirty` as far as they are known.
    """
    return {
        "format": FORMAT,
        "slime": __version__,
        "api": API_VERSION,
        "plugins": [_identity(plugin.found) | {"api": plugin.api} for plugin in plugins],
        "engine_plugins": [
            {"group": group, "name": entry.name, "distribution": entry.dist.name, "version": entry.dist.version}
            for group in ENGINE_GROUPS
            for entry in sorted(importlib_metadata.entry_points(group=group), key=lambda entry: entry.name)
        ],
        "used": {
            slot: {
                "kind": resolved.use.kind,
                "id": resolved.component.id,
                "weight": resolved.use.weight,
                **_identity(resolved.component.found),
                "factory": resolved.component.spec.factory,
                "options": resolved.options.model_dump(mode="json"),
                "limits": resolved.limits.model_dump(mode="json") if resolved.use.kind in LIMITED_KINDS else {},
                "source": source_of(resolved.component.found),
            }
            for slot, resolved in used.items()
        },
    }


def fingerprint_of(plugins: Sequence[LoadedPlugin], used: Iterable[Component] = ()) -> str:
    """Equal in two processes that loaded the same plugins in the same versions with the same components.

    The modules' own text is part of it, since an editable install changes without its version; so are the identities of
    the `used` components, which for a file of the user's own are its path and hash.
    """
    content = [
        [
            *_identity(plugin.found).values(),
            plugin.api,
            _digest(_module_text(plugin)),
            [[component.kind, component.id, component.spec.factory] for component in plugin.components],
        ]
        for plugin in plugins
    ] + [[component.id, component.version] for component in used]
    return _digest(json.dumps(content).encode())[:16]


def source_of(found: FoundPlugin) -> dict[str, Any]:
    """Where a distribution's code came from (PEP 610) and a hash of what is installed."""
    direct = json.loads(found.metadata.read_text("direct_url.json") or "{}")
    editable = bool(direct.get("dir_info", {}).get("editable", False))
    source: dict[str, Any] = {"editable": editable, "hash": None if editable else _installed_hash(found)}
    if "url" in direct:
        source["url"] = direct["url"]
    if "archive_info" in direct:
        source["hash"] = direct["archive_info"].get("hashes", {}).get("sha256", source["hash"])
    if "vcs_info" in direct:
        source["commit"] = direct["vcs_info"].get("commit_id")
    elif editable:
        folder = Path(unquote(urlparse(direct["url"]).path))
        # A folder inside a foreign repository is not described by its commit.
        commit = _git(folder, "rev-parse", "HEAD") if _git(folder, "ls-files", "--", ".") else None
        if commit is not None:
            source["commit"] = commit
            source["dirty"] = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    return source


def _identity(found: FoundPlugin) -> dict[str, str]:
    return {
        "plugin": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "entry": found.entry,
    }


def _installed_hash(found: FoundPlugin) -> str | None:
    """A hash over the hashes of the installed files (`RECORD`); None for installs without them."""
    record = found.metadata.read_text("RECORD")
    if record is None:
        return None
    lines = [line for line in record.splitlines() if "sha256=" in line and ".dist-info/" not in line]
    return _digest("\n".join(sorted(lines)).encode()) if lines else None


def _module_text(plugin: LoadedPlugin) -> bytes:
    path = plugin.module.__file__
    return Path(path).read_bytes() if path is not None and Path(path).is_file() else b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None where the folder is no repository or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
