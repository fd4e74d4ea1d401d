"""Weights on their way from rank 0 to the engines, over one connection that is made again when engines change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from slime.engine.control import EngineControl, EngineKeys
from slime.plugin.architecture import Architecture
from slime.weights import create_transport
from slime.weights.shards import NamedTensors

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.weights.transports.transport import WeightTransport


class WeightSender:
    """The transport of rank 0, connected to the engines that there are."""

    def __init__(self, config: RunConfig, model: Architecture, run_dir: Path | None) -> None:
        """
        Args:
            config: The run's configuration.
            model: The engines' model.
            run_dir: The run's folder, through which weights may go.
        """
        self._config, self._model, self._run_dir = config, model, run_dir
        self._transport: WeightTransport | None = None
        #: the engines that it sends to, and how often some were started again
        self._connected: tuple[tuple[str, ...], int] = (), 0

    def send(
        self,
        weights: NamedTensors,
        engine_urls: list[str],
        keys: EngineKeys | None,
        *,
        tp_size: int,
        version: str,
        restarts: int,
    ) -> int:
        """Send the weights, and return how many bytes went to each engine; arguments as of `sync_weights`."""
        transport = self._connect(engine_urls, keys, tp_size, restarts)
        sent = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal sent
            for name, tensor in weights:
                sent += tensor.nbytes
                yield name, tensor

        transport.send(counted(), version=version)
        return sent

    def _connect(self, engine_urls: list[str], keys: EngineKeys | None, tp_size: int, restarts: int) -> WeightTransport:
        """The transport; an engine that was started again has lost its connection, so all are connected anew."""
        wanted = tuple(engine_urls), restarts
        if self._transport is not None and wanted == self._connected:
            return self._transport
        config, ep_size = self._config, self._config.sglang.get("ep_size", 1)
        engines = [EngineControl(url, keys, tp_size=tp_size, ep_size=ep_size) for url in engine_urls]
        if self._transport is None:
            assert self._run_dir is not None
            self._transport = create_transport(
                config.sync,
                engines,
                model=self._model,
                hf_folder=Path(str(config.checkpoint.hf_checkpoint)),
                scratch=self._run_dir / "weights",
                on_gpu=config.on_gpu,
                repeated=config.restarts_engines,
            )
        else:
            self._transport.connect(engines)
        self._connected = wanted
        return self._transport

    def close(self) -> None:
        """Disconnect from the engines."""
        if self._transport is not None:
            self._transport.close()
