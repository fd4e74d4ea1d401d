"""The control plane of one engine, and the keys that it asks for: health, pausing, weights.

Synchronous; may be used from several threads. The router does not offer these calls: they go to each engine directly.
"""

from __future__ import annotations

import http.client
import json
import secrets
import urllib.parse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from slime.errors import DeadlineError, EngineError, EngineRefusedError

_EXCERPT = 500
#: the models of an engine that an update is for: the one it serves, or also those with which it drafts, each of which
#: takes the tensors that it knows by name
UpdatedModels = Literal["target", "all"]


@dataclass(frozen=True)
class EngineKeys:
    """The keys of one run's engines and router: made for it, and kept in the memory of its processes.

    They are never written to a file or a log, and never stand on a command line, which every user of a machine can
    read. Child processes get them through an in-memory file. Printing them shows neither.

    Attributes:
        api: For requests to the model. Components get it as `Context.engine_key`.
        admin: For everything that changes an engine or the router: weights, pausing, aborting, profiling, the list of
            engines. Only slime's own processes have it.
    """

    api: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def random(cls) -> Self:
        """New keys that nobody can guess."""
        return cls(secrets.token_hex(32), secrets.token_hex(32))


def bearer(key: str | None) -> dict[str, str]:
    """The header that presents `key`; none without a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def call(
    method: Literal["GET", "POST", "DELETE"],
    server: str,
    path: str,
    body: Any | None = None,
    *,
    timeout_s: float,
    key: str | None = None,
    success: int = 200,
) -> dict[str, Any]:
    """One HTTP call to `server` (http://HOST:PORT), with the server's `key` if it has one.

    Returns:
        The decoded answer; an empty dictionary if it is not a JSON object.

    Raises:
        DeadlineError: If there is no answer within `timeout_s`.
        EngineRefusedError: For a status of 4xx, or an answer with `"success": false`.
        EngineError: For any other status but `success`, and a server that cannot be reached.
    """
    request = f"{method} {server}{path}"
    payload = None if body is None else json.dumps(body)
    try:
        with closing(http.client.HTTPConnection(urllib.parse.urlsplit(server).netloc, timeout=timeout_s)) as connection:
            connection.request(method, path, payload, {"Content-Type": "application/json", **bearer(key)})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
    except TimeoutError:
        raise DeadlineError(f"{request}: no answer after {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{request}: {type(error).__name__}: {error}") from error
    try:
        answer = json.loads(text)
    except ValueError:  # some calls answer in words
        answer = None
    if not isinstance(answer, dict):
        answer = {}
    if response.status != success or answer.get("success") is False:
        refused = 400 <= response.status < 500 or answer.get("success") is False
        raise (EngineRefusedError if refused else EngineError)(
            f"{request}: status {response.status}, answer: {text[:_EXCERPT]}"
        )
    return answer


class EngineControl:
    """Client of one engine. Every failure is an `EngineError` or `DeadlineError` that names the call."""

    def __init__(
        self,
        url: str,
        keys: EngineKeys | None = None,
        *,
        tp_size: int = 1,
        ep_size: int = 1,
        dp_size: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        """Does not connect yet.

        Args:
            url: The engine's address, http://HOST:PORT.
            keys: The engine's keys; None if it has none.
            tp_size: Tensor-parallel ranks of the engine.
            ep_size: Groups among which these ranks divide the experts of a mixture.
            dp_size: Groups of ranks that each have all of attention and the embedding (DP attention).
            timeout_s: Time limit of calls that do not state one.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise EngineError(f"engine URL {url!r}: expected http://HOST:PORT")
        self.url = url.rstrip("/")
        self.tp_size = tp_size
        self.ep_size = ep_size
        self.dp_size = dp_size
        self._keys = keys
        self._timeout_s = timeout_s

    # --- state ---

    def health(self, *, timeout_s: float | None = None) -> None:
        """Return if the server answers; raise otherwise."""
        self._call("GET", "/health", timeout_s=timeout_s)

    def server_info(self) -> dict[str, Any]:
        """The server's resolved arguments and the scheduler's live state.

        Its `weight_version` is the one at the start; `weight_version()` gives the current one.
        """
        return self._call("GET", "/server_info")

    def capacity(self) -> int:
        """How many requests the engine runs at once; more wait in its queue."""
        states = self.server_info().get("internal_states") or []
        sizes = [state.get("effective_max_running_requests_per_dp") for state in states]
        if not sizes or not all(isinstance(size, int) for size in sizes):
            raise EngineError(f"{self.url}/server_info does not say how many requests the engine runs at once: {sizes}")
        return sum(sizes)

    def weight_version(self) -> str:
        """Version of the current weights."""
        return str(self._call("GET", "/model_info")["weight_version"])

    def weights_checksum(self) -> dict[str, Any]:
        """Checksums of the current weights for each rank and tensor, as SGLang reports them."""
        return self._call("POST", "/weights_checker", {"action": "checksum"})

    # --- requests in flight ---

    def pause(self, mode: Literal["retract", "in_place", "abort"] = "retract") -> None:
        """Stop generating; new requests wait.

        Args:
            mode: "retract": running requests go back to the queue and continue at `resume`, under the weights of that
                moment; meanwhile the cache can be flushed. "in_place": the same, but they keep the KV cache that they
                have, so the cache cannot be flushed. "abort": they are answered with the tokens they have.
        """
        self._call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Generate again after `pause`."""
        self._call("POST", "/continue_generation", {})

    def flush_cache(self) -> None:
        """Drop cached prefixes. Refused (`EngineError`) while requests run and generation is not paused."""
        self._call("POST", "/flush_cache")

    # --- memory: what is released is empty until it is restored; the engine must not be asked for responses then ---

    def release_memory(self, kinds: Sequence[str], *, timeout_s: float) -> None:
        """Give up memory of these kinds: "kv_cache", "weights", "cuda_graph". Weights are garbage until they are sent.

        SGLang ends if a request runs then. So running requests, whose callers must have gone, are ended first.

        Args:
            kinds: None of them may be released already.
            timeout_s: How long the engine may take to become idle.
        """
        self._call("POST", "/abort_request", {"rid": "", "abort_all": True})
        # This waits until the engine is idle; without it, an abort may still be on its way.
        self._call("POST", f"/flush_cache?timeout={timeout_s:g}", timeout_s=timeout_s + self._timeout_s)
        self._call("POST", "/release_memory_occupation", {"tags": list(kinds)})

    def restore_memory(self, kinds: Sequence[str]) -> None:
        """Take memory of these kinds again, all of which must be released."""
        self._call("POST", "/resume_memory_occupation", {"tags": list(kinds)})

    # --- weights ---

    def begin_weight_update(self, models: UpdatedModels = "target") -> None:
        """Open the session that tensor and distributed updates need, for these models of the engine."""
        self._call("POST", "/begin_weight_update", {"selector": models})

    def end_weight_update(self) -> None:
        """Close the session; the engine recomputes what it derives from weights."""
        self._call("POST", "/end_weight_update", {})

    def update_weights(
        self,
        source: Literal["tensor", "disk", "distributed"],
        *,
        version: str,
        flush: bool = False,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> None:
        """Load weights. An update from disk needs no session.

        Args:
            source: Where the weights come from; the fields of the request depend on it.
                "tensor": `serialized_named_tensors`, one base64 string for each rank of the engine, and `selector`, the
                `UpdatedModels` of the session.
                "disk": `model_path`, a Hugging Face folder that the engine's host can read.
                "distributed": `names`, `dtypes` (torch's names without "torch.") and `shapes` of the tensors that rank
                0 of the group `group_name` broadcasts, in this order; and `selector`.
            version: Version of the weights after the update.
            flush: Whether to drop cached prefixes too, as `flush_cache` does.
            timeout_s: Limit of the call.
            fields: The fields of the request.
        """
        body = {**fields, "weight_version": version, "flush_cache": flush}
        self._call("POST", f"/update_weights_from_{source}", body, timeout_s=timeout_s)

    def init_weights_update_group(self, *, timeout_s: float | None = None, **fields: Any) -> None:
        """Join the process group of distributed updates; returns when all members have joined.

        Args:
            timeout_s: Limit of the call.
            fields: `master_address` and `master_port` of the group's store; `rank_offset`, the engine's first rank in
                the group, which its other ranks follow; `world_size`; `group_name`; `backend`, "gloo" or "nccl".
        """
        self._call("POST", "/init_weights_update_group", fields, timeout_s=timeout_s)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the process group."""
        self._call("POST", "/destroy_weights_update_group", {"group_name": group_name})

    # --- profiles ---

    def start_profile(self, folder: Path, activities: Sequence[str], *, prefix: str, name: str) -> None:
        """Begin to profile, until `stop_profile`.

        Args:
            folder: Where each rank of the engine will write PREFIX-NAME-TP-0.trace.json.gz.
            activities: What is recorded: "CPU", "GPU".
            prefix: The beginning of the files' names.
            name: What follows in them.
        """
        body = {"output_dir": str(folder), "activities": list(activities), "with_stack": False, "record_shapes": True}
        self._call("POST", "/start_profile", {**body, "profile_prefix": prefix, "profile_id": name})

    def stop_profile(self) -> None:
        """Write what was recorded, which takes seconds."""
        self._call("POST", "/stop_profile")

    def _call(
        self, method: Literal["GET", "POST"], path: str, body: Any | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        # What this class posts changes the engine or reads its weights; SGLang wants the admin key for all of it.
        keys = self._keys
        key = None if keys is None else keys.admin if method == "POST" else keys.api
        limit = self._timeout_s if timeout_s is None else timeout_s
        return call(method, self.url, path, body, timeout_s=limit, key=key)
