"""What a plan assumes of speeds. Each is printed with the plan, and a flag changes it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from slime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of what a maker states, and rates of what no maker states."""

    matrix: float = field(
        default=0.6, metadata={"help": "share of the peak FLOP/s that large matrix products reach (TransformerEngine)"}
    )
    memory: float = field(default=0.7, metadata={"help": "share of a device's memory bandwidth"})
    link_share: float = field(default=0.7, metadata={"help": "share of the links between the devices of a node"})
    network_share: float = field(default=0.9, metadata={"help": "share of the adapters between nodes"})
    host_link: float = field(default=40e9, metadata={"help": "bytes/s between a device and its host's memory"})
    host_adam: float = field(
        default=200e9, metadata={"help": "bytes/s of a node's memory that an optimizer on the host reaches"}
    )
    decode_overhead: float = field(
        default=0.004, metadata={"help": "seconds of a decoding step that are neither memory nor arithmetic"}
    )
    speculation: float = field(
        default=1.8, metadata={"help": "tokens that a decoding step yields where engines speculate"}
    )
    all_reduce: float = field(default=12e-6, metadata={"help": "seconds of a small all-reduce within a node"})
    tensor_call: float = field(default=60e-6, metadata={"help": "seconds of the calls for one tensor in a weight sync"})
    disk_write: float = field(default=2e9, metadata={"help": "bytes/s into the shared folder, for one writer"})
    disk_read: float = field(default=10e9, metadata={"help": "bytes/s out of it, for all readers together"})
    delta_share: float = field(default=0.02, metadata={"help": "share of the numbers that a step changes in bfloat16"})
    delta_pack: float = field(
        default=1.5e9, metadata={"help": "bytes/s of weights that a host compares and packs for a delta"}
    )
    delta_apply: float = field(default=2.5e9, metadata={"help": "bytes/s of weights to which a host applies a delta"})
    local_read: float = field(default=5e9, metadata={"help": "bytes/s at which an engine loads its node's copy"})
    mean_response: float = field(
        default=0.5, metadata={"help": "mean length of responses, as a share of the longest that is allowed"}
    )
    reserved: float = field(
        default=3 * 2**30, metadata={"help": "bytes of a device for its context, libraries and buffers of NCCL"}
    )


#: flag -> name of the rate
FLAGS = {f"--rate-{one.name.replace('_', '-')}": one.name for one in fields(Rates)}

#: our own measurements of a step on one H100 with PyTorch's layers: hidden size -> share of the peak, with what is
#: computed again counted (docs/measurements.md)
MEASURED_TORCH = ((896, 0.123), (3584, 0.378))


def with_rate(rates: Rates, flag: str, text: str) -> Rates:
    """The rates with one changed by a flag. Raises `ConfigError` if it is no number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag} {text}: expected a number above 0 (now {getattr(rates, FLAGS[flag]):g})")
    return replace(rates, **{FLAGS[flag]: value})


def matrix_share(rates: Rates, layers: str, hidden: int) -> float:
    """The share of the peak FLOP/s that a rank's matrix products reach, before communication."""
    if layers == "te":
        return rates.matrix
    (small, low), (large, high) = MEASURED_TORCH
    between = min(1.0, max(0.0, (hidden - small) / (large - small)))
    return low + between * (high - low)
