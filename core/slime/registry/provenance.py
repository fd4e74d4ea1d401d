"""What code a run was made with: `plugins.json`."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import importlib_metadata

from slime import __version__
from slime.errors.redaction import redacted
from slime.plugin import API_VERSION
from slime.registry.component import LIMITED_KINDS
from slime.registry.find import FoundPlugin
from slime.registry.load import LoadedPlugin
from slime.registry.resolve import Resolved

FORMAT = 2
#: entry-point groups of SGLang's own plugins, which change the engines when they are installed
ENGINE_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
_GIT_TIMEOUT_S = 10.0


def provenance_of(
    plugins: Sequence[LoadedPlugin], used: Mapping[str, Resolved], code: Mapping[str, str]
) -> dict[str, Any]:
    """JSON-ready:

    - `plugins`: every loaded plugin with `plugin, distribution, version, api, entry`;
    - `engine_plugins`: installed plugins of the engines (`group, name, distribution, version`);
    - `used`: slot -> the component the run uses, with `kind, id, weight, factory, options, limits` (defaults filled
      in) and its distribution's `version` and `source`: `hash` of the installed files (none for editable installs), and
      `url, editable, commit, dirty` if they are known;
    - `model_code`: name -> sha256 of the Python files of the model folder, if they may run.
    """
    repository = cache(_repository)  # git is asked once about the folder that several components come from
    return {
        "format": FORMAT,
        "slime": __version__,
        "api": API_VERSION,
        "plugins": [plugin.found.identity | {"api": plugin.api} for plugin in plugins],
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
                **resolved.component.found.identity,
                "factory": resolved.component.spec.factory,
                "options": redacted(resolved.options.model_dump(mode="json")),
                "limits": resolved.limits.model_dump(mode="json") if resolved.use.kind in LIMITED_KINDS else {},
                "source": source_of(resolved.component.found, repository),
            }
            for slot, resolved in used.items()
        },
        "model_code": dict(code),
    }


def model_code(folder: str | None) -> dict[str, str]:
    """Name -> sha256 of the Python files in a model folder."""
    files = [] if folder is None else sorted(Path(folder).glob("*.py"))
    return {path.name: _digest(path.read_bytes()) for path in files if path.is_file()}


def digest_of(plugins: Sequence[LoadedPlugin]) -> str:
    """Equal in two processes that loaded the same plugins in the same versions with the same components.

    The modules' own text is part of it, since an editable install changes without its version.
    """
    content = [
        [
            *plugin.found.identity.values(),
            plugin.api,
            _digest(_module_text(plugin)),
            [[component.kind, component.id, component.spec.factory] for component in plugin.components],
        ]
        for plugin in plugins
    ]
    return _digest(json.dumps(content).encode())[:16]


def source_of(found: FoundPlugin, repository: Callable[[Path], Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Where a distribution's code came from (PEP 610) and a hash of the files on disk; of a user's file, the same.

    Args:
        found: The plugin.
        repository: Replaces `_repository`, for a caller that asks about one folder several times.
    """
    if found.file_sha256 is not None:
        return {"editable": False, "hash": found.file_sha256, "url": Path(found.entry).as_uri()}
    direct, folder = found.direct_url, found.editable_folder
    source: dict[str, Any] = {"editable": folder is not None, "hash": _hash_of_files(found) if folder is None else None}
    if "url" in direct:
        source["url"] = direct["url"]
    if "vcs_info" in direct:
        source["commit"] = direct["vcs_info"].get("commit_id")
    elif folder is not None:
        source |= (repository or _repository)(folder)
    return source


def _repository(folder: Path) -> dict[str, Any]:
    """`commit` and `dirty` of the repository of a folder; nothing if there is none, or it does not track the folder."""
    commit = _git(folder, "rev-parse", "HEAD") if _git(folder, "ls-files", "--", ".") else None
    if commit is None:
        return {}
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _module_text(plugin: LoadedPlugin) -> bytes:
    path = plugin.module.__file__
    return Path(path).read_bytes() if path is not None and Path(path).is_file() else b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if the folder is not a repository, or git is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _hash_of_files(found: FoundPlugin) -> str | None:
    """Hash of the names and contents of the files that pip installed, as they are on disk; None if none are listed.

    Files that differ between installations of one wheel are left out: scripts, byte code and pip's metadata.
    """
    total = hashlib.sha256()
    files = 0
    for file in sorted(found.entry_point.dist.files or [] if found.entry_point.dist else [], key=str):
        name = str(file)
        noted = ".dist-info/" in name and not name.endswith("/entry_points.txt")
        if name.startswith("..") or noted or name.endswith(".pyc"):
            continue
        path = Path(str(file.locate()))
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        total.update(f"{name} {content}\n".encode())
        files += 1
    return total.hexdigest() if files else None
