"""The platform `cpu`: stock Megatron-core and SGLang on a machine without a GPU."""

from __future__ import annotations

import gc
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from slime.kit.processes import SHORT_SPINS
from slime.platform import Platform

if TYPE_CHECKING:
    from slime.engine.server import EngineSpec

_ENVIRONMENT = {
    # SGLang's own switch.
    "SGLANG_USE_CPU_ENGINE": "1",
    **SHORT_SPINS,
    # Otherwise expert routing is compiled, which takes seconds on the first request and a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # With several ranks SGLang loads NCCL if its package is installed, which fails without a driver.
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
}
#: bytes of key-value cache an engine gets by default (SGLang's own default is 70 % of memory)
_CACHE_BYTES = 512 * 2**20
_CACHE_TOKENS = (8192, 65536)  # at least, at most


class CpuPlatform(Platform):
    """See `slime.platform`."""

    forks_engines = True

    def prepare_trainer(self) -> None:
        """Rewrite how Megatron names its device."""
        importlib.import_module("slime_cpu.megatron").install()

    def prepare_engine(self) -> None:
        """Import SGLang's server, with stand-ins and patches, so that it can be forked from this process."""
        from slime_cpu import sglang_standins

        gc.disable()  # nothing imported here ever becomes garbage; looking for some takes a second
        sglang_standins.install()
        sglang_standins.compile_nothing()
        with sglang_standins.without_megatron():
            for module in (
                "sglang.srt.entrypoints.http_server",
                "sglang.srt.managers.detokenizer_manager",
                "sglang.srt.managers.scheduler",
            ):
                importlib.import_module(module)

            from slime_cpu import sglang_models, sglang_patches

            sglang_models.import_on_demand()
            sglang_patches.apply()
            # Otherwise each scheduler does so after it was forked. It must see the patches.
            importlib.import_module("sglang.srt.model_executor.model_runner")
        # Left to the collector, the imported objects cost every server process pauses of half a second while it serves,
        # and memory that forked processes otherwise share.
        gc.collect()
        gc.freeze()
        gc.enable()

    def make_sglang_importable(self) -> None:
        """Stand in for what cannot be imported here."""
        importlib.import_module("slime_cpu.sglang_standins").install()

    def engine_environment(self, spec: EngineSpec) -> dict[str, str]:
        """SGLang's CPU engine, and its threads."""
        environment = _ENVIRONMENT | {"OMP_NUM_THREADS": str(spec.threads)}
        if spec.tp_size > 1:
            # SGLang demands a core list for each rank; without its native CPU kernels it pins nothing.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(spec.tp_size))
        return environment

    def engine_options(self, spec: EngineSpec) -> dict[str, str | None]:
        """The trainer's numbers, seeds that decide tokens, and a core left to the trainer."""
        options: dict[str, str | None] = {}
        if spec.deterministic:
            # SGLang would derive a negative share from the size of the chunks.
            options["--mem-fraction-static"] = "0.8"
        return options | {
            # A request's `sampling_seed` and the model's probabilities decide its tokens. On GPUs this costs much more
            # than sampling without seeds, so there it is the user's choice.
            "--enable-deterministic-inference": None,
            # bfloat16 is no faster without AMX, and float32 makes the engine's log-probs the trainer's.
            "--dtype": "float32",
            # SGLang's default without its native CPU kernels. Stated, because SGLang decides it too late for
            # --enable-deterministic-inference, and so that all CPU hosts compute alike.
            "--attention-backend": "torch_native",
            "--max-total-tokens": str(self.cache_tokens(Path(spec.model_path))),
            # Otherwise an idle scheduler spins and takes a whole core from the trainer. With DP attention ranks wait
            # for one another in every round, and those that sleep would hold up each message by a second.
            **({} if {"--enable-dp-attention", "--attn-dp-size"} & {*spec.extra_args} else {"--sleep-on-idle": None}),
        }

    def cache_tokens(self, model: Path) -> int:
        """As many as fit a budget of bytes, according to the folder's `config.json`."""
        low, high = _CACHE_TOKENS
        try:
            sizes = json.loads((model / "config.json").read_text())
        except (OSError, ValueError):
            return low  # missing or broken: SGLang reports it better
        heads = int(sizes.get("num_attention_heads") or 1)
        head_dim = int(sizes.get("head_dim") or int(sizes.get("hidden_size") or 1) // heads)
        kv_heads = int(sizes.get("num_key_value_heads") or heads)
        bytes_per_token = int(sizes.get("num_hidden_layers") or 1) * 2 * kv_heads * head_dim * 4
        return max(low, min(high, _CACHE_BYTES // bytes_per_token))
