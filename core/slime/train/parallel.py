"""Process groups of the training ranks: gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

import math
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from slime.config.threads import rank_threads
from slime.config.weight_options import SYNC_ANSWER_S
from slime.engine.ports import LOOPBACK, host_port, own_address, use_interface_of
from slime.errors import TrainerError
from slime.weights.transports.group import served_store

if TYPE_CHECKING:
    from slime.config import RunConfig

T = TypeVar("T")
#: where ranks find each other: a file in a folder of this user alone, or an address and port at which rank 0 listens
MeetingPoint = Path | tuple[str, int]


def start(config: RunConfig, transformer: Any, *, rank: int, world_size: int, meeting: MeetingPoint) -> torch.device:
    """Join the other ranks, build Megatron's groups for the sizes in `transformer` and seed every random generator.

    Returns:
        This rank's device.

    Raises:
        TrainerError: The ranks did not meet within `--distributed-timeout-minutes`.
    """
    if config.run.deterministic:
        _require_determinism()
    minutes = config.cluster.distributed_timeout_minutes
    # Ray shows a GPU process only its own device, so that is number 0.
    device = torch.device("cuda", 0) if config.on_gpu else torch.device("cpu")
    if config.on_gpu:
        torch.cuda.set_device(device)
    if isinstance(meeting, Path):
        host, place = LOOPBACK, str(meeting)
    else:
        host, place = own_address(meeting[:1]), host_port(*meeting)
    use_interface_of(host)
    try:
        dist.init_process_group(
            "nccl" if config.on_gpu else "gloo",
            store=_store(meeting, rank, world_size, timedelta(minutes=minutes)),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=minutes),
        )
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise TrainerError(
            f"rank {rank} of {world_size} could not join the others at {place} within {minutes:g}"
            f" minutes: {error}. Either a rank died while starting (see its log), or the port is taken or blocked."
        ) from error
    machine = socket.gethostname()
    torch.set_num_threads(rank_threads(config, of_all_ranks(machine).count(machine)))
    # Ranks that take part in gathering wait for the one that sends, and must not give up before it does.
    in_sync_s = config.sync.weight_sync_timeout_s + SYNC_ANSWER_S
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=transformer.tensor_model_parallel_size,
        pipeline_model_parallel_size=transformer.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=transformer.virtual_pipeline_model_parallel_size,
        context_parallel_size=transformer.context_parallel_size,
        expert_model_parallel_size=transformer.expert_model_parallel_size,
        expert_tensor_parallel_size=transformer.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(minutes), math.ceil(in_sync_s / 60)),
        create_gloo_process_groups=False,
    )
    torch.manual_seed(config.run.seed)
    # Without dropout the cheap tracker (no state per region) draws the same numbers.
    model_parallel_cuda_manual_seed(config.run.seed, inference_rng_tracker=True, force_reset_rng=True)
    return device


def _require_determinism() -> None:
    """Make torch use deterministic algorithms only; an operation that has none raises an error that names it."""
    # Read by MKL (whose sums otherwise depend on where a tensor lies in memory), cuBLAS, NCCL and TransformerEngine at
    # their start.
    os.environ |= {
        "MKL_CBWR": "AUTO,STRICT",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    torch.use_deterministic_algorithms(True)


def _store(meeting: MeetingPoint, rank: int, world_size: int, timeout: timedelta) -> Store:
    """What the ranks know of each other: on one machine in a file, which no other user can write to; on several served
    by rank 0 at the given address."""
    if isinstance(meeting, Path):
        store = FileStore(str(meeting), world_size)
        store.set_timeout(timeout)
        return store
    host, port = meeting
    if rank != 0:
        return TCPStore(host, port, world_size, timeout=timeout, wait_for_workers=False)
    return served_store(host, port, world_size, timeout)


def of_all_ranks(own: T) -> list[T]:
    """What each rank calls this with, in the order of the ranks (collective)."""
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def counts_tokens() -> bool:
    """Whether this rank contributes to sums over tokens: one rank for each micro-batch, with the output layer."""
    return (
        bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def stop(*, failed: bool = False) -> None:
    """Leave the groups. Call it on every rank before the process ends, even after an error; safe to repeat.

    A gloo worker thread that drops the last reference to a tensor while the interpreter shuts down aborts the
    process, hence the explicit end. After an error there is no barrier: the other ranks may never reach it.
    """
    if not dist.is_initialized():
        return
    try:
        if not failed:
            dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
