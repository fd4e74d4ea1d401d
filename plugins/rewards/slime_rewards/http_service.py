"""Posts JSON to a service over HTTP, with retries."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
from typing import Any

import aiohttp
from yarl import URL

from slime.errors import ConfigError
from slime_rewards.options import ServiceOptions

#: longest wait between two attempts
_MOST_BACKOFF_S = 30.0
_SHOWN = 200


class HttpService:
    """Posts JSON and reads the JSON response.

    A request without a connection, without a response within `request_timeout_s`, or with status 408, 429 or 5xx is
    retried after `backoff_s` seconds, doubled each time and increased by a random share of up to one half, or after
    `Retry-After` if that is longer, but after 30 seconds at most. Other statuses and responses that are not JSON are
    not retried.
    """

    def __init__(self, url: str, options: ServiceOptions, key: str | None = None) -> None:
        """Initialize.

        Args:
            url: The address to post to.
            options: Retries, deadline, and the name of the token's variable.
            key: Sent as `Authorization: Bearer KEY`, unless the options name a token.

        Raises:
            ConfigError: The environment lacks the variable that `token_env` names, or the URL has credentials too.
        """
        address = URL(url)
        self._address = address.with_user(None)
        #: the address for messages, without credentials
        self.url = str(self._address.with_query(None))
        self._options = options
        if address.user is not None and options.token_env is not None:
            raise ConfigError(f"url {self.url} has user and password, and token_env is set too; set only one of them")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if address.user is not None:
            login = base64.b64encode(f"{address.user}:{address.password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {login}"
        if options.token_env is not None:
            token = os.environ.get(options.token_env)
            if not token:
                raise ConfigError(f"token_env is {options.token_env!r}, and the environment has no such variable")
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    async def post(self, content: Any) -> Any:
        """Post `content` and return the decoded response.

        Raises:
            RuntimeError: All attempts failed, or the response cannot be used. The message describes the last one.
        """
        body = json.dumps(content).encode("utf-8", "replace")
        problem = retry_after = ""
        for attempt in range(self._options.retries + 1):
            if attempt:
                await asyncio.sleep(self._pause(attempt, retry_after))
            try:
                status, text, retry_after = await self._once(body)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem, retry_after = self._no_answer(error), ""
                continue
            problem = f"answered {status} {' '.join(text.split())[:_SHOWN]}".strip()
            if status == 200:
                return self._read(text)
            if 300 <= status < 400:
                raise RuntimeError(
                    f"{self.url} answered {status}, a redirect, which is not followed: set url to its target"
                )
            if status not in (408, 429) and status < 500:
                raise RuntimeError(f"{self.url} {problem}; such a response is not retried")
        times = self._options.retries + 1
        raise RuntimeError(f"{self.url} {problem}, {times} time{'s' if times > 1 else ''}")

    async def _once(self, body: bytes) -> tuple[int, str, str]:
        """(status, content, `Retry-After`)."""
        if self._session is None:
            # A session belongs to an event loop, which is not running yet when the reward is built.
            self._session = aiohttp.ClientSession(
                headers={"Content-Type": "application/json", **self._headers},
                timeout=aiohttp.ClientTimeout(total=self._options.request_timeout_s),
                connector=aiohttp.TCPConnector(limit=0),
            )
        # A redirected POST would become a GET without its content.
        async with self._session.post(self._address, data=body, allow_redirects=False) as response:
            text = await response.text(errors="replace")
            return response.status, text, response.headers.get("Retry-After", "")

    def _pause(self, attempt: int, retry_after: str) -> float:
        pause: float = self._options.backoff_s * 2 ** (attempt - 1) * random.uniform(1.0, 1.5)
        if retry_after.isdecimal():
            pause = max(pause, float(retry_after))
        return min(pause, _MOST_BACKOFF_S)

    def _no_answer(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"did not answer within {self._options.request_timeout_s:g} s"
        return f"could not be reached ({type(error).__name__}: {error})"

    def _read(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise RuntimeError(f"{self.url} answered with invalid JSON: {text[:_SHOWN]!r}") from None
