"""Colocation's turns on the stand-in: a real rank of the trainer, and memory that stands for an engine.

The engine is `MemoryOfEngine`: what SGLang with torch_memory_saver takes and gives back, by kind, past the trainer's
allocator. The device is too small for both sides at once, so a stage out of order runs out of memory. What the trainer
held must be there again, bit by bit, and none of it may be on the device while the engine works.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.train.harness import Centred, make_batch

from proofs.no_gpu.cases import Case, config_of
from proofs.no_gpu.step import alone
from slime.run.colocation import TO_TRAINER, ColocatedRun
from slime.train.offload import optimizer_tensors
from slime.train.rank import MegatronRank

MIB = 2**20
#: what the engine takes, by SGLang's kinds of memory
ENGINE_MIB = {"weights": 70, "kv_cache": 450, "cuda_graph": 30}
#: what may stay of the trainer while the engine works: what torch reserves at least, and small buffers
STAYS_MIB = 8
CASE = Case("qwen2.5-0.5B", layers=2, tokens=1024, flags="--colocate --rollout-num-gpus 1", shape={"vocab_size": 4096})


class MemoryOfEngine:
    """The memory of an engine, and nothing else of it."""

    def __init__(self) -> None:
        self._runtime: Any = ctypes.CDLL(None)
        self._held: dict[str, ctypes.c_void_p] = {}
        self.restore_memory([*ENGINE_MIB])

    def release_memory(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            self._runtime.cudaFree(self._held.pop(kind))

    def restore_memory(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            address = ctypes.c_void_p()
            if self._runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(ENGINE_MIB[kind] * MIB)):
                raise MemoryError(f"the engine finds no {ENGINE_MIB[kind]} MiB for its {kind}")
            self._held[kind] = address

    def held_bytes(self) -> int:
        return MIB * sum(ENGINE_MIB[kind] for kind in self._held)


class Trainer:
    """The trainer's process, in this one."""

    def __init__(self, rank: MegatronRank) -> None:
        self._rank = rank

    def begin(self, method: str, *arguments: Any, doing: str) -> Any:  # noqa: ARG002
        answer = getattr(self._rank, method)(*arguments)
        return SimpleNamespace(wait=lambda: [answer])


class Turns(ColocatedRun):
    """A run whose sides are in this process."""

    def __init__(self, config: Any, engine: MemoryOfEngine, rank: MegatronRank) -> None:
        self.config, self._shares, self._turn, self._of_turns = config, True, "trainer", defaultdict(float)
        self._engines, self._trainer = engine, Trainer(rank)  # type: ignore[assignment]  # as far as turns need them
        self._synced, self._rank, self.sent = {}, rank, 0

    def _send_weights(self) -> None:
        """What is read of the trainer when weights are sent."""
        self.sent = sum(tensor.nbytes for _, tensor in self._rank.named_hf_weights())
        self._synced["synced_bytes"] = float(self.sent)


def tensors(rank: MegatronRank) -> Iterator[torch.Tensor]:
    """What the trainer must have again after its turn."""
    for chunk in rank.policy.chunks:
        yield from chunk.parameters()
    yield from optimizer_tensors(rank.policy.optimizer)


def turns(folder: Path) -> dict[str, Any]:
    """Two turns of each side; what was held."""
    config, _ = config_of(CASE, folder)
    alone(CASE, 896)
    engine = MemoryOfEngine()
    engine.release_memory(TO_TRAINER[0].what)
    rank = MegatronRank(config, rank=0, world_size=1, meeting=folder / "meeting", estimator=Centred())
    run = Turns(config, engine, rank)
    batch = make_batch(samples=8, vocab=1000, prompt=(50, 50), response=(51, 51), rollout_log_probs=True)
    rank.train(batch)
    torch.manual_seed(1)
    for tensor in tensors(rank):
        tensor.data.copy_(torch.randn(tensor.shape).to(tensor.dtype))
    expected = [tensor.detach().cpu() for tensor in tensors(rank)]
    found: dict[str, Any] = {
        "trainer_mib": torch.cuda.memory_allocated() // MIB,
        "engine_mib": sum(ENGINE_MIB.values()),
    }
    for _ in range(2):
        run._give_to_engines()
        left, total = torch.cuda.mem_get_info()
        found["of_trainer_while_generating"] = total - left - engine.held_bytes()
        found["allocated_while_generating"] = torch.cuda.memory_allocated()
        run._give_to_trainer()
        found["equal"] = all(map(torch.equal, expected, (tensor.detach().cpu() for tensor in tensors(rank))))
    rank.train(batch)
    return found | {
        "allowed_bytes": STAYS_MIB * MIB,
        "sent_bytes": run.sent,
        "parameters_bytes": sum(p.nbytes for p in rank.policy.chunks[0].parameters()),
    }
