"""What stock SGLang needs on a CPU beyond being importable. All that an engine's process replaces is in one table.

`apply` runs only in the process of a CPU engine. None of it changes results that were right before.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from slime.errors import EngineStartError
from slime_cpu import sglang_fp8
from slime_cpu.sglang_attention import Places, Running, batched_decode, batched_extend
from slime_cpu.sglang_layers import one_norm, short_rotation
from slime_cpu.sglang_memory import opening_shared_weights, releasing, resuming
from slime_cpu.sglang_sampling import murmur_hash32, sample_by_seed
from slime_cpu.sglang_siblings import Firsts, keep_out_short_answers, prompts_once

#: the release whose functions the table names
_WRITTEN_FOR = "0.5.23"
#: why products of a few rows with a weight get rows of zeros
_ROUNDING = (
    "the library behind torch computes one to three rows for each thread in another order than more rows, and a"
    " request's log-probs would depend in the last bits on how many requests happen to run beside it"
)
#: keeps the definition registered: torch drops an operator when its Library object goes away
_registered: list[Any] = []


@dataclass(frozen=True)
class Patch:
    """One function of SGLang, torch or Python that is replaced.

    Attributes:
        place: `package.module:Class.function`.
        replace: Called with the function that is there; returns what takes its place.
        why: What goes wrong, or takes long, without it.
    """

    place: str
    replace: Callable[[Any], Any]
    why: str

    def apply(self) -> None:
        """Replace the function.

        Raises:
            EngineStartError: This SGLang has no such function.
        """
        module, _, path = self.place.partition(":")
        *owners, name = path.split(".")
        try:
            owner = importlib.import_module(module)
            for one in owners:
                owner = getattr(owner, one)
            original = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise EngineStartError(
                f"{self.place} does not exist ({error}), and engines on a CPU replace it, because {self.why}. slime_cpu"
                f" was written for SGLang {_WRITTEN_FOR}, and {version('sglang')} is installed: install {_WRITTEN_FOR}"
            ) from error
        setattr(owner, name, self.replace(original))


def patches() -> tuple[Patch, ...]:
    """The table, with the state that patches of one process share. Of two at one place, the second wraps the first."""
    places, running, firsts = Places(), Running(), Firsts()
    backend = "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend"
    scheduler = "sglang.srt.managers.scheduler:Scheduler"
    memory = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
    fp8 = "sglang.srt.layers.quantization.fp8"
    linear, experts = f"{fp8}:Fp8LinearMethod", f"{fp8}:Fp8MoEMethod"
    loaded = "process_weights_after_loading_block_quant"
    no_arithmetic = "without a GPU or AMX it has no products in 8 bits"

    def telling_of_passes(begin: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def init_forward_metadata(self: Any, forward_batch: Any) -> Any:
            places.forget()
            running.begin(decoding=forward_batch.forward_mode.is_decode())
            return begin(self, forward_batch)

        return init_forward_metadata

    return (
        Patch(
            "sglang.srt.batch_invariant_ops:enable_batch_invariant_mode",
            lambda _: lambda *_args, **_options: None,
            "seeded sampling also turns on matrix products that are triton kernels for GPUs",
        ),
        Patch(
            "sglang.srt.layers.sampler:multinomial_with_seed",
            lambda _: sample_by_seed,
            "SGLang hashes the whole vocabulary for every token",
        ),
        Patch(
            "sglang.srt.layers.rotary_embedding.factory:get_rope_cpu",
            with_plain_positions,
            "it only knows scaled positions, and asserts that they are",
        ),
        Patch(
            f"{backend}.init_forward_metadata",
            telling_of_passes,
            "attention here keeps what does not change within a forward pass, and must know when one begins",
        ),
        Patch(
            f"{backend}._run_sdpa_forward_decode",
            partial(batched_decode, places=places, running=running, exact=_without_prefix_cache),
            "SGLang calls attention for each sequence; together, a batch of 64 takes half the time",
        ),
        Patch(
            f"{backend}._run_sdpa_forward_extend",
            partial(batched_extend, places=places, exact=_without_prefix_cache),
            "SGLang calls attention for each prompt",
        ),
        Patch(
            "sglang.srt.layers.layernorm:RMSNorm.forward_native",
            one_norm,
            "each operator is a few microseconds of work, and as much again to call",
        ),
        Patch(
            "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding.forward_native",
            short_rotation,
            "each operator is a few microseconds of work, and as much again to call",
        ),
        Patch(
            f"{scheduler}._get_new_batch_prefill_raw",
            keep_out_short_answers,
            "adding a short answer to the prefix cache takes longer than computing it again",
        ),
        Patch(
            f"{scheduler}._get_new_batch_prefill_raw",
            partial(prompts_once, firsts=firsts, shared=_shares_prompts),
            "equal prompts that wait together are all computed: the prefix cache only knows those of earlier passes",
        ),
        Patch(
            "sglang.srt.layers.moe.fused_moe_native:moe_forward_native",
            own_experts_only,
            "with --ep-size it takes the experts of other ranks, which SGLang numbers -1, for its own",
        ),
        Patch(
            f"{fp8}:Fp8Config.get_supported_act_dtypes", sglang_fp8.with_float32, "engines on a CPU compute in float32"
        ),
        Patch(f"{linear}.{loaded}", lambda _: sglang_fp8.dequantise_linear, no_arithmetic),
        Patch(f"{linear}.apply", lambda _: sglang_fp8.plain_linear, no_arithmetic),
        Patch(f"{experts}.{loaded}", lambda _: sglang_fp8.dequantise_experts, no_arithmetic),
        Patch(f"{experts}.apply", lambda _: sglang_fp8.plain_experts, no_arithmetic),
        Patch(
            "sglang.srt.models.deepseek_common.deepseek_weight_loader:block_quant_to_tensor_quant",
            lambda _: sglang_fp8.whole_weight,
            no_arithmetic,
        ),
        Patch("torch.nn.functional:linear", padded, _ROUNDING),
        Patch("torch:matmul", padded, _ROUNDING),
        Patch(f"{memory}.release_memory_occupation", releasing, "on a CPU it only pretends to"),
        Patch(f"{memory}.resume_memory_occupation", resuming, "weights that were not sent again would be zero"),
        Patch(
            f"{scheduler}._record_scheduler_state_for_paused_engine",
            sleeping,
            "a paused scheduler spins while it waits for the next message, and takes a core from the trainer that is"
            " about to send it weights (--sleep-on-idle is only about schedulers that are not paused)",
        ),
        Patch(
            "torch.multiprocessing.reductions:rebuild_storage_filename",
            opening_shared_weights,
            "torch cannot open the trainer's unnamed files: see `slime.weights.transports.tensor`",
        ),
        Patch(
            "multiprocessing:set_start_method",
            forking,
            'SGLang asks for "spawn" on every launch, for the sake of CUDA, and each process would import everything',
        ),
    )


def apply() -> None:
    """Apply all patches. SGLang must be importable (see `slime_cpu.sglang_standins`)."""
    allow_seeded_sampling()
    allow_routed_experts()
    absorb_latent_attention()
    define_hash_operator()
    pad_for_other_ranks()
    for patch in patches():
        patch.apply()


def allow_seeded_sampling() -> None:
    """`--enable-deterministic-inference` (a request's `sampling_seed` decides its tokens), which SGLang refuses with
    the plain-torch backend, although its sampling is plain torch except for one hash operator."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def allow_routed_experts() -> None:
    """`--enable-return-routed-experts`: its host buffer asks the CUDA runtime to pin memory, and an assertion fails
    without one. Memory need not be pinned if nothing is copied to a GPU."""
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


def pad_for_other_ranks() -> None:
    """`--enable-dp-attention`: the ranks of an engine pad their batches to one size, with sequences of one token.

    SGLang asks the backend for that length by a method that its backend for AMX has, and the torch backend lacks.
    """
    native = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    native.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1


def define_hash_operator() -> None:
    """Define `torch.ops.sgl_kernel.murmur_hash32_cpu`, which turns (seed, position, token) into random numbers.

    SGLang calls it for speculative decoding on a CPU, but only its native CPU kernels provide it; does nothing if they
    are installed.
    """
    if hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        return
    library: Any = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch does not type it
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _registered.append(library)


def with_plain_positions(scaled: Callable[..., Any]) -> Callable[..., Any]:
    """`get_rope_cpu`, which only knows YaRN's scaled positions, also for latent attention without them, as in
    Moonlight: the function for GPUs computes plain ones in torch."""
    factory = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")

    def positions(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(scaled).bind(*args, **kwargs).arguments
        if arguments.get("rope_scaling") is not None:
            return scaled(*args, **kwargs)
        arguments.pop("device", None)
        return factory.get_rope(**arguments)

    return positions


def own_experts_only(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`moe_forward_native` for a rank that has some of the experts: what the others add comes from other ranks."""

    def forward(layer: Any, rows: Tensor, chosen: Any, config: Any) -> Tensor:
        if (chosen.topk_ids >= 0).all():
            return compute(layer, rows, chosen, config)
        total = torch.zeros_like(rows)
        for ids, weights in zip(chosen.topk_ids.split(1, 1), chosen.topk_weights.split(1, 1), strict=True):
            here = ids[:, 0] >= 0
            if here.any():
                own = chosen._replace(topk_ids=ids[here], topk_weights=weights[here])
                total[here] += compute(layer, rows[here], own, config)
        return total

    return forward


def _options() -> Any:
    """The server's options, known once it has started."""
    return importlib.import_module("sglang.srt.runtime_context").get_server_args()


def _without_prefix_cache() -> bool:
    """Who turns the prefix cache off wants a request's numbers to depend on nothing else."""
    return bool(_options().disable_radix_cache)


def _shares_prompts() -> bool:
    """Whether there is a prefix cache, and requests are computed in the order in which they came."""
    options = _options()
    in_order = options.schedule_policy == "fcfs" and not options.enable_priority_scheduling
    return in_order and not options.disable_radix_cache


def sleeping(record: Callable[[Any], None]) -> Callable[[Any], None]:
    """`Scheduler._record_scheduler_state_for_paused_engine`, which a paused scheduler calls between two looks."""

    def record_and_sleep(self: Any) -> None:
        record(self)
        if self.idle_sleeper is not None:
            self.idle_sleeper.maybe_sleep()

    return record_and_sleep


def forking(set_start_method: Callable[..., None]) -> Callable[..., None]:
    """`multiprocessing.set_start_method` that answers every request with "fork"."""

    def set_fork(method: str | None, force: bool = False) -> None:
        del method, force
        set_start_method("fork", force=True)

    return set_fork


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
