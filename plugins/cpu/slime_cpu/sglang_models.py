"""The model that an engine runs, without SGLang's other ones.

SGLang imports all its models, some two hundred modules, when it starts: two seconds of a processor and 60 MiB for one
model. Here a model's module is found by reading, and only that one is imported.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import re
from pathlib import Path
from typing import Any

_log = logging.getLogger("slime.cpu")

_PACKAGE = "sglang.srt.models"
#: SGLang's own list of modules not to import
_DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"
#: how a module says which models it has: `EntryClass = Name`, or a list of names
_ENTRIES = re.compile(r"^EntryClass\s*=\s*(\w+|\[[^\]]*\])", re.MULTILINE)


def import_on_demand() -> None:
    """Make SGLang's registry import a model when it is asked for. The registry must not have been imported.

    A model that no module names is left to SGLang, which then imports all of them.
    """
    package = importlib.import_module(_PACKAGE)
    names = [name for _, name, is_package in pkgutil.iter_modules(package.__path__) if not is_package]
    before = os.environ.get(_DISABLED)
    os.environ[_DISABLED] = ",".join(names)
    try:
        registry: Any = importlib.import_module(f"{_PACKAGE}.registry")
    finally:
        if before is None:
            del os.environ[_DISABLED]
        else:
            os.environ[_DISABLED] = before
    registry.import_model_classes.cache_clear()
    if external := registry.envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get():
        # Its modules were skipped too if they are called like some of SGLang's.
        registry.ModelRegistry.models = registry.import_model_classes(external)
    skipped = [] if before is None else [name.strip() for name in before.split(",")]
    folders = [Path(folder) for folder in package.__path__]
    registry.ModelRegistry.models = OnDemand(registry.ModelRegistry.models, folders, skipped)
    registry.ModelRegistry._default_models_loaded = False


class OnDemand(dict[str, Any]):
    """Models by the name of their class; those of SGLang are imported when they are looked up."""

    def __init__(self, models: dict[str, Any], folders: list[Path], skipped: list[str]) -> None:
        """Know some models already.

        Args:
            models: Those that are known.
            folders: Where SGLang's modules are.
            skipped: The modules that the user does not want.
        """
        super().__init__(models)
        self._folders, self._skipped = folders, skipped

    def get(self, name: str, default: Any = None) -> Any:
        """The class of this name, imported if need be."""
        if not super().__contains__(name) and (module := self._module_of(name)) is not None:
            self._add(module)
        return super().get(name, default)

    def _add(self, module: str) -> None:
        try:
            entry = importlib.import_module(f"{_PACKAGE}.{module}").EntryClass
        # As in SGLang: the model is unknown then, and its fallback may run it.
        except Exception as error:  # noqa: BLE001
            _log.warning("Ignore import error when loading %s.%s: %s", _PACKAGE, module, error)
            self._skipped.append(module)
            return
        for one in entry if isinstance(entry, list) else [entry]:
            self.setdefault(one.__name__, one)  # one of the user's stays

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def _module_of(self, name: str) -> str | None:
        for folder in self._folders:
            for path in sorted(folder.glob("*.py")):
                entries = _ENTRIES.search(path.read_text(encoding="utf-8"))
                if entries and path.stem not in self._skipped and name in re.findall(r"\w+", entries[1]):
                    return path.stem
        return None
