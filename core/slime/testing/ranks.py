"""Groups of real trainer ranks, forked from a server process that has imported the trainer once.

A fresh rank spends 4 to 9 seconds on imports, one forked from the server half a second. The server is
single-threaded, whatever the calling process has done before.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.engine.ports import ReservedPort

if TYPE_CHECKING:
    from slime.plugin import EstimatorSpec
    from slime.train.rank import MegatronRank

_CONTEXT = multiprocessing.get_context("forkserver")
#: the last is imported by the first optimizer of a process, in more time than all else that a forked rank does
PRELOADED = ("slime.train.rank", "slime.train.checkpoint_io", "torch._dynamo")
_CONTEXT.set_forkserver_preload(list(PRELOADED))
#: seconds that a rank has to end once it has answered
_ENDING_S = 60.0


@dataclass(frozen=True)
class RankLauncher:
    """Starts one of `world_size` ranks, which meet at `port`."""

    rank: int
    world_size: int
    port: int

    def start(
        self, config: Any, estimator: Any = None, spec: EstimatorSpec | None = None, run_dir: Path | None = None
    ) -> MegatronRank:
        """A rank of the trainer for a run's configuration, in this process."""
        from slime.train.rank import MegatronRank

        return MegatronRank(
            config,
            rank=self.rank,
            world_size=self.world_size,
            meeting=("127.0.0.1", self.port),
            estimator=estimator,
            spec=spec,
            run_dir=run_dir,
        )


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
    """The results of `function(launcher, *arguments)` on each rank.

    Args:
        function: Called in a process of each rank, to which it is pickled by name.
        world_size: Number of ranks.
        *arguments: What else it gets.
        timeout_s: Seconds that all ranks together may take.

    Raises:
        AssertionError: A rank raised (the message has its traceback), died, or took too long.
    """
    port = ReservedPort()
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        _CONTEXT.Process(
            target=_work, args=(RankLauncher(rank, world_size, port.number), pipes[rank][1], function, arguments)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    waiting = {rank: pipe[0] for rank, pipe in enumerate(pipes)}
    results: dict[int, Any] = {}
    try:
        while waiting:
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks {sorted(waiting)} gave no answer within {timeout_s} s")
            for rank, pipe in list(waiting.items()):
                if not pipe.poll(0.02):
                    if not processes[rank].is_alive() and not pipe.poll(0.1):
                        raise AssertionError(f"rank {rank} died with exit code {processes[rank].exitcode}")
                    continue
                ok, value = pickle.loads(pipe.recv_bytes())
                if not ok:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                results[rank] = value
                del waiting[rank]
        for process in processes:
            process.join(_ENDING_S)
            if process.exitcode != 0:
                raise AssertionError(f"a rank ended with exit code {process.exitcode}")
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        port.release()
    return [results[rank] for rank in range(world_size)]


def _work(launcher: RankLauncher, pipe: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        pipe.send_bytes(pickle.dumps((True, function(launcher, *arguments))))
    except BaseException:  # noqa: BLE001 - reported to the caller with its traceback
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    pipe.close()
