"""Run stock megatron-core without CUDA.

megatron-core spells its device in five ways: `torch.cuda.<x>`, `"cuda"`, `.cuda()`, `.is_cuda` and type
names such as `"torch.cuda.FloatTensor"`. An import hook rewrites those spellings in the syntax tree
of `megatron.core.*` only. torch and every other library stay untouched, line numbers in tracebacks stay correct,
threads and forked processes need nothing more, and it costs nothing at run time.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime.errors import TrainerError
from slime_cpu.megatron_fixes import FIXES

_PACKAGE = "megatron.core"
_STAND_IN = "__cpu_as_cuda__"


def install() -> None:
    """Make later imports of `megatron.core` run on the CPU. Does nothing with CUDA, or when repeated.

    Raises:
        TrainerError: megatron.core was imported before, so its modules already have the CUDA spellings.
    """
    if torch.cuda.is_available() or any(finder is CpuFinder for finder in sys.meta_path):
        return
    early = sorted(name for name in sys.modules if name == _PACKAGE or name.startswith(_PACKAGE + "."))
    if early:
        raise TrainerError(
            f"slime_cpu.megatron.install() ran after {early[0]} was imported ({len(early)} megatron.core modules are"
            " loaded), so they still call CUDA on a machine without it. Import slime.train (which installs the hook)"
            " before anything that imports megatron.core."
        )
    sys.meta_path.insert(0, CpuFinder)
    # SGLang's kernels for latent attention, where installed, fail without a driver, by an error that Megatron does not
    # expect. None makes importing them an ImportError, after which it does without.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]  # the stubs know modules alone


class _Stream:
    """Stands in for a CUDA stream, event or stream context; there is nothing to wait for."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self  # noqa: ARG005 - wait_stream, record_event, synchronize, ...


class _CpuAsCuda(types.ModuleType):
    """What the name `torch.cuda` means inside megatron.core."""

    _stream = _Stream()

    Stream = Event = stream = current_stream = default_stream = staticmethod(
        lambda *args, **kwargs: _CpuAsCuda._stream  # noqa: ARG005
    )
    synchronize = empty_cache = set_device = staticmethod(lambda *args: None)  # noqa: ARG005
    current_device = staticmethod(lambda: torch.device("cpu"))
    device_count = staticmethod(lambda: 1)
    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *args: torch.get_rng_state())  # noqa: ARG005
    set_rng_state = staticmethod(lambda state, *args: torch.set_rng_state(state))  # noqa: ARG005

    def __getattr__(self, name: str) -> Any:
        # FloatTensor and similar types are torch's own; the rest of torch.cuda is inert without CUDA.
        return getattr(torch if name.endswith("Tensor") else torch.cuda, name)


class _ToCpu(ast.NodeTransformer):
    """Rewrites the five spellings."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_STAND_IN, node.ctx), node)
        if node.attr == "is_cuda":  # means "is on the accelerator" there; False would select code for host tensors
            return ast.copy_location(ast.Constant(True), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":  # tensor.cuda(...)
            node.func.attr, node.args, node.keywords = "cpu", [], []
        # Pinning memory needs CUDA; only literal requests are dropped, so that forwarded arguments survive.
        node.keywords = [k for k in node.keywords if k.arg != "pin_memory" or not isinstance(k.value, ast.Constant)]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if node.value.startswith("torch.cuda."):
                node.value = node.value.replace("torch.cuda.", "torch.")
            elif node.value == "cuda" or node.value.startswith("cuda:"):
                node.value = "cpu"
        return node


#: changes with the rules of rewriting
_RULES = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


class _CpuLoader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source; its bytecode is cached as Python does, under a name of its own."""

    def source_to_code(  # type: ignore[override]  # a static method in the stubs of one base class
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> types.CodeType:
        tree = ast.fix_missing_locations(_ToCpu().visit(ast.parse(data, path)))
        code: types.CodeType = compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)
        return code

    def get_data(self, path: str) -> bytes:
        return super().get_data(_cached(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(_cached(path), data, _mode=_mode)

    def exec_module(self, module: types.ModuleType) -> None:
        setattr(module, _STAND_IN, _CpuAsCuda("cpu_as_cuda"))
        super().exec_module(module)
        fix = FIXES.get(module.__name__)
        if fix is not None:
            fix(module)


def _cached(path: str) -> str:
    """Where the rewritten bytecode is; what is at the usual place is for others. Sources stay where they are."""
    return path if not path.endswith(".pyc") else f"{path.removesuffix('.pyc')}.slime-{_RULES}.pyc"


class CpuFinder:
    """The entry of `sys.meta_path`, used as a class since it has no state."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a `megatron.core` source module with our loader; None for all other modules."""
        if name != _PACKAGE and not name.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _CpuLoader(spec.loader.name, spec.loader.path)
        return spec
