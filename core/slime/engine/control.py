"""The control plane of one engine: health, pausing, aborting, weights.

Synchronous, one connection per call, so it may be used from several threads.  The router does not offer
these calls: they go to each engine directly.  Every failure is an `EngineError` that names the call; an
answer that does not come in time is a `DeadlineError`.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Any, Literal

from slime.engine.http_call import call
from slime.errors import EngineError

PauseMode = Literal["retract", "abort", "in_place"]


class EngineControl:
    """Client for the engine at `url`.  `tp_size` is the number of its ranks; `timeout_s` bounds each call."""

    def __init__(self, url: str, *, tp_size: int = 1, timeout_s: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise EngineError(f"engine URL {url!r}: expected http://HOST:PORT")
        self.url = url.rstrip("/")
        self.tp_size = tp_size
        self.timeout_s = timeout_s

    # --- state ---

    def health(self, *, timeout_s: float | None = None) -> None:
        """Return when the server answers; raise otherwise."""
        self._call("GET", "/health", timeout_s=timeout_s)

    def model_info(self) -> dict[str, Any]:
        """What the server says of its model, the current weight version among it."""
        return self._call("GET", "/model_info")

    def server_info(self) -> dict[str, Any]:
        """The server's resolved arguments and the scheduler's live state.  (Its `weight_version` is the one
        from the start: ask `weight_version`.)"""
        return self._call("GET", "/server_info")

    def capacity(self) -> int:
        """How many requests it runs at once; more wait in its queue."""
        states = self.server_info().get("internal_states") or []
        sizes = [state.get("effective_max_running_requests_per_dp") for state in states]
        if not sizes or not all(isinstance(size, int) for size in sizes):
            raise EngineError(f"{self.url}/server_info does not say how many requests the engine runs at once: {sizes}")
        return sum(sizes)

    def weight_version(self) -> str:
        """Version of the weights that generate now."""
        return str(self.model_info()["weight_version"])

    def weights_checksum(self) -> dict[str, Any]:
        """Checksums of the weights the engine holds, per rank and tensor, as SGLang reports them."""
        return self._call("POST", "/weights_checker", {"action": "checksum"})

    # --- requests in flight ---

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating; new requests wait.

        "retract": running requests go back to the queue, to be continued under the weights that are there
        at `resume`; the cache can be flushed meanwhile.  "abort": they are answered with what they
        have.  "in_place": they are frozen with their cache, which then belongs to old weights.
        """
        self._call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Go on generating after `pause`."""
        self._call("POST", "/continue_generation", {})

    def flush_cache(self) -> None:
        """Forget cached prefixes.  Refused (EngineError) while requests run and generation is not paused."""
        self._call("POST", "/flush_cache")

    # --- weights ---

    def begin_weight_update(self) -> None:
        """Open the session that tensor and distributed updates need."""
        self._call("POST", "/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close the session: the engine derives what it derives from weights."""
        self._call("POST", "/end_weight_update", {})

    def update_weights_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        load_format: str | None = None,
        weight_version: str,
        flush_cache: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        """Load named tensors handed over in memory.  `serialized`: one base64 string per rank of the engine."""
        if len(serialized) != self.tp_size:
            raise EngineError(
                f"{self.url}/update_weights_from_tensor: got {len(serialized)} serialised parts, "
                f"expected one for each of the engine's {self.tp_size} ranks"
            )
        body = {
            "serialized_named_tensors": list(serialized),
            "load_format": load_format,
            "weight_version": weight_version,
            "flush_cache": flush_cache,
        }
        self._call("POST", "/update_weights_from_tensor", body, timeout_s=timeout_s)

    def update_weights_from_disk(
        self, path: str, *, weight_version: str, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Load a Hugging Face folder that the engine's host can read.  Needs no session."""
        body = {"model_path": str(path), "weight_version": weight_version, "flush_cache": flush_cache}
        self._call("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Join the process group that `update_weights_from_distributed` receives from.  Returns when all
        `world_size` members have joined; the engine's ranks are `rank_offset`, `rank_offset + 1`, …"""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._call("POST", "/init_weights_update_group", body, timeout_s=timeout_s)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        *,
        weight_version: str,
        flush_cache: bool = True,
        load_format: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Receive the named tensors, in this order, by broadcast from rank 0 of the group.  `dtypes` are
        torch's names without "torch."."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "weight_version": weight_version,
            "flush_cache": flush_cache,
            "load_format": load_format,
        }
        self._call("POST", "/update_weights_from_distributed", body, timeout_s=timeout_s)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the process group."""
        self._call("POST", "/destroy_weights_update_group", {"group_name": group_name})

    # --- transport ---

    def _call(
        self, method: Literal["GET", "POST"], path: str, body: Any | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        return call(method, self.url, path, body, timeout_s=self.timeout_s if timeout_s is None else timeout_s)
