"""Accepts the connections of the sessions' server, and does not let clients without a session use it up.

aiohttp waits without limit for the headers of a first request, and asyncio's own accept loop writes a traceback for
each of a thousand attempts when the process has no free file descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable

from aiohttp.http_exceptions import HttpProcessingError

#: seconds within which a client must have sent the headers of its request
HEADERS_S = 10.0
#: connections that have not sent them; beyond this number the oldest is closed
MOST_SILENT = 256
_BACKLOG = 1024
#: after a failure to accept: seconds until the next attempt, and between two messages in the log
_PAUSE_S = 1.0
_BETWEEN_MESSAGES_S = 60.0
#: the machine or the process has run out of something
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger("slime.endpoint")


class _WithoutBadRequests(logging.Filter):
    """Drops what aiohttp logs, with a traceback, about clients that do not speak HTTP or have gone."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not isinstance(error, HttpProcessingError | ConnectionError)


def http_logger() -> logging.Logger:
    """The logger for aiohttp's server: whoever can reach the port could fill the log otherwise."""
    quiet = logging.getLogger("slime.endpoint.http")
    if not quiet.filters:
        quiet.addFilter(_WithoutBadRequests())
    return quiet


class Listener:
    """A listening socket on a free port."""

    def __init__(self, host: str, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Listen and accept connections until `close`.

        Args:
            host: Address to listen on.
            protocol: Makes the protocol of a connection.

        Raises:
            OSError: If it cannot listen.
        """
        self._protocol = protocol
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        #: connections whose headers have not arrived, oldest first, with the timer that closes each
        self._silent: dict[asyncio.BaseProtocol, tuple[asyncio.BaseTransport, asyncio.TimerHandle]] = {}
        self._message_at = -_BETWEEN_MESSAGES_S
        self._accepting = asyncio.ensure_future(self._accept())

    def heard(self, protocol: asyncio.BaseProtocol) -> None:
        """The headers of this connection's request have arrived."""
        _, timer = self._silent.pop(protocol, (None, None))
        if timer is not None:
            timer.cancel()

    async def close(self) -> None:
        """Stop listening."""
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        self._socket.close()
        for protocol in list(self._silent):
            self._drop(protocol)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except ConnectionError:  # the client has gone
                continue
            except OSError as error:
                # The connection, or the cause, is still there: trying at once would keep the event loop busy.
                self._report(error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._silent) >= MOST_SILENT:
                self._drop(next(iter(self._silent)))
            try:
                transport, protocol = await loop.connect_accepted_socket(self._protocol, connection)
            except OSError:  # the client has gone
                connection.close()
                continue
            self._silent[protocol] = transport, loop.call_later(HEADERS_S, self._drop, protocol)

    def _drop(self, protocol: asyncio.BaseProtocol) -> None:
        transport, timer = self._silent.pop(protocol)
        timer.cancel()
        transport.close()

    def _report(self, error: OSError) -> None:
        if time.monotonic() - self._message_at < _BETWEEN_MESSAGES_S:
            return
        self._message_at = time.monotonic()
        remedy = (
            " Fewer agents at once (--rollout-concurrency) or a higher limit of open files (`ulimit -n`) helps."
            if error.errno in _SHORTAGES
            else ""
        )
        logger.warning(
            "the endpoint of the agents cannot accept connections now: %s. It keeps trying.%s", error.strerror, remedy
        )
