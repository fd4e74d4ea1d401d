"""What stock SGLang needs on CPU beyond being importable. `slime.engine.launch` applies it, only in a server's own
process and only if SGLang runs its CPU engine.

Each patch states what goes wrong without it. None changes results that were right before.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime.cpu.sglang_attention import Places, Running, batched_decode, batched_extend
from slime.cpu.sglang_layers import one_norm, short_rotation
from slime.cpu.sglang_memory import open_shared_weights, release_memory_for_real
from slime.cpu.sglang_sampling import murmur_hash32, sample_by_seed
from slime.cpu.sglang_siblings import Firsts, keep_out_short_answers, prompts_once

#: keeps the definition registered: torch drops an operator when its Library object goes away
_registered: list[Any] = []


def apply() -> None:
    """Apply all patches. SGLang must be importable (see `slime.cpu.sglang_standins`)."""
    allow_seeded_sampling()
    allow_routed_experts()
    absorb_latent_attention()
    allow_plain_positions()
    batch_attention()
    shorten_layers()
    compute_prompts_once()
    pad_small_products()
    release_memory_for_real()
    sleep_while_paused()
    open_shared_weights()


def allow_seeded_sampling() -> None:
    """`--enable-deterministic-inference` (a request's `sampling_seed` decides its tokens) on CPU.

    SGLang refuses it with the plain-torch backend. Its sampling is plain torch except for one hash operator, defined
    here for speculative decoding; otherwise a faster function takes its place. The batch-invariant matrix products it
    also enables are triton kernels for GPUs and are left out.
    """
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    invariant: Any = importlib.import_module("sglang.srt.batch_invariant_ops")
    invariant.enable_batch_invariant_mode = lambda *_args, **_kwargs: None
    sampler: Any = importlib.import_module("sglang.srt.layers.sampler")
    sampler.multinomial_with_seed = sample_by_seed
    define_hash_operator()


def allow_routed_experts() -> None:
    """`--enable-return-routed-experts` on CPU: its host buffer asks the CUDA runtime to pin memory, and an assertion
    fails without one. Memory need not be pinned if nothing is copied to a GPU."""
    pools = importlib.import_module("sglang.srt.mem_cache.pool_host.common")

    def allocate(*args: Any, **kwargs: Any) -> Any:
        return pools.alloc_with_host_register(*args, **{**kwargs, "pin_memory": False})

    pools.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def absorb_latent_attention() -> None:
    """Latent attention (MLA) computes on the compressed keys and values, in every pass.

    The torch backend attends over what is in its cache, which is these. SGLang does not know that: it takes the rule of
    triton, which expands keys and values for prompts without a cached prefix. The backend then ignores them, and
    log-probs are off by more than 1 without an error. `--enable-deterministic-inference` has the same effect as this
    patch, so both protect a CPU engine's numbers.
    """
    handlers = importlib.import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    handlers.AttentionBackendRegistry._handlers.setdefault("torch_native", handlers._dispatch_mla_subtype)


def allow_plain_positions() -> None:
    """Latent attention without scaled rotary positions, as in Moonlight: SGLang's function for CPUs knows only YaRN's
    and asserts that they are scaled. The one for GPUs computes plain ones in torch."""
    factory: Any = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")
    scaled = factory.get_rope_cpu

    def positions(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(scaled).bind(*args, **kwargs).arguments
        if arguments.get("rope_scaling") is not None:
            return scaled(*args, **kwargs)
        arguments.pop("device", None)
        return factory.get_rope(**arguments)

    factory.get_rope_cpu = positions


def batch_attention() -> None:
    """One attention call per layer for the whole batch instead of one per sequence: decoding a batch of 64 becomes
    twice as fast for a small model. Agrees with the original up to float rounding. Without a prefix cache, prompts are
    left to the original."""
    module = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = module.TorchNativeAttnBackend
    places, running, begin = Places(), Running(), backend.init_forward_metadata
    exact = _without_prefix_cache

    def init_forward_metadata(self: Any, forward_batch: Any) -> Any:
        places.forget()
        running.begin(decoding=forward_batch.forward_mode.is_decode())
        return begin(self, forward_batch)

    backend.init_forward_metadata = init_forward_metadata
    backend._run_sdpa_forward_decode = batched_decode(backend._run_sdpa_forward_decode, places, running, exact=exact)
    backend._run_sdpa_forward_extend = batched_extend(backend._run_sdpa_forward_extend, places, exact=exact)


def _options() -> Any:
    """The server's options, known once it has started."""
    return importlib.import_module("sglang.srt.runtime_context").get_server_args()


def _without_prefix_cache() -> bool:
    """Who turns the prefix cache off wants a request's numbers to depend on nothing else."""
    return bool(_options().disable_radix_cache)


def compute_prompts_once() -> None:
    """Equal prompts that wait together are computed once: the prefix cache only knows those of earlier passes."""
    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    choose = keep_out_short_answers(scheduler._get_new_batch_prefill_raw)

    def shared() -> bool:
        options = _options()
        in_order = options.schedule_policy == "fcfs" and not options.enable_priority_scheduling
        return in_order and not options.disable_radix_cache

    scheduler._get_new_batch_prefill_raw = prompts_once(choose, Firsts(), shared=shared)


def shorten_layers() -> None:
    """Norms and rotary positions in fewer operators: each is a few microseconds of work, and as much again to call."""
    norm = importlib.import_module("sglang.srt.layers.layernorm").RMSNorm
    norm.forward_native = one_norm(norm.forward_native)
    rotary = importlib.import_module("sglang.srt.layers.rotary_embedding.base").RotaryEmbedding
    rotary.forward_native = short_rotation(rotary.forward_native)


def sleep_while_paused() -> None:
    """A paused scheduler spins while it waits for the next message, and takes a core from the trainer that is about to
    send it weights. `--sleep-on-idle` is only about schedulers that are not paused."""
    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    record = scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self: Any) -> None:
        record(self)
        if self.idle_sleeper is not None:
            self.idle_sleeper.maybe_sleep()

    scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def pad_small_products() -> None:
    """Products of a few rows with a weight get rows of zeros.

    The library behind torch computes one to three rows for each thread in another order than more rows. A request's
    log-probs would depend in the last bits on how many requests happen to run beside it.
    """
    torch.nn.functional.linear = padded(torch.nn.functional.linear)
    torch.matmul = padded(torch.matmul)


def padded(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`product(rows, weight, ...)` with at least 8 rows for each thread of torch."""

    def multiply(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) < 2 or kwargs.get("out") is not None:
            return product(*args, **kwargs)
        rows, weight, *others = args
        least = 8 * torch.get_num_threads()
        if rows.dim() != 2 or weight.dim() != 2 or not 0 < rows.shape[0] < least:
            return product(*args, **kwargs)
        filled = torch.nn.functional.pad(rows, (0, 0, 0, least - rows.shape[0]))
        return product(filled, weight, *others, **kwargs)[: rows.shape[0]]

    return multiply


def define_hash_operator() -> None:
    """Define `torch.ops.sgl_kernel.murmur_hash32_cpu`, which turns (seed, position, token) into random numbers.

    SGLang calls it on CPU, but only its native CPU kernels provide it; does nothing if they are installed.
    """
    if hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        return
    library: Any = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch does not type it
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _registered.append(library)
