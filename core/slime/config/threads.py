"""How many CPU threads training ranks and engines get, where the user does not say."""

from __future__ import annotations

import os

from slime.config.run_config import RunConfig

#: threads of an engine process at most, unless the user says more: a product has at least 8 rows for each, so that its
#: bits do not depend on the batch, and a small batch would become mostly padding
_MOST_FOR_ENGINES = 4


def engine_threads(config: RunConfig) -> int:
    """Threads of each process that computes for an engine on a CPU.

    Trainer and engines take turns, so each of them may use all cores, engines up to four for each process. With --async
    they compute at the same time, and the engines get at most half of the cores.
    """
    if (stated := config.cluster.threads_per_engine) is not None:
        return stated
    if config.run.deterministic:
        return 1  # attention of one sequence is cut into parts for the threads, by how many others there are
    cores = _cores() // 2 if config.rollout.async_mode else _cores()
    return max(1, min(_MOST_FOR_ENGINES, cores // _engine_processes(config)))


def rank_threads(config: RunConfig, ranks: int) -> int:
    """Threads of each of the `ranks` training ranks on this machine.

    With --async on a CPU, the cores that the engines do not use: threads that compete for a core wait for one another
    in every operation, which costs more than the threads gain.
    """
    if (stated := config.cluster.threads_per_rank) is not None:
        return stated
    cores = _cores()
    if config.rollout.async_mode and not config.on_gpu and config.trains_policy:
        cores -= engine_threads(config) * _engine_processes(config)
    return max(1, cores // ranks)


def _cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def _engine_processes(config: RunConfig) -> int:
    """Processes that compute for engines on this machine; of several nodes, each has as many."""
    return -(-config.rollout_devices // config.cluster.actor_num_nodes)
