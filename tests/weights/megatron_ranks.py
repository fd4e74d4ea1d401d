"""Forked gloo ranks, each with its part of a Megatron model built from a Hugging Face `config.json`."""

from __future__ import annotations

import slime.train  # noqa: F401 - prepares imports of megatron.core

# isort: split

import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.families import read_architecture

from slime.engine.ports import ReservedPort

_DEADLINE_S = 240


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns on each of `world_size` forked gloo ranks."""
    context = torch.multiprocessing.get_context("fork")
    port = ReservedPort()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port.number, pipes[rank][1], function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        results = []
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(_DEADLINE_S), f"rank {rank} did not answer in {_DEADLINE_S} s"
            ok, value = pickle.loads(receiver.recv_bytes())
            assert ok, f"rank {rank} failed:\n{value}"
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        port.release()


def _rank(rank: int, world_size: int, port: int, pipe: Any, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        value = function(rank, *arguments)
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((True, value)))  # plain: tensors travel by value
    except BaseException:  # noqa: BLE001 - reported to the test with its traceback
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    pipe.close()
    os._exit(0)  # a forked pytest must not run the parent's exit handlers


def build(
    folder: Path, *, tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, padded_vocab: int | None = None
) -> list[Any]:
    """This rank's model chunks, initialised at random, for the model in `folder`."""
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(7, inference_rng_tracker=True, force_reset_rng=True)
    model = read_architecture(folder)
    keywords = {**model.transformer, "activation_func": torch.nn.functional.silu}
    config = TransformerConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=vpp is None,
        **keywords,
        **({"num_layers_in_first_pipeline_stage": 2} if pp == 2 and vpp is None else {}),
    )
    experts = config.num_moe_experts
    spec = get_gpt_layer_local_spec(experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    gpt = dict(model.gpt)
    vocab_size = gpt.pop("vocab_size")
    return [
        GPTModel(
            config,
            spec,
            vocab_size=padded_vocab or vocab_size,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vpp is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vpp is None, vp_stage=stage),
            vp_stage=stage,
            **gpt,
        )
        for stage in ([None] if vpp is None else range(vpp))
    ]
