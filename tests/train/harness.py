"""Groups of real gloo ranks for tests, forked from a server process that has imported the trainer once.

A fresh rank spends 4 to 9 seconds on imports, one forked from the server about one second. The server is
single-threaded, whatever the test process has done before.
"""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.config import RunConfig
from slime.config.run_config import SECTIONS
from slime.data import TrainBatch
from slime.plugin import Advantages, EstimatorBatch, EstimatorSpec

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["slime.train.rank", "slime.train.checkpoint_io", "tests.train.harness"])


@dataclass(frozen=True)
class RankLauncher:
    """Starts one of `world_size` ranks, which meet at `port`."""

    rank: int
    world_size: int
    port: int

    def start(
        self, config: Any, estimator: Any = None, spec: EstimatorSpec | None = None, run_dir: Path | None = None
    ) -> Any:
        """A MegatronRank for `config`."""
        from slime.train.rank import MegatronRank

        return MegatronRank(
            config,
            rank=self.rank,
            world_size=self.world_size,
            master=("127.0.0.1", self.port),
            estimator=estimator,
            spec=spec,
            run_dir=run_dir,
        )


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """The results of `function(launcher, *arguments)` on each rank; a failure is raised with the rank's traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        _CONTEXT.Process(target=_work, args=(RankLauncher(rank, world_size, port), pipes[rank][1], function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    waiting = {rank: pipe[0] for rank, pipe in enumerate(pipes)}
    results: dict[int, Any] = {}
    try:
        while waiting:
            assert time.monotonic() < deadline, f"ranks {sorted(waiting)} gave no answer within {timeout_s} s"
            for rank, pipe in list(waiting.items()):
                if not pipe.poll(0.02):
                    assert processes[rank].is_alive() or pipe.poll(0.1), f"rank {rank} died"
                    continue
                ok, value = pickle.loads(pipe.recv_bytes())
                assert ok, f"rank {rank} failed:\n{value}"
                results[rank] = value
                del waiting[rank]
        for process in processes:
            process.join(20)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def _work(launcher: RankLauncher, pipe: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        pipe.send_bytes(pickle.dumps((True, function(launcher, *arguments))))
    except BaseException:  # noqa: BLE001 - reported to the test with its traceback
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    pipe.close()


def make_config(
    folder: Path | None,
    *,
    world_size: int = 1,
    steps: int = 1,
    megatron: dict[str, Any] | None = None,
    **options: Any,
) -> RunConfig:
    """A run configuration: `options` are slime's own flags by field name, `megatron` Megatron's."""
    options = {
        "hf_checkpoint": None if folder is None else str(folder),
        "device": "cpu",
        "threads_per_rank": 1,
        "actor_num_gpus_per_node": world_size,
        "rollout_batch_size": 2 * steps,
        "num_steps_per_rollout": steps,
    } | options
    sections = {}
    for name, kind in SECTIONS.items():
        mine = {key: options.pop(key) for key in list(options) if key in kind.model_fields}
        sections[name] = kind(**mine)
    assert not options, options
    return RunConfig(megatron={"lr": 1e-2, "adam_eps": 1e-4} | (megatron or {}), **sections)


def make_batch(
    *,
    seed: int = 0,
    samples: int = 8,
    vocab: int = 128,
    prompt: tuple[int, int] = (2, 9),
    response: tuple[int, int] = (1, 24),
    steps: int = 1,
    group: int = 4,
    masked: bool = True,
    rollout_log_probs: bool = False,
) -> TrainBatch:
    """Random ragged samples; with `masked`, some response tokens carry no loss and one sample none at all."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(response[0], response[1] + 1, samples)
    prompts = rng.integers(prompt[0], prompt[1] + 1, samples)
    masks = [np.ones(n, dtype=np.float32) for n in lengths]
    if masked:
        masks = [(rng.random(n) < 0.8).astype(np.float32) for n in lengths]
        masks[-1][:] = 0
    return TrainBatch(
        rollout=0,
        tokens=[rng.integers(3, vocab, p + t).astype(np.int32) for p, t in zip(prompts, lengths, strict=True)],
        response_lengths=lengths.astype(np.int64),
        loss_masks=masks,
        rewards=rng.random(samples).astype(np.float32),
        group_ids=np.arange(samples, dtype=np.int64) // group,
        # two samples of one rollout share its weight
        rollout_ids=np.maximum(np.arange(samples, dtype=np.int64), 1),
        step_ids=np.arange(samples, dtype=np.int64) * steps // samples,
        sample_ids=100 + np.arange(samples, dtype=np.int64),
        rollout_log_probs=[-rng.random(n).astype(np.float32) for n in lengths] if rollout_log_probs else None,
    )


class Centred:
    """Reward minus the group's mean on every trained token, minus `kl_coef` x KL if there is a reference."""

    def __init__(self, kl_coef: float = 0.0) -> None:
        self.kl_coef = kl_coef

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        values = []
        for i, mask in enumerate(batch.loss_masks):
            mean = batch.rewards[batch.group_ids == batch.group_ids[i]].mean()
            value = (batch.rewards[i] - mean) * mask
            if batch.kl is not None:
                value = value - self.kl_coef * batch.kl[i] * mask
            values.append(value)
        return Advantages(values)
