"""The import hook that lets stock megatron-core run without CUDA."""

from __future__ import annotations

import subprocess
import sys

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


def run(code: str) -> list[str]:
    """Run `code` in a fresh interpreter and return the words it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_every_megatron_core_module_imports_under_the_hook() -> None:
    words = run("""
import importlib, pkgutil
from slime.cpu.megatron import install
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


def test_the_hook_does_nothing_if_cuda_is_available() -> None:
    words = run("""
import sys, torch
torch.cuda.is_available = lambda: True
before, cuda = list(sys.meta_path), dict(vars(torch.cuda))
from slime.cpu.megatron import install
install()
print(sys.meta_path == before, dict(vars(torch.cuda)) == cuda)
""")
    assert words == ["True", "True"]


def test_install_twice_adds_one_finder() -> None:
    words = run("""
import sys
from slime.cpu.megatron import CpuFinder, install
install(); install()
print(sys.meta_path.count(CpuFinder))
""")
    assert words == ["1"]


def test_install_after_megatron_was_imported_is_refused_with_its_name() -> None:
    words = run("""
import megatron.core.enums
from slime.cpu.megatron import install
from slime.errors import TrainerError
try:
    install()
except TrainerError as error:
    print("megatron.core was imported" in str(error), "Import slime.train" in str(error))
""")
    assert words == ["True", "True"]


def test_rewritten_modules_work_in_a_thread_and_do_not_change_torch() -> None:
    words = run("""
import threading, torch
from slime.cpu.megatron import install
install()
from megatron.core.tensor_parallel.random import _get_cuda_rng_state
from megatron.core.distributed import param_and_grad_buffer as module
seen = []
def work():
    seen.append(module.torch.zeros(2, device=module.__cpu_as_cuda__.current_device()).device.type)
    seen.append(_get_cuda_rng_state().dtype == torch.uint8)
thread = threading.Thread(target=work); thread.start(); thread.join()
print(*seen, torch.cuda.is_available(), torch.cuda.current_device.__module__)
""")
    assert words == ["cpu", "True", "False", "torch.cuda"]
