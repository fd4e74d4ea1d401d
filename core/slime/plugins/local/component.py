"""A user's own function or class as a component."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from slime.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError
from slime.plugin import ComponentSpec, Context, NoOptions, Options, RewardSpec
from slime.plugins.component import Component
from slime.plugins.find import GROUP, FoundPlugin
from slime.plugins.local.definitions import Class
from slime.plugins.local.loading import load
from slime.plugins.local.options import ModelOptions, RequiredModelOptions, ScoreOptions
from slime.plugins.local.reference import PREFIX, Reference
from slime.plugins.local.roles import role_of_kind
from slime.plugins.local.target import Target, find_target

#: what stands where a component of a package has the package's name
LOCAL_DISTRIBUTION = "local"
#: digits of the file's hash that are its version
_VERSION_DIGITS = 12


@dataclass(frozen=True, slots=True)
class LocalComponent(Component):
    """Found like a plugin's component; its distribution is `local` and its version the hash of its file."""

    target: Target

    @property
    def id(self) -> str:
        """The reference that always finds it."""
        return str(self.target.reference)

    @property
    def label(self) -> str:
        """`custom_rm.reward_func`: no path, which would make a folder of every part of it."""
        return self.name

    @property
    def title(self) -> str:
        """For messages: `reward custom_rm.py:reward_func (local 0123456789ab)`."""
        target = self.target
        place = target.reference.dotted or f"{target.source.path.name}:{target.name}"
        return f"{target.role.title} {place} ({self.found.package})"

    def factory(self) -> Callable[[Options, Context], Any]:
        """What makes the component: the file is run now.

        Raises `PluginLoadError` where it cannot be loaded.
        """
        module, _, name = self.target.shape.adapter.partition(":")
        adapter = getattr(importlib.import_module(module), name)
        try:
            function = load(self.target)
        except PluginLoadError as error:
            raise PluginLoadError(f"{self.title}: {error}") from error
        return lambda options, context: adapter(function, options, context)


def find_local(kind: str, name: str) -> LocalComponent:
    """The component that the reference `name` means where one of `kind` is wanted.  The file is read, not run.

    Raises as `find_target` does, and `ConfigError` for a name that is no reference.
    """
    try:
        role = role_of_kind(kind)
        target = find_target(role, Reference.parse(name))
    except (ConfigError, PluginConflictError, PluginNotFoundError, PluginLoadError) as error:
        raise type(error)(f"{kind.replace('_', ' ')} {PREFIX}{name.removeprefix(PREFIX)}: {error}") from None
    return LocalComponent(kind, _spec(target), _found(target), target.origin, target)


def _spec(target: Target) -> ComponentSpec:
    shape, role = target.shape, target.role
    name = target.reference.dotted or f"{target.source.path.stem}.{target.name}"
    if role.spec is RewardSpec:
        return RewardSpec(
            name=name,
            factory=shape.adapter,
            options=_reward_options(target),
            summary=shape.text,
            scope="group" if shape.whole_groups else "sample",
            # Nothing is known of it, so nothing is promised.
            deterministic=False,
        )
    return role.spec(name=name, factory=shape.adapter, options=NoOptions, summary=shape.text)


def _reward_options(target: Target) -> type[Options]:
    if not isinstance(target.definition, Class):
        return ScoreOptions
    constructor = target.definition.methods.get("__init__")
    needed = constructor is not None and "model_path" in constructor.parameters.required
    return RequiredModelOptions if needed else ModelOptions


def _found(target: Target) -> FoundPlugin:
    source = target.source
    return FoundPlugin(
        name=LOCAL_DISTRIBUTION,
        entry=str(source.path),
        distribution=LOCAL_DISTRIBUTION,
        version=source.sha256[:_VERSION_DIGITS],
        entry_point=importlib_metadata.EntryPoint(LOCAL_DISTRIBUTION, str(source.path), GROUP),
        metadata=_FileMetadata(source.path.as_uri(), source.sha256),
    )


@dataclass(frozen=True, slots=True)
class _FileMetadata:
    """A file's origin in the words of PEP 610, as pip writes them of a package from a local archive."""

    url: str
    sha256: str

    def read_text(self, filename: str, /) -> str | None:
        """`direct_url.json`; there is nothing else."""
        if filename != "direct_url.json":
            return None
        return json.dumps({"url": self.url, "archive_info": {"hashes": {"sha256": self.sha256}}})
