"""The command line and environment of one SGLang server: what RL needs, what a CPU host needs, and what the
user set, which always wins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slime.engine.ports import LOOPBACK

#: on every kind of machine
_ENVIRONMENT = {
    # /health otherwise generates a token: it takes a second, and says 503 while generation is paused for
    # a weight update, whereupon the router refuses new requests.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # When a scheduler dies, end at once instead of examining it for five seconds.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # One thread: more gain little for a small model, and collapse when the cores are shared with the trainer.
    "OMP_NUM_THREADS": "1",
    # Expert routing is compiled otherwise: seconds on the first request, and a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # With several ranks SGLang loads NCCL wherever its package is installed, which fails without a driver.
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
}
#: bytes of key-value cache a CPU engine gets when the user says nothing (SGLang's own default is 70 % of memory)
_CPU_CACHE_BYTES = 512 * 2**20
_CPU_CACHE_TOKENS = (8192, 65536)  # at least, at most


@dataclass(frozen=True)
class EngineSpec:
    """One SGLang server.

    `extra_args` is SGLang's command line as the user set it (`["--dtype", "bfloat16"]`); it overrides every
    default of this module, as `env` overrides every environment variable.
    """

    model_path: str
    log_path: Path
    host: str = LOOPBACK
    port: int = 0  #: 0: a free one
    tp_size: int = 1
    device: Literal["cpu", "cuda"] = "cuda"
    extra_args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    context_length: int | None = None  #: None: the model's
    random_seed: int | None = None
    #: on CPU: a request's `sampling_seed` decides its tokens, whatever else is in its batch (3 % slower).  On GPUs
    #: it costs much more, so there it takes SGLang's own --enable-deterministic-inference.
    seeded_sampling: bool = True
    base_gpu_id: int = 0  #: the first of the `tp_size` GPUs it uses
    #: address of the host's `slime.engine.fork_server.ForkServer`; CPU only
    fork_server: Path | None = None


def server_environment(spec: EngineSpec) -> dict[str, str]:
    """What is added to the environment of `spec`'s server."""
    environment = dict(_ENVIRONMENT)
    if spec.device == "cpu":
        environment |= _CPU_ENVIRONMENT
        if spec.tp_size > 1:
            # SGLang demands a core list per rank; without its native CPU kernels it pins nothing.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(spec.tp_size))
    return environment | dict(spec.env)


def server_arguments(spec: EngineSpec, port: int) -> list[str]:
    """SGLang's command line for `spec` on `port`."""
    arguments = ["--model-path", spec.model_path, "--host", spec.host, "--port", str(port)]
    for flag, value in _defaults(spec).items():
        if not _is_set(flag, spec.extra_args):
            arguments += [flag] if value is None else [flag, value]
    return [*arguments, *spec.extra_args]


def _defaults(spec: EngineSpec) -> dict[str, str | None]:
    """Flags the user may override; None marks a switch."""
    defaults: dict[str, str | None] = {
        "--tp-size": str(spec.tp_size),
        # Readiness is asked for by a probe; a warm-up request would be one more thing to wait for.
        "--skip-server-warmup": None,
        # One line of log per request costs more than parsing the request.
        "--log-level-http": "warning",
    }
    if spec.random_seed is not None:
        defaults["--random-seed"] = str(spec.random_seed)
    if spec.context_length is not None:
        defaults["--context-length"] = str(spec.context_length)
    if spec.device == "cuda":
        defaults["--base-gpu-id"] = str(spec.base_gpu_id)
        return defaults
    if spec.seeded_sampling:
        defaults["--enable-deterministic-inference"] = None
    return defaults | {
        # bfloat16 is no faster without AMX, and float32 makes the engine's log-probs the trainer's.
        "--dtype": "float32",
        # SGLang's default, where its native CPU kernels are missing; said outright, because it is decided
        # too late for --enable-deterministic-inference, and so that all CPU hosts compute alike.
        "--attention-backend": "torch_native",
        "--max-total-tokens": str(_cpu_cache_tokens(spec)),
        # An idle scheduler otherwise spins, taking a whole core from the trainer.
        "--sleep-on-idle": None,
    }


_ALIASES = {
    "--tp-size": ("--tensor-parallel-size", "--tp"),
    "--random-seed": ("--seed",),
}


def _is_set(flag: str, arguments: Sequence[str]) -> bool:
    names = (flag, *_ALIASES.get(flag, ()))
    return any(a in names or a.startswith(tuple(f"{n}=" for n in names)) for a in arguments)


def _cpu_cache_tokens(spec: EngineSpec) -> int:
    """Tokens that fit in the default cache budget, by the model's `config.json`."""
    low, high = _CPU_CACHE_TOKENS
    low = max(low, spec.context_length or 0)
    try:
        model = json.loads(Path(spec.model_path, "config.json").read_text())
    except (OSError, ValueError):
        return low  # not a local folder, or broken: SGLang will say so better
    heads = int(model.get("num_attention_heads") or 1)
    head_dim = int(model.get("head_dim") or int(model.get("hidden_size") or 1) // heads)
    kv_heads = int(model.get("num_key_value_heads") or heads)
    bytes_per_token = int(model.get("num_hidden_layers") or 1) * 2 * kv_heads * head_dim * 4
    return max(low, min(high, _CPU_CACHE_BYTES // bytes_per_token))
