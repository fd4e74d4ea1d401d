"""Messages between the rollout process and its rollout workers, and groups in few bytes."""

from __future__ import annotations

import asyncio
import copy
import pickle
import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from slime.types import Group, Sample


class Progress(NamedTuple):
    """How far a worker is with its part of a batch."""

    #: samples that are generated and scored
    done: int
    #: when requests were inside the engines, since the last message
    engine_spans: list[tuple[float, float]]
    #: busy seconds of the rewards
    reward_s: float


_LENGTH = struct.Struct("<Q")
#: list fields of a sample with an entry for each token -> the type of an array of them
_TOKEN_FIELDS = {"tokens": "i", "rollout_log_probs": "d", "loss_mask": "b"}


def packed(*message: Any) -> bytes:
    """A message, with its length in front."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


async def receive(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """The next message; None at the end."""
    try:
        [length] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: tuple[Any, ...] = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


def pack_group(group: Group) -> bytes:
    """The group with its lists of tokens as arrays: a long response has tens of thousands of numbers."""
    samples = [_replaced(sample, _as_array) for sample in group.samples]
    return pickle.dumps(Group(group.index, samples, group.age, group.uses), protocol=pickle.HIGHEST_PROTOCOL)


def unpack_group(content: bytes) -> Group:
    """The group that `pack_group` was given."""
    group: Group = pickle.loads(content)
    return Group(group.index, unpack_samples(group.samples), group.age, group.uses)


def pack_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Samples for a message; see `pack_group`."""
    return [_replaced(sample, _as_array) for sample in samples]


def unpack_samples(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that `pack_samples` was given."""
    return [_replaced(sample, _as_list) for sample in samples]


def _replaced(sample: Sample, convert: Any) -> Sample:
    other = copy.copy(sample)
    for name, code in _TOKEN_FIELDS.items():
        if (values := getattr(sample, name)) is not None:
            setattr(other, name, convert(values, code))
    return other


def _as_array(values: Any, code: str) -> Any:
    """An array of a list's numbers; what is not one is left as it is, for the contracts to judge."""
    if type(values) is not list:
        return values
    try:
        return array(code, values)
    except (TypeError, OverflowError):
        return values


def _as_list(values: Any, _: str) -> Any:
    return values.tolist() if isinstance(values, array) else values
