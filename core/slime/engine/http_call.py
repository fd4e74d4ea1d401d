"""One synchronous HTTP call to a server of this room, with errors that name it."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any, Literal

from slime.errors import DeadlineError, EngineError

_EXCERPT = 500


def call(
    method: Literal["GET", "POST"], server: str, path: str, body: Any | None = None, *, timeout_s: float
) -> dict[str, Any]:
    """The decoded answer of `server` (http://HOST:PORT); an empty dictionary where it is not a JSON object.

    One connection, closed afterwards.  Raises `DeadlineError` when no answer comes within `timeout_s`, and
    `EngineError` for any status but 200, an answer that says `"success": false`, and a server that is not there.
    """
    where = f"{method} {server}{path}"
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server).netloc, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except TimeoutError:
        raise DeadlineError(f"{where}: no answer after {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    answer = _decoded(text)
    if response.status != 200 or answer.get("success") is False:
        raise EngineError(f"{where}: status {response.status}, answer: {text[:_EXCERPT]}")
    return answer


def _decoded(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:  # some calls answer in words
        return {}
    return answer if isinstance(answer, dict) else {}
