"""Sending weights from trainer rank 0 to live engines.

distributed: broadcast in a process group shared with the engines (gloo or NCCL). tensor: handles of shared memory (CPU)
or CUDA IPC, for engines on the same machine. disk: a Hugging Face folder that all can read.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.config.weight_options import SyncOptions
from slime.engine.control import EngineControl
from slime.engine.ports import LOOPBACK
from slime.plugin.architecture import Architecture
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.tensor import TensorTransport
from slime.weights.transports.transport import WeightTransport, joined_by_engines
from slime.weights.verify import WeightCheck


def create_transport(
    options: SyncOptions,
    engines: Sequence[EngineControl],
    *,
    model: Architecture,
    hf_folder: Path,
    scratch: Path,
    on_gpu: bool,
    repeated: bool = False,
) -> WeightTransport:
    """The transport of `--update-weight-transport` to these engines, for training rank 0.

    Args:
        options: The `[sync]` section.
        engines: All engines of the run.
        model: The model that is sent.
        hf_folder: Its folder.
        scratch: Folder for the versions of the disk transport, readable by the engines.
        on_gpu: Whether the weights are on a GPU.
        repeated: Whether a failed sync is repeated.
    """
    check = None
    if options.check_weight_update_equal:
        check = WeightCheck(model, {engine.tp_size for engine in engines}, ep_size=engines[0].ep_size)
    common: dict[str, Any] = {"engines": engines, "timeout_s": options.weight_sync_timeout_s, "check": check}
    common |= {
        "joined": joined_by_engines(model),
        "repeated": repeated,
        "keep_kv": options.inflight_kv == "keep",
    }
    bucket_bytes = options.update_weight_buffer_size
    match options.update_weight_transport:
        case "distributed":
            address = own_address([engine.url for engine in engines])
            backend = "nccl" if on_gpu else "gloo"
            return DistributedTransport(**common, backend=backend, address=address, bucket_bytes=bucket_bytes)
        case "tensor":
            return TensorTransport(**common, on_gpu=on_gpu, bucket_bytes=bucket_bytes)
        case "disk":
            return DiskTransport(**common, folder=scratch, source_folder=hf_folder, model=model)


def own_address(urls: Sequence[str]) -> str:
    """This host's address as the engines reach it.

    Loopback if all engines are on this host; otherwise the address from which the first remote engine is reached.
    """
    for url in urls:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((urlsplit(url).hostname, 9))
            address = str(probe.getsockname()[0])
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return LOOPBACK
