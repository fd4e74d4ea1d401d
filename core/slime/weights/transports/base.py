"""The contracts: what a transport does, and what it needs of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

PauseMode = Literal["retract", "abort", "in_place"]


class EngineControl(Protocol):
    """The control plane of one engine; `slime.engine.control.EngineControl` is one.

    Every method waits no longer than a deadline of its own and raises when the engine fails or refuses.
    """

    @property
    def url(self) -> str:
        """Address, which names the engine in messages."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of the engine."""

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating.  retract: requests in flight wait and are prefilled anew on resume."""

    def resume(self) -> None:
        """Go on generating."""

    def flush_cache(self) -> None:
        """Forget cached prefixes, which the old weights computed."""

    def begin_weight_update(self) -> None:
        """Open the session that updates from memory must run in."""

    def end_weight_update(self) -> None:
        """Close it."""

    def update_weights_from_tensor(
        self, serialized: list[str], *, weight_version: str, flush_cache: bool, timeout_s: float
    ) -> None:
        """Load pickled tensor handles, one entry per tensor-parallel rank."""

    def update_weights_from_disk(self, path: str, *, weight_version: str, flush_cache: bool, timeout_s: float) -> None:
        """Load a Hugging Face folder."""

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        *,
        timeout_s: float,
    ) -> None:
        """Join the process group of the store at an address, the engine's ranks starting at `rank_offset`."""

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        *,
        weight_version: str,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Receive one broadcast a tensor from rank 0 of the group and load them."""

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the group."""

    def weights_checksum(self) -> dict[str, Any]:
        """The answer of `/weights_checker` for the action "checksum"."""


class WeightTransport(Protocol):
    """Carries the trainer's weights to engines.  Used on trainer rank 0 only."""

    def connect(self, engines: Sequence[EngineControl]) -> None:
        """Send to these engines from now on.  Talks to nobody yet."""

    def send(self, named: Iterator[tuple[str, Tensor]], *, version: str) -> None:
        """Bring every engine to these weights and this weight version.

        The whole sequence: pause all, update, check (where asked for), flush caches, resume.  `named` is always
        iterated to its end, so that ranks that take part in gathering it never wait.  Raises `WeightSyncError`
        naming engine and phase; engines that can be resumed are.
        """

    def close(self) -> None:
        """Part from the engines.  May be called twice, and after a failure."""
