"""The transport a run's options ask for."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from slime.config.options import SyncOptions
from slime.weights.architectures import read_hf_config
from slime.weights.transports.base import EngineControl, WeightTransport
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.tensor import TensorTransport
from slime.weights.verify import WeightCheck


def create_transport(
    options: SyncOptions,
    engines: Sequence[EngineControl],
    *,
    hf_folder: Path,
    scratch: Path,
    on_gpu: bool,
) -> WeightTransport:
    """The transport of `--update-weight-transport`, for these engines.  For training rank 0; the other ranks
    `drain` the tensors it sends.

    hf_folder: the model folder weights belong to.  scratch: folder for the disk transport's versions, readable
    by the engines.
    """
    check = None
    if options.check_weight_update_equal:
        check = WeightCheck(read_hf_config(hf_folder), {engine.tp_size for engine in engines})
    timeout_s = options.weight_sync_timeout_s
    transport: WeightTransport
    match options.update_weight_transport:
        case "distributed":
            transport = DistributedTransport(
                backend="nccl" if on_gpu else "gloo",
                address=own_address([engine.url for engine in engines]),
                bucket_bytes=options.update_weight_buffer_size,
                timeout_s=timeout_s,
                check=check,
            )
        case "tensor":
            transport = TensorTransport(
                on_gpu=on_gpu,
                bucket_bytes=options.update_weight_buffer_size,
                timeout_s=timeout_s,
                check=check,
            )
        case "disk":
            transport = DiskTransport(folder=scratch, source_folder=hf_folder, timeout_s=timeout_s, check=check)
    transport.connect(engines)
    return transport


def own_address(urls: Sequence[str]) -> str:
    """This host's address as the engines reach it: loopback while all of them are here, else the one from which
    the first remote engine is reached."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        if not _is_loopback(host):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
                probe.connect((host, 9))
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
