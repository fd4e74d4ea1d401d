"""The import hook that lets stock megatron-core run without CUDA."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

#: megatron.core modules that import triton unconditionally: Mamba, and two kernels for inference
NEED_TRITON = {
    "megatron.core.inference.contexts.fused_kv_append_kernel",
    "megatron.core.models.mamba.mamba_layer_specs",
    "megatron.core.post_training.modelopt.mamba.model_specs",
    "megatron.core.ssm.mamba_mixer",
    "megatron.core.ssm.triton_cache_manager",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
}


def run(code: str, **environment: str) -> list[str]:
    """Run `code` in a fresh interpreter and return the words it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        **{"capture_output": True, "text": True, "timeout": 240, "check": False},
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a module's code and that of its functions refers to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


@pytest.mark.slow
def test_every_megatron_core_module_imports_under_the_hook() -> None:
    words = run("""
import importlib, pkgutil
from slime_cpu.megatron import install
install()
import megatron.core
count = 0
for info in pkgutil.walk_packages(megatron.core.__path__, "megatron.core.", onerror=lambda name: None):
    count += 1
    try:
        importlib.import_module(info.name)
    except Exception:
        print(info.name)
print(count)
""")
    assert set(words[:-1]) <= NEED_TRITON
    assert int(words[-1]) > 250


@pytest.mark.slow
def test_a_package_of_kernels_that_fails_without_a_driver_is_not_imported(tmp_path: Path) -> None:
    """flash_mla, which SGLang's packages for GPUs bring, raises an OSError."""
    (tmp_path / "flash_mla.py").write_text("raise OSError('libcuda.so.1')")
    code = "from slime_cpu.megatron import install\ninstall()\nimport megatron.core.transformer.attention as a\n"
    assert run(code + "print(a.flash_mla_with_kvcache)", PYTHONPATH=str(tmp_path)) == ["None"]


@pytest.mark.slow
def test_rewritten_bytecode_is_cached_under_a_name_of_its_own(tmp_path: Path) -> None:
    """Rewriting takes two seconds of CPU time in each rank; an import without the hook must not get its result."""
    # A stand-in with two modules: compiling all of Megatron takes half a minute, and each module is loaded alike.
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("from megatron.core import parallel_state")
    (core / "parallel_state.py").write_text("import torch\ndef index(): return torch.cuda.current_device()")
    parse = "import ast\nparsed = []\nparse = ast.parse\nast.parse = lambda *a: parsed.append(a) or parse(*a)\n"
    hook = "from slime_cpu.megatron import install\ninstall()\n"
    ask = "import megatron.core.parallel_state as m\nprint(m.__file__, sum('megatron' in str(a[1:]) for a in parsed))\n"
    ask += "print(hasattr(m, '__cpu_as_cuda__'))"
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(tmp_path)}
    file = str(core / "parallel_state.py")
    assert run(parse + hook + ask, **cached) == [file, "2", "True"]
    assert run(parse + hook + ask, **cached) == [file, "0", "True"]
    assert run(parse + ask, **cached) == [file, "0", "False"]
    names = {path.name for path in core.rglob("parallel_state*.pyc")}
    assert len(names) == 2, names
    code = marshal.loads(next(core.rglob("parallel_state.cpython-???.pyc")).read_bytes()[16:])
    assert "__cpu_as_cuda__" not in str(list(names_in(code)))


@pytest.mark.slow
def test_the_hook_is_for_the_first_import_without_cuda_works_in_threads_and_does_not_change_torch() -> None:
    words = run("""
import sys, threading, torch, types
from slime.errors import TrainerError
from slime_cpu.megatron import CpuFinder, install
sys.modules["megatron.core.enums"] = types.ModuleType("megatron.core.enums")  # as after its import
try:
    install()
except TrainerError as error:
    print("megatron.core.enums was imported" in str(error), "Import slime.train" in str(error))
del sys.modules["megatron.core.enums"]
before, cuda, is_available = list(sys.meta_path), dict(vars(torch.cuda)), torch.cuda.is_available
torch.cuda.is_available = lambda: True
install()
torch.cuda.is_available = is_available
print(sys.meta_path == before, dict(vars(torch.cuda)) == cuda)
install(); install()
print(sys.meta_path.count(CpuFinder))
from megatron.core.tensor_parallel.random import _get_cuda_rng_state
from megatron.core.distributed import param_and_grad_buffer as module
seen = []
def work():
    seen.append(module.torch.zeros(2, device=module.__cpu_as_cuda__.current_device()).device.type)
    seen.append(_get_cuda_rng_state().dtype == torch.uint8)
thread = threading.Thread(target=work); thread.start(); thread.join()
print(*seen, torch.cuda.is_available(), torch.cuda.current_device.__module__)
""")
    assert words[:2] == ["True", "True"], "it comes too late"
    assert words[2:4] == ["True", "True"], "where CUDA is available it does nothing"
    assert words[4:] == ["1", "cpu", "True", "False", "torch.cuda"]
