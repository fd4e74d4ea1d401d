"""Memory of a CPU engine: what a trainer shares with it, and what it releases.

`/release_memory_occupation` and `/resume_memory_occupation` of stock SGLang only pretend on a CPU.

On GPUs, SGLang's memory saver unmaps the memory of the KV cache and of the weights. Here their pages go back to the
kernel, and come again as they are used. As on GPUs, buffers keep their values, and weights are garbage (here: zeros)
from their release until they are sent again.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from slime.kit.processes import return_freed
from slime_cpu.memory import USED_PAGES, drop_pages, pages_missing
from slime_cpu.sglang_fp8 import forget

#: SGLang's names of kinds of memory
WEIGHTS, KV_CACHE = "weights", "kv_cache"
#: tensors of a pool, one for each layer, and pools that a pool for several kinds of attention consists of
_CACHE_TENSORS = ("k_buffer", "v_buffer", "kv_buffer")
_POOLS = ("full_kv_pool", "swa_kv_pool")
#: files that a rank of the trainer fills in turn
_SHARED_FILES = 2
#: of weights in a message
_MOST_NAMES = 5


def opening_shared_weights(rebuild: Callable[..., Any]) -> Callable[..., Any]:
    """`rebuild_storage_filename` that opens the trainer's unnamed files: see `slime.weights.transports.tensor`.

    They stay mapped until others take their place, since the first look at each page of a new mapping costs a fault.
    """
    mapped_of: defaultdict[bytes, OrderedDict[bytes, Any]] = defaultdict(OrderedDict)

    def open_or_rebuild(kind: Any, manager: bytes, handle: bytes, size: int, *others: Any) -> Any:
        if not handle.startswith(b"/proc/"):
            return rebuild(kind, manager, handle, size, *others)
        mapped = mapped_of[handle.split(b"/")[2]]  # of that process
        if handle not in mapped:
            if len(mapped) == _SHARED_FILES:
                mapped.popitem(last=False)
            mapped[handle] = torch.UntypedStorage.from_file(handle.split()[0].decode(), True, size)
        mapped.move_to_end(handle)
        return mapped[handle]

    return open_or_rebuild


def releasing(release: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`release`, and then the memory is given back."""

    def release_memory_occupation(self: Any, request: Any) -> Any:
        answer, runner = release(self, request), self.tp_worker.model_runner
        if _includes(request, KV_CACHE):
            drop_pages(cache_tensors(runner.token_to_kv_pool))
        if _includes(request, WEIGHTS) and USED_PAGES.exists():  # otherwise they could not be checked
            forget(runner.model)
            named = runner.model.named_parameters()
            runner.slime_released = {name: drop_pages([weight]) for name, weight in named}
        return_freed()
        return answer

    return release_memory_occupation


def resuming(resume: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`resume`; before the KV cache returns, and with it generation, all weights must have been written again.

    A weight that the trainer never sends would be zero, and the engine would answer nonsense.
    """

    def resume_memory_occupation(self: Any, request: Any) -> Any:
        runner = self.tp_worker.model_runner
        released = getattr(runner, "slime_released", {})
        if _includes(request, KV_CACHE):
            missing = [name for name, pages in released.items() if pages_missing(pages)]
            if missing:
                raise RuntimeError(
                    f"{len(missing)} of {len(released)} weights that this engine released were not sent again in full:"
                    f" {', '.join(missing[:_MOST_NAMES])}. Run this model without --colocate"
                )
        return resume(self, request)

    return resume_memory_occupation


def _includes(request: Any, tag: str) -> bool:
    tags: Collection[str] | None = request.tags
    return not tags or tag in tags


def cache_tensors(pool: Any) -> Iterator[Tensor]:
    """The tensors of a KV cache pool that hold keys and values."""
    for name in _CACHE_TENSORS:
        held = getattr(pool, name, None)
        yield from (one for one in held or () if isinstance(one, torch.Tensor))
    for name in _POOLS:
        if (part := getattr(pool, name, None)) is not None:
            yield from cache_tensors(part)
