"""The trainer actors: one Megatron rank each, driven as one."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from slime.cluster.actor_process import load_same_plugins, node_address, redirect_output
from slime.cluster.waiting import Watch, wait_for
from slime.config import RunConfig
from slime.plugin import Context, EstimatorSpec

if TYPE_CHECKING:
    from slime.data import TrainBatch


class TrainerActor:
    """One Megatron rank, and on rank 0 the sending end of the weight transport."""

    def __init__(self, config: RunConfig, run_dir: Path, rank: int, fingerprint: str) -> None:
        redirect_output(run_dir / "logs" / f"trainer-{rank}.log")
        self._config = config
        self._run_dir = run_dir
        self._rank_index = rank
        self._plugins = load_same_plugins(config, fingerprint)
        self._transport: Any = None
        self._rank: Any = None

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port on this rank's host, for the process group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return node_address(), int(probe.getsockname()[1])

    def setup(self, master_addr: str, master_port: int) -> None:
        """Build the model, optimizer and process groups (collective over the ranks)."""
        from slime.train.rank import MegatronRank

        estimator, spec = self._estimator()
        local = self._rank_index % self._config.cluster.actor_num_gpus_per_node
        self._rank = MegatronRank(
            self._config,
            rank=self._rank_index,
            world_size=self._config.world_size,
            local_rank=0 if self._config.on_gpu else local,  # Ray shows a GPU actor its own device only
            master_addr=master_addr,
            master_port=master_port,
            estimator=estimator,
            spec=spec,
        )

    def _estimator(self) -> tuple[Any, EstimatorSpec | None]:
        """The estimator component and its spec; none for supervised fine-tuning."""
        name = self._config.algorithm.advantage_estimator
        if self._config.algorithm.loss_type != "policy_loss" or name is None:
            return None, None
        context = Context(
            seed=self._config.run.seed,
            run_dir=self._run_dir,
            logger=logging.getLogger("slime.estimator"),
            config=self._config,
        )
        options = self._config.component_options.get("estimator", {})
        estimator = self._plugins.build("estimator", name, options, context)
        return estimator, cast(EstimatorSpec, self._plugins.find("estimator", name).spec)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one rollout."""
        metrics: dict[str, float] = self._rank.train(batch)
        return metrics

    def log_probs(self, batch: TrainBatch) -> Any:
        """Per-token log-probs of the batch's responses under the current weights."""
        return self._rank.log_probs(batch)

    def sync_weights(self, engine_urls: list[str], tp_size: int, version: str) -> None:
        """Send the weights to the engines (collective: every rank gathers, rank 0 sends)."""
        from slime.weights.export import drain

        named = self._rank.named_hf_weights()
        if self._rank_index != 0:
            drain(named)
            return
        if self._transport is None:
            self._transport = self._connect(engine_urls, tp_size)
        self._transport.send(named, version=version)

    def _connect(self, engine_urls: list[str], tp_size: int) -> Any:
        from slime.engine.control import EngineControl
        from slime.weights import create_transport

        return create_transport(
            self._config.sync,
            [EngineControl(url, tp_size=tp_size) for url in engine_urls],
            hf_folder=Path(str(self._config.checkpoint.hf_checkpoint)),
            scratch=self._run_dir / "weights",
            on_gpu=self._config.on_gpu,
        )

    def save(self, folder: Path) -> None:
        """Write model, optimizer, scheduler and random states (collective)."""
        self._rank.save(folder)

    def load(self, folder: Path, weights_only: bool) -> None:
        """Read what `save` wrote (collective)."""
        self._rank.load(folder, weights_only=weights_only)

    def export_hf(self, folder: Path) -> None:
        """Write a complete Hugging Face folder (collective; rank 0 writes)."""
        from slime.weights import save_hf
        from slime.weights.export import drain

        named = self._rank.named_hf_weights()
        if self._rank_index == 0:
            save_hf(folder, named, Path(str(self._config.checkpoint.hf_checkpoint)))
        else:
            drain(named)

    def close(self) -> None:
        """Leave the process groups in order."""
        if self._transport is not None:
            self._transport.close()
        if self._rank is not None:
            self._rank.close()


class TrainerGroup:
    """All training ranks, driven as one.  Owned by the driver."""

    def __init__(self, config: RunConfig, run_dir: Path, fingerprint: str, placement: list[dict[str, Any]]) -> None:
        self._config = config
        remote = ray.remote(TrainerActor)
        self._actors = [
            remote.options(**placement[rank]).remote(config, run_dir, rank, fingerprint)
            for rank in range(config.world_size)
        ]
        self._starting: list[Any] = []

    def start(self) -> None:
        """Begin building the model on every rank; `wait_ready` waits for it."""
        timeout = self._config.cluster.startup_timeout_s
        [(addr, port)] = wait_for([self._actors[0].rendezvous.remote()], "starting the trainer", timeout)
        self._starting = [a.setup.remote(addr, port) for a in self._actors]

    def check_starting(self) -> None:
        """Raise what a rank that is being built has failed of, if one has; never blocks."""
        done, _ = ray.wait(self._starting, num_returns=len(self._starting), timeout=0)
        wait_for(done, "building the model on the trainer ranks", self._config.cluster.startup_timeout_s)

    def wait_ready(self, watch: Watch | None = None) -> None:
        """Wait until every rank has its model."""
        wait_for(
            self._starting,
            "building the model on the trainer ranks",
            self._config.cluster.startup_timeout_s,
            watch,
        )

    def _all(self, what: str, timeout_s: float, watch: Watch | None, method: str, *args: Any) -> list[Any]:
        return wait_for([getattr(a, method).remote(*args) for a in self._actors], what, timeout_s, watch)

    def train(self, batch_ref: Any, watch: Watch | None) -> dict[str, float]:
        """Train on one rollout's batch (an object reference, so that it crosses the store once)."""
        metrics: dict[str, float] = self._all(
            "training", self._config.cluster.step_timeout_s, watch, "train", batch_ref
        )[0]
        return metrics

    def sync_weights(self, engine_urls: list[str], tp_size: int, version: str, watch: Watch | None) -> None:
        """Bring the engines to the trainer's weights."""
        timeout = self._config.sync.weight_sync_timeout_s
        self._all(
            f"syncing weights (version {version})",
            timeout,
            watch,
            "sync_weights",
            engine_urls,
            tp_size,
            version,
        )

    def save(self, folder: Path) -> None:
        """Write the trainer's part of a checkpoint."""
        self._all(f"saving {folder}", self._config.cluster.step_timeout_s, None, "save", folder)

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Read the trainer's part of a checkpoint."""
        self._all(f"loading {folder}", self._config.cluster.step_timeout_s, None, "load", folder, weights_only)

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder of the current weights."""
        self._all(f"exporting {folder}", self._config.cluster.step_timeout_s, None, "export_hf", folder)

    def stop(self, *, orderly: bool, timeout_s: float = 15.0) -> None:
        """End the ranks; in order (collective) only when nothing has gone wrong before."""
        if orderly:
            refs = [a.close.remote() for a in self._actors]
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
