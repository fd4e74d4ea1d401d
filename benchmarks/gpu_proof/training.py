"""Parts of the proof that train: log-probs of three implementations, and the speed of a training step."""

from __future__ import annotations

import importlib.util
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu_proof.bench import Bench
from tests.support.engines import generated_batch, running
from tests.support.tiny_models import make_tiny_model, transformers_log_probs
from tests.train.harness import Centred, make_batch, make_config

from slime.config.layer_backend import missing_for
from slime.engine.ports import LOOPBACK, free_port
from slime.engine.server import EngineServer, EngineSpec
from slime.train.micro_batches import Flops
from slime.train.rank import MegatronRank
from slime.train.settings import train_settings

PROMPTS = [[5, 20, 33], [47, 61, 80, 12, 90, 44, 7, 101], [3, 3, 3, 9, 9], [110]]
TEMPERATURE = 0.8
#: dense bfloat16 TFLOP/s by a part of the GPU's name, as its maker states them; the first that fits counts
PEAK_TFLOPS = {
    **{"B200": 2250.0, "H200 NVL": 835.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0},
    **{"H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0},
}
#: bytes of a parameter in training: weight, gradient, float32 copy, Adam's moments; torch's Adam has one temporary more
_BYTES_FUSED, _BYTES = 18, 22
#: of a GPU's memory for activations and fragments
_SPARE_BYTES = 8 * 2**30
_QWEN = {
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "bf16": True,
    "layernorm_epsilon": 1e-6,
    "lr": 1e-6,
    "normalization": "RMSNorm",
    "rotary_base": 1000000.0,
    "swiglu": True,
}
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_FLAGS = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size"]
#: the shapes of Qwen2.5-0.5B and Qwen2.5-7B as Megatron's flags
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": dict(zip(_FLAGS, (24, 896, 4864, 14, 2, 151936), strict=True))
    | {"untie_embeddings_and_output_weights": False},
    "7B": dict(zip(_FLAGS, (28, 3584, 18944, 28, 4, 152064), strict=True))
    | {"untie_embeddings_and_output_weights": True}
    | _RECOMPUTE,
}
_SMALL = {"num_layers": 2, "hidden_size": 112, "ffn_hidden_size": 304, "vocab_size": 512}
_TIMED_STEPS = 3
#: for an engine: the first on a GPU compiles kernels
READY_S = 240.0


def engine(bench: Bench, folder: Path, *, dtype: str, gpu: int = 0, **spec: Any) -> EngineServer:
    """An engine that is not started yet; on a GPU it leaves most of the memory to a trainer."""
    extra = ["--dtype", dtype, "--max-running-requests", "256"]
    if bench.on_gpu:
        extra += ["--mem-fraction-static", "0.3", "--base-gpu-id", str(gpu)]
        if dtype == "float32":  # SGLang's own kernels compute it in lower precision, or not at all
            extra += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
    else:
        extra += ["--max-total-tokens", "16384"]
    extra += bench.sglang  # of two that contradict each other, SGLang takes the later
    log_path = bench.folder / f"engine-{time.monotonic_ns()}.log"
    log_path.touch()
    return EngineServer(
        EngineSpec(model_path=str(folder), device=bench.device, log_path=log_path, extra_args=extra, **spec)
    )


def start_rank(config: Any) -> MegatronRank:
    """The only rank of a trainer, in this process."""
    return MegatronRank(
        config, rank=0, world_size=1, meeting=(LOOPBACK, free_port(LOOPBACK)), estimator=Centred(), spec=None
    )


# --- log-probs ----------------------------------------------------------------------------------------


def three_way(bench: Bench, dtype: str) -> None:
    """A row for each implementation of the trainer's layers.

    Without SGLang the answers are random, and only trainer and transformers are compared.
    """
    folder = make_tiny_model(bench.folder / f"three-way-{dtype}", bench.family or "qwen3", seed=3, head_dim=64)
    if importlib.util.find_spec("sglang") is not None:
        server = engine(bench, folder, dtype=dtype)
        with running(server, ready_s=READY_S):
            batch = generated_batch(server.url, PROMPTS, temperature=TEMPERATURE)
    else:
        batch = make_batch(masked=False)
    independent = transformers_log_probs(folder, batch, temperature=TEMPERATURE, dtype=dtype, device=bench.device)
    engines = batch.rollout_log_probs
    for layers in ("torch", "fused", "te"):
        gaps = {"dtype": dtype, "trainer's_layers": layers}
        if (lacks := missing_for(layers, on_gpu=bench.on_gpu)) is not None:
            bench.row(**gaps, trainer_and_transformers=f"not measured: {layers} {lacks}")
            continue
        config = make_config(
            folder,
            device=bench.device,
            rollout_temperature=TEMPERATURE,
            layer_backend=layers,
            megatron={"bf16": dtype == "bfloat16"},
        )
        trainer = in_new_process(_trainer_log_probs, config, batch)
        gaps["trainer_and_transformers"] = _gap(trainer, independent)
        if engines is not None:
            gaps |= {
                "engine_and_transformers": _gap(engines, independent),
                "engine_and_trainer": _gap(engines, trainer),
            }
        bench.row(**gaps)


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a fresh process: Megatron keeps state that a second trainer would find."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _trainer_log_probs(config: Any, batch: Any) -> list[np.ndarray[Any, Any]]:
    rank = start_rank(config)
    found = rank.log_probs(batch)
    rank.close()
    return found


