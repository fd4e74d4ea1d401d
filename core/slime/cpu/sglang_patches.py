"""What stock SGLang needs on CPU beyond being importable.  Applied in a server's own process only, by
`slime.engine.launch`, and only where SGLang itself runs its CPU engine.

Each patch states what goes wrong without it.  None changes results that were right before.
"""

from __future__ import annotations

import importlib
from typing import Any

from slime.cpu.sglang_attention import batched_decode, batched_extend
from slime.cpu.sglang_sampling import define_hash_operator


def apply() -> None:
    """Apply all patches.  SGLang must be importable (see `slime.cpu.sglang_standins`)."""
    use_latent_attention_for_mla()
    allow_seeded_sampling()
    allow_routed_experts()
    batch_attention()


def use_latent_attention_for_mla() -> None:
    """Multi-head latent attention: always take the absorbed path.

    The plain-torch attention backend attends over the paged cache only, and for these models the cache
    holds the latent.  The backend has no rule of its own, so it inherits triton's (plain attention for
    a prompt without a cached prefix), which ignores the keys and values it is given: wrong
    log-probs by 1.6 to 2.6, without an error.
    """
    handlers = importlib.import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    handlers.AttentionBackendRegistry._handlers.setdefault("torch_native", handlers._dispatch_mla_subtype)


def allow_seeded_sampling() -> None:
    """`--enable-deterministic-inference` (a request's `sampling_seed` decides its tokens) on CPU.

    SGLang refuses it with the plain-torch backend.  Seeded sampling itself is plain torch but for one
    hash operator, defined here; the batch-invariant matrix products it also switches on are triton
    kernels for GPUs, and are left out.
    """
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    invariant: Any = importlib.import_module("sglang.srt.batch_invariant_ops")
    invariant.enable_batch_invariant_mode = lambda *_args, **_kwargs: None
    define_hash_operator()


def allow_routed_experts() -> None:
    """`--enable-return-routed-experts` on CPU: its host buffer asks the CUDA runtime to pin memory, which
    fails an assertion without one.  Memory need not be pinned where nothing is copied to a GPU."""
    pools = importlib.import_module("sglang.srt.mem_cache.pool_host.common")

    def allocate(*args: Any, **kwargs: Any) -> Any:
        return pools.alloc_with_host_register(*args, **{**kwargs, "pin_memory": False})

    pools.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def batch_attention() -> None:
    """One attention call per layer for the whole batch, where SGLang makes one per sequence: decoding a
    batch of 64 becomes twice as fast for a small model.  Agrees with the original to float rounding."""
    module = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = module.TorchNativeAttnBackend
    backend._run_sdpa_forward_decode = batched_decode(backend._run_sdpa_forward_decode)
    backend._run_sdpa_forward_extend = batched_extend(backend._run_sdpa_forward_extend)
