"""How many devices a run needs, and whether the nodes of a cluster have room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.config.run_config import RunConfig
from slime.errors import ConfigError


@dataclass(frozen=True)
class Demand:
    """What a run asks of a cluster."""

    #: Ray's resource that counts devices: on a cluster without GPUs a device is one of a node's CPUs
    resource: str
    ranks: int
    engines: int
    per_engine: int
    #: whether engines and trainer use the same devices, as they do on CPUs
    shares: bool

    @classmethod
    def of(cls, config: RunConfig, *, ranks: int, num_engines: int) -> Demand:
        """The demand of a run with this many training ranks and engines."""
        per_engine = config.cluster.rollout_num_gpus_per_engine
        num_engines = 0 if config.cluster.rollout_external_engine_addrs else num_engines
        shares = ranks > 0 and (config.cluster.colocate or not config.on_gpu)
        return cls("GPU" if config.on_gpu else "CPU", ranks, num_engines, per_engine, shares)

    @property
    def of_engines(self) -> int:
        """How many devices the engines use."""
        return self.engines * self.per_engine

    @property
    def devices(self) -> int:
        """How many it needs in all."""
        return max(self.ranks, self.of_engines) if self.shares else self.ranks + self.of_engines

    def __str__(self) -> str:
        engines = f"{_several(self.engines, 'engine')} x {self.per_engine}" if self.engines else ""
        ranks = _several(self.ranks, "training rank") if self.ranks else ""
        return (" with " if self.shares else " + ").join(filter(None, (ranks, engines)))

    def check(self, nodes: Sequence[int]) -> None:
        """Raise `ConfigError` unless nodes that serve so many devices have enough of them in all."""
        if sum(nodes) < self.devices:
            explained = " A device is one of Ray's CPUs: `ray start --num-cpus N` says how many a node serves."
            raise ConfigError(
                f"the run needs {self.devices} {self.resource}s ({self}) and Ray sees {sum(nodes)}. Lower"
                " --actor-num-gpus-per-node or --rollout-num-gpus, or pass --ray-address of a larger cluster."
                f"{explained if self.resource == 'CPU' else ''}"
            )

    def nodes_per_engine(self, nodes: Sequence[int]) -> int:
        """How many nodes an engine spans: one if any is large enough, otherwise whole nodes of one size.

        Args:
            nodes: How many devices each node serves.

        Raises:
            ConfigError: No layout of these nodes has room for the engines, whoever else uses them.
        """
        if not self.engines:
            return 1
        largest, flag = max(nodes, default=0), f"--rollout-num-gpus-per-engine {self.per_engine}"
        if self.per_engine <= largest:
            if sum(size // self.per_engine for size in nodes) < self.engines:
                raise ConfigError(
                    f"{flag}: {self.engines} engines, each on one node, do not fit {sizes(nodes, self.resource)}."
                )
            return 1
        if self.per_engine > sum(nodes):
            raise ConfigError(f"{flag}: an engine is larger than the cluster, which has {sizes(nodes, self.resource)}.")
        for size in sorted({*nodes} - {0}, reverse=True):
            spans, rest = divmod(self.per_engine, size)
            if not rest and nodes.count(size) >= spans * self.engines:
                return spans
        raise ConfigError(
            f"{flag}: no node is so large, and an engine over several takes whole nodes of one size:"
            f" {_several(self.engines, 'engine')} of {self.per_engine} {'does' if self.engines == 1 else 'do'} not fit"
            f" {sizes(nodes, self.resource)}."
        )


def sizes(nodes: Sequence[int], resource: str) -> str:
    """The nodes of a cluster, for messages: `2 nodes of 8 GPUs, 1 node of 4 GPUs`."""
    found = [(nodes.count(size), size) for size in sorted({*nodes} - {0}, reverse=True)]
    return ", ".join(f"{_several(count, 'node')} of {_several(size, resource)}" for count, size in found) or "no nodes"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s'[: count != 1]}"
