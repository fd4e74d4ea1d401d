"""Sending weights from the trainer to live engines: of each pipeline stage, from its first rank.

distributed: broadcasts in process groups shared with the engines (gloo or NCCL), one of each stage. tensor: handles of
shared memory (CPU) or CUDA IPC, of the senders for engines on their machine, or of the ranks beside them for engines on
several nodes. disk: a Hugging Face folder that all can read, or what changed since the one before; all stages write at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.weight_options import SYNC_ANSWER_S, SyncOptions
from slime.engine.control import EngineControl, EngineKeys
from slime.plugin.architecture import Architecture
from slime.weights.quantised import Quantisation, quantisation_of
from slime.weights.shards import GATHERED_BYTES, NamedTensors, drained
from slime.weights.transports.beside import RanksBeside
from slime.weights.transports.delta import DeltaTransport, Receive
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.stages import Turns
from slime.weights.transports.tensor import TensorTransport
from slime.weights.transports.transport import WeightTransport, joined_by_engines
from slime.weights.verify import WeightCheck

if TYPE_CHECKING:
    import torch

    from slime.config import RunConfig


class WeightSender:
    """The connection of a sender to the engines that there are; it is made again when they change.

    Attributes:
        gathered_bytes: Bytes of full tensors to gather at a time.
    """

    def __init__(self, config: RunConfig, model: Architecture, run_dir: Path | None) -> None:
        """
        Args:
            config: The run's configuration.
            model: The engines' model, before it is quantised for them.
            run_dir: The run's folder, through which weights may go.
        """
        self._quantised = quantisation_of(config.sync, model)
        self._config, self._model, self._run_dir = config, model, run_dir
        self.gathered_bytes = min(GATHERED_BYTES, max(1, config.sync.update_weight_buffer_size // 8))
        self._transport: WeightTransport | None = None
        #: of each of several senders
        self._turns: Turns | None = None
        self._beside: RanksBeside | None = None
        #: the engines that it sends to, and how often some were started again
        self._connected: tuple[tuple[str, ...], int] = (), 0

    def ranks_beside(self, beside: Sequence[Sequence[int]], device: torch.device) -> RanksBeside | None:
        """Of all ranks at once, before a sync: the ranks beside engines on several nodes, if there are any.

        Args:
            beside: `beside[engine][its rank]` is the trainer's rank on the same device; empty if one node has all.
            device: Of this rank's weights.
        """
        if beside and self._beside is None:
            self._beside = RanksBeside(beside, device, self._config.sync.weight_sync_timeout_s + SYNC_ANSWER_S)
        return self._beside

    def send(
        self,
        weights: NamedTensors,
        engine_urls: list[str],
        keys: EngineKeys | None,
        *,
        tp_size: int,
        version: str,
        restarts: int,
        receive: Receive | None = None,
    ) -> dict[str, float]:
        """Called on the first rank of a pipeline stage: send the stage's weights.

        They are iterated to their end whatever fails: other ranks take part in gathering them. If there are ranks
        beside the engines, in their `sync`. Arguments and result as of `sync_weights`.
        """
        if self._turns is None and self._config.megatron.get("pipeline_model_parallel_size", 1) > 1:
            self._turns = Turns.of_pipeline()
        with drained(weights), nullcontext() if self._turns is None else self._turns.sync():
            transport = self._transport_to(engine_urls, keys, receive, tp_size=tp_size, restarts=restarts)
            named = weights if self._quantised is None else self._quantised.tensors(weights)
            return transport.send(named, version=version)
        return {}  # `Turns.sync` kept this sender's error from being raised here: the first raises it for all

    def _transport_to(
        self,
        engine_urls: list[str],
        keys: EngineKeys | None,
        receive: Receive | None,
        *,
        tp_size: int,
        restarts: int,
    ) -> WeightTransport:
        config, wanted = self._config, (tuple(engine_urls), restarts)
        if self._transport is None or wanted != self._connected:
            options = config.sglang
            dp_size = options.get("dp_size" if options.get("enable_dp_attention") else "attn_dp_size", 1)
            sizes = {"tp_size": tp_size, "ep_size": options.get("ep_size", 1), "dp_size": dp_size}
            engines = [EngineControl(url, keys, **sizes) for url in engine_urls]
            if self._transport is None:
                assert self._run_dir is not None
                self._transport = create_transport(
                    config.sync,
                    engines,
                    model=self._model,
                    quantised=self._quantised,
                    hf_folder=Path(str(config.checkpoint.hf_checkpoint)),
                    scratch=self._run_dir / "weights",
                    on_gpu=config.on_gpu,
                    repeated=config.restarts_engines,
                    turns=self._turns,
                    beside=self._beside,
                    receive=receive,
                )
            else:  # an engine that was started again has lost its connection
                self._transport.connect(engines)
            self._connected = wanted
        if isinstance(self._transport, DeltaTransport):
            assert receive is not None
            self._transport.receive = receive  # an engine that was started again has another process beside it
        return self._transport

    def close(self) -> None:
        """Disconnect from the engines."""
        if self._transport is not None:
            self._transport.close()
        if self._beside is not None:
            self._beside.close()


def create_transport(
    options: SyncOptions,
    engines: Sequence[EngineControl],
    *,
    model: Architecture,
    hf_folder: Path,
    scratch: Path,
    on_gpu: bool,
    repeated: bool = False,
    quantised: Quantisation | None = None,
    turns: Turns | None = None,
    beside: RanksBeside | None = None,
    receive: Receive | None = None,
) -> WeightTransport:
    """The transport of `--update-weight-transport` to these engines, for a sender.

    Args:
        options: The `[sync]` section.
        engines: All engines of the run.
        model: The model that is sent.
        hf_folder: Its folder.
        scratch: Folder for the versions of the disk transport, readable by the engines.
        on_gpu: Whether the weights are on a GPU.
        repeated: Whether a failed sync is repeated.
        quantised: How the engines hold it, if not as it is; the tensors that are sent are then its.
        turns: If each pipeline stage sends its own tensors, the turns of this stage's sender.
        beside: The ranks beside the engines, if those are on several nodes and memory is shared.
        receive: With --disk-delta, brings the copy of an engine to a version.
    """
    check = None
    if options.check_weight_update_equal:
        make: Callable[..., WeightCheck] = partial(WeightCheck, model) if quantised is None else quantised.check
        check = make({engine.tp_size for engine in engines}, ep_size=engines[0].ep_size, dp_size=engines[0].dp_size)
    model = model if quantised is None else quantised.model
    common: dict[str, Any] = {"engines": engines, "timeout_s": options.weight_sync_timeout_s, "check": check}
    common |= {
        "joined": joined_by_engines(model),
        "repeated": repeated,
        "keep_kv": options.inflight_kv == "keep",
        "models": "all" if model.predicts else "target",
        "turns": turns,
    }
    bucket_bytes = options.update_weight_buffer_size
    match options.update_weight_transport:
        case "tensor":
            return TensorTransport(**common, on_gpu=on_gpu, bucket_bytes=bucket_bytes, beside=beside)
        case "disk":
            common |= {"folder": scratch, "source_folder": hf_folder, "model": model}
            if not options.disk_delta:
                return DiskTransport(**common)
            assert receive is not None
            return DeltaTransport(**common, full_every=options.disk_delta_full_every, receive=receive)
        case _:
            backend = "nccl" if on_gpu else "gloo"
            return DistributedTransport(**common, backend=backend, bucket_bytes=bucket_bytes)