def _gap(left: Any, right: Any) -> str:
    return f"{max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True)):.1e}"


# --- speed --------------------------------------------------------------------------------------------


def training_step(bench: Bench, shape: str, layers: str = "auto") -> None:
    """Time, memory and MFU of training steps with random weights, by the trainer's layers of one kind.

    As many layers as fit into memory are trained.
    """
    flags = _QWEN | SHAPES[shape] | (_SMALL if bench.small else {})
    count = flags["num_layers"] if not bench.on_gpu else layers_that_fit(flags, torch.cuda.mem_get_info()[0])
    whole = SHAPES[shape]["num_layers"]
    flags["num_layers"] = count
    tokens = 256 if bench.small else 4096
    config = make_config(None, device=bench.device, megatron=flags, max_tokens_per_gpu=tokens, layer_backend=layers)
    samples, length = (4, 64) if bench.small else (16, 2048)
    prompt = length // 4
    batch = make_batch(
        samples=samples,
        vocab=flags["vocab_size"],
        prompt=(prompt, prompt),
        response=(length - prompt, length - prompt),
        masked=False,
    )
    settings = train_settings(config, None)
    flops = Flops.of(settings.transformer, vocab_size=settings.vocab_size)
    forward = sum(flops(len(tokens) - 1, len(tokens) - prompt) for tokens in batch.tokens)
    rank = start_rank(config)
    parameters = sum(p.numel() for chunk in rank.policy.chunks for p in chunk.parameters())
    rank.train(batch)  # the first step allocates memory and compiles kernels
    seconds = [_timed(bench, lambda: rank.train(batch)) for _ in range(_TIMED_STEPS)]
    step = statistics.median(seconds)
    recompute = flags.get("recompute_granularity") == "full"
    peak = bench.peak_tflops or (peak_tflops(torch.cuda.get_device_name(0)) if bench.on_gpu else None)
    if bench.on_gpu:
        memory = torch.cuda.max_memory_allocated() / 2**30
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    bench.row(
        shape=shape + (", small" if bench.small else ""),
        layers=f"{count} of {whole}",
        parameters=f"{parameters / 1e6:.2f} M",
        trained_by=config.layer_backend,
        recomputation="full" if recompute else "none",
        tokens_per_step=f"{samples * length:,}",
        s_per_step=f"{step:.3f}",
        tokens_per_s=f"{samples * length / step:,.0f}",
        **{"TFLOP/s": f"{(4 if recompute else 3) * forward / step / 1e12:.4g}"},
        **{"MFU, %": "peak unknown: --peak-tflops" if peak is None else f"{3 * forward / step / peak / 1e10:.1f}"},
        peak_GiB=f"{memory:.2f}",
    )
    rank.close()


def layers_that_fit(flags: dict[str, Any], free: int) -> int:
    """How many layers of a shape can be trained in `free` bytes of GPU memory, with Adam.

    Raises:
        MemoryError: Not even one.
    """
    fused = any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))
    each = _BYTES_FUSED if fused else _BYTES
    hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
    attention = 2 * hidden * hidden * (1 + flags["num_query_groups"] / heads)
    layer = each * (attention + 3 * hidden * flags["ffn_hidden_size"])
    tables = 2 if flags.get("untie_embeddings_and_output_weights") else 1
    fixed = each * tables * hidden * flags["vocab_size"] + _SPARE_BYTES
    fit = int((free - fixed) // layer)
    if fit < 1:
        raise MemoryError(
            f"one layer needs {(fixed + layer) / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB of GPU memory are free"
        )
    return min(fit, int(flags["num_layers"]))


def peak_tflops(name: str) -> float | None:
    """What a GPU of this name can do in dense bfloat16; None if the name is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def _timed(bench: Bench, body: Callable[[], Any]) -> float:
    began = time.perf_counter()
    body()
    if bench.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began
