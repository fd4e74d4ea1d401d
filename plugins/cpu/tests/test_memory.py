"""Memory of tensors that is given back to the kernel, and engines that give it back."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from slime_cpu.memory import drop_pages, pages_missing
from slime_cpu.sglang_memory import cache_tensors, releasing, resuming

MIB = 2**20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
def test_dropped_pages_are_no_longer_resident_and_come_back_as_zeros() -> None:
    tensor, before = torch.ones(64 * MIB // 4), resident()
    dropped = drop_pages([tensor, tensor[10:20], tensor.view(2, -1)])  # which share memory
    assert before - resident() > 0.95 * 64 * MIB
    [(_, length)] = dropped
    assert pages_missing(dropped) == length // 4096
    tensor[: tensor.numel() // 2] = 2.0
    assert pages_missing(dropped) == pytest.approx(length // 4096 / 2, abs=2)
    tensor[tensor.numel() // 2 :] = 3.0
    assert pages_missing(dropped) == 0
    assert set(tensor.unique().tolist()) == {2.0, 3.0}
    edges = torch.ones(16 * MIB // 4)
    drop_pages([edges])
    assert edges.sum() < 2 * 4096 / 4  # the rest is zero


def test_a_page_that_was_only_read_is_still_missing() -> None:
    tensor = torch.ones(16 * MIB // 4)
    dropped = drop_pages([tensor])
    [(_, length)] = dropped
    assert tensor.sum() < 2 * 4096 / 4  # reads every page
    assert pages_missing(dropped) == length // 4096
    tensor.fill_(0.0)
    assert pages_missing(dropped) == 0


def test_pages_that_were_written_count_after_a_fork_has_ended() -> None:
    tensor = torch.ones(16 * MIB // 4)
    dropped = drop_pages([tensor])
    tensor.fill_(1.0)
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert pages_missing(dropped) == 0


def test_memory_that_does_not_fill_a_page_stays() -> None:
    tensor = torch.ones(100)
    assert drop_pages([tensor]) == []
    assert tensor.sum() == 100


def engine(model: torch.nn.Module, pool: Any) -> Any:
    runner = SimpleNamespace(model=model, token_to_kv_pool=pool)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


def tags(*names: str) -> Any:
    return SimpleNamespace(tags=list(names) or None)


def answer(_manager: Any, request: Any) -> Any:
    return request.tags


@pytest.fixture
def calls() -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """SGLang's two calls, as they are on CPU with slime's patch."""
    return releasing(answer), resuming(answer)


def test_an_engine_releases_cache_and_weights_and_keeps_its_buffers(calls: Any) -> None:
    release, resume = calls
    model = torch.nn.Linear(1024, 2048, bias=False)
    model.register_buffer("scale", torch.ones(MIB))
    weights = model.weight.detach().clone()
    pool = SimpleNamespace(
        k_buffer=[torch.ones(MIB)], v_buffer=[torch.ones(MIB)], data_ptrs=torch.ones(MIB), full_kv_pool=None
    )
    whole = SimpleNamespace(full_kv_pool=pool, swa_kv_pool=SimpleNamespace(kv_buffer=[torch.ones(MIB)]))
    one, before = engine(model, whole), resident()
    assert release(one, tags("kv_cache", "weights")) == ["kv_cache", "weights"]
    assert before - resident() > 0.95 * (3 * 4 + 8) * MIB
    assert pool.data_ptrs.sum() == model.scale.sum() == MIB
    assert all(tensor.count_nonzero() < 4096 for tensor in cache_tensors(whole))
    assert resume(one, tags("weights")) == ["weights"]
    with torch.no_grad():
        model.weight.copy_(weights)
    assert resume(one, tags("kv_cache")) == ["kv_cache"]
    assert torch.equal(model.weight, weights)


def test_an_engine_whose_weights_were_not_all_sent_again_does_not_go_on(calls: Any) -> None:
    release, resume = calls
    model = torch.nn.ModuleList([torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)])
    one = engine(model, SimpleNamespace())
    release(one, tags())  # everything
    resume(one, tags("weights"))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert model[1].weight.sum() < 4096  # something reads it: it is zero except at its ends
    with pytest.raises(RuntimeError, match=r"1 of 2 weights .* not sent again in full: 1\.weight\."):
        resume(one, tags("kv_cache"))
