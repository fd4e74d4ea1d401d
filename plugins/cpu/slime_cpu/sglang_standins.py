"""Stand-ins for modules that SGLang imports but never uses on a host without a CUDA driver.

With `SGLANG_USE_CPU_ENGINE=1` SGLang computes with plain torch, but it still looks up names of these modules while it
is imported. `install()` provides a stand-in only for a module whose real import fails, so it changes nothing where
the real ones work. It must run before `sglang` is imported.

- `sgl_kernel`: SGLang needs one name at import; names resolve, calling one raises. Its submodules stay
  missing, because SGLang has its own fallbacks for those.
- `torchvision` (image processors) and `IPython` (notebook display): names resolve, calling one raises, except for
  what other packages call while they are imported.
- `triton`: decorators on kernel definitions pass the function through.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn


class _InterpolationMode(enum.Enum):
    """`torchvision.transforms.InterpolationMode`: read as default arguments, so it needs its values."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


#: names of absent modules that other packages use while they are imported
_NEEDED_AT_IMPORT: dict[str, Any] = {
    "InterpolationMode": _InterpolationMode,
    "get_ipython": lambda: None,  # wandb asks whether it runs in a notebook
}


class _AbsentModule(ModuleType):
    """Public names resolve to functions that raise when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _NEEDED_AT_IMPORT:
            return _NEEDED_AT_IMPORT[name]
        where = f"{self.__name__}.{name}"

        def absent(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{where} is not available on a host without a GPU")

        absent.__name__ = absent.__qualname__ = name
        return absent


class _DefinitionOnlyTriton(ModuleType):
    """Enough for kernel *definitions* to be imported: decorators pass through, types are empty classes."""

    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._make(name)
        setattr(self, name, value)
        return value

    def _make(self, name: str) -> Any:
        if name == "next_power_of_2":
            return lambda n: 1 << (n - 1).bit_length()
        if name == "cdiv":
            return lambda a, b: -(a // -b)
        if self.__name__ == "triton.language" and name in ("constexpr", "dtype", "tensor"):
            return type(name, (), {"__init__": lambda self, value=None: setattr(self, "value", value)})
        if name[0].isupper():
            return type(name, (), {"__init__": _ignore_arguments})
        return _pass_through


def _ignore_arguments(*_args: Any, **_kwargs: Any) -> None:
    """The constructor of an empty class."""


def _pass_through(*args: Any, **kwargs: Any) -> Any:
    """A decorator, with or without arguments, that returns the function unchanged."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


@dataclass(frozen=True)
class _Standin:
    module: Callable[[str], ModuleType]
    #: whether submodules have stand-ins too; if not, importing one raises ModuleNotFoundError
    with_submodules: bool


_STANDINS = {
    "sgl_kernel": _Standin(_AbsentModule, with_submodules=False),
    "torchvision": _Standin(_AbsentModule, with_submodules=True),
    "IPython": _Standin(_AbsentModule, with_submodules=True),
    "triton": _Standin(_DefinitionOnlyTriton, with_submodules=True),
}


class StandinFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and creates the stand-ins of `names`."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        root, _, submodule = fullname.partition(".")
        if root not in self.names:
            return None
        if submodule and not _STANDINS[root].with_submodules:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _STANDINS[spec.name.partition(".")[0]].module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def really_imports(name: str) -> bool:
    """Whether the installed module imports; removes what a failed import leaves behind."""
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    # Without a driver, CUDA packages fail in different ways (ImportError, OSError, RuntimeError).
    except Exception:  # noqa: BLE001
        for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[loaded]
        return False
    return True


def _settle_capability_checks() -> None:
    """Let torch and transformers find out, and remember, that the real modules are absent.

    Once the stand-ins are installed, they would mistake them for the real modules and fail later.
    """
    importlib.import_module("torch._inductor.runtime.triton_compat")
    importlib.import_module("torch.utils._triton").has_triton_package()
    checks = importlib.import_module("transformers.utils.import_utils")
    for check in ("is_torchvision_available", "is_triton_available"):
        with contextlib.suppress(AttributeError):  # not every transformers release has both
            getattr(checks, check)()


def install() -> frozenset[str]:
    """Provide stand-ins for modules that cannot be imported here; returns their names. Calling it twice is harmless."""
    for finder in sys.meta_path:
        if isinstance(finder, StandinFinder):
            return finder.names
    names = frozenset(name for name in _STANDINS if not really_imports(name))
    if names:
        _settle_capability_checks()
        sys.meta_path.insert(0, StandinFinder(names))
    return names


@contextlib.contextmanager
def without_megatron() -> Iterator[None]:
    """In the body, SGLang finds no Megatron, which its dumper of tensors imports to ask for ranks if it is installed.

    An engine has no such ranks, and importing Megatron takes a second of CPU.
    """
    if "megatron.core" in sys.modules:
        yield
        return
    sys.modules["megatron.core"] = None  # type: ignore[assignment]  # how Python marks what must not be imported
    try:
        yield
    finally:
        del sys.modules["megatron.core"]


def compile_nothing() -> None:
    """Let `torch.compile` pass functions through, for a process with `TORCHDYNAMO_DISABLE=1`, which compiles nothing.

    Torch itself would load its compiler at the first of SGLang's decorators, which takes a second.
    """
    torch: Any = importlib.import_module("torch")

    def uncompiled(model: Any = None, **_options: Any) -> Any:
        return model if model is not None else lambda model: model

    torch.compile = uncompiled
