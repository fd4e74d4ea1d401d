"""Only modules that cannot be imported are replaced."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_cpu import sglang_standins
from slime_cpu.sglang_standins import StandinFinder, compile_nothing, install, really_imports, without_megatron

NAMES = ("sgl_kernel", "torchvision", "IPython", "triton")


@pytest.fixture
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the four modules before and after, and undoes changes to the import system."""

    def forget() -> None:
        for name in [m for m in sys.modules if m.partition(".")[0] in NAMES]:
            del sys.modules[name]

    saved = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in NAMES}
    forget()
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, StandinFinder)])
    yield
    forget()
    sys.modules.update(saved)


@pytest.fixture
def stood_in(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("clean_imports")
    sys.meta_path.insert(0, StandinFinder(frozenset(NAMES)))


@pytest.mark.usefixtures("clean_imports")
def test_nothing_is_replaced_if_the_real_modules_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sglang_standins, "_settle_capability_checks", lambda: pytest.fail("touched torch"))
    finders = list(sys.meta_path)
    assert install() == frozenset()
    assert sys.meta_path == finders
    assert all(importlib.import_module(name).real for name in NAMES)


@pytest.mark.usefixtures("clean_imports")
def test_a_module_that_fails_to_import_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "part.py").write_text("")
    (package / "__init__.py").write_text("import sgl_kernel.part\nraise OSError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not really_imports("sgl_kernel")
    assert not [m for m in sys.modules if m.startswith("sgl_kernel")]


@pytest.mark.usefixtures("stood_in")
def test_a_name_of_an_absent_module_imports_and_raises_when_called() -> None:
    from sgl_kernel import copy_all_layer_kv_cache_cpu

    with pytest.raises(NotImplementedError, match=r"sgl_kernel.copy_all_layer_kv_cache_cpu is not available"):
        copy_all_layer_kv_cache_cpu(1)


@pytest.mark.usefixtures("stood_in")
def test_submodules_of_the_kernel_package_stay_missing_so_that_fallbacks_are_taken() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"sgl_kernel\.scalar_type"):
        importlib.import_module("sgl_kernel.scalar_type")


@pytest.mark.usefixtures("stood_in")
def test_image_modules_offer_the_names_that_are_read_at_import() -> None:
    transforms = importlib.import_module("torchvision.transforms")
    assert transforms.InterpolationMode.BICUBIC.value == "bicubic"
    assert callable(transforms.functional)


@pytest.mark.usefixtures("stood_in")
def test_packages_that_look_for_a_notebook_find_none() -> None:
    assert importlib.import_module("IPython").get_ipython() is None


@pytest.mark.usefixtures("stood_in")
def test_kernel_definitions_parse_and_keep_the_function() -> None:
    triton = importlib.import_module("triton")
    language = importlib.import_module("triton.language")

    def kernel() -> int:
        return 3

    assert triton.jit(kernel) is kernel
    assert triton.jit(do_not_specialize=["n"])(kernel) is kernel
    assert triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["n"])(kernel) is kernel
    assert (triton.cdiv(7, 2), triton.next_power_of_2(9)) == (4, 16)
    assert language.constexpr(5).value == 5


def test_nothing_is_compiled_by_any_form_of_the_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", torch.compile)  # undone at the end
    compile_nothing()

    def double(number: int) -> int:
        return 2 * number

    forms = [torch.compile(double), torch.compile(double, dynamic=True), torch.compile(dynamic=True)(double)]
    assert all(form is double for form in forms)


def test_a_hidden_megatron_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", sys)  # so that what is there now comes back after the test
    del sys.modules["megatron.core"]
    with without_megatron(), pytest.raises(ImportError):
        importlib.import_module("megatron.core")
    assert importlib.util.find_spec("megatron.core") is not None, "an engine's plugin may need it"
