"""Reserving free TCP ports, and refusing taken ones clearly."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

from slime.errors import ConfigError

LOOPBACK = "127.0.0.1"

#: free ports are chosen from the part of this range that is below the kernel's own
_RANGE = (20_000, 32_767)
_ATTEMPTS = 64


class ReservedPort:
    """A port on `host` for a server that will listen on it in a few seconds, reserved while this object lives.

    Its socket is bound but does not listen. No other run on the machine can reserve the port, and a server that reuses
    addresses, as they all do, can listen on it. The port lies below the range from which the kernel picks ports for
    outgoing connections: a run makes hundreds of those while its engines start, and one would sometimes take it.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._bind(host)
        self.number = int(self._socket.getsockname()[1])
        # Only now: with this set before, several sockets could be bound to the port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def _bind(self, host: str) -> None:
        low, high = _RANGE[0], min(_RANGE[1], _first_ephemeral_port() - 1)
        candidates = random.sample(range(low, high + 1), _ATTEMPTS) if high - low >= _ATTEMPTS else []
        for port in (*candidates, 0):
            try:
                self._socket.bind((host, port))
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not port:
                    self._socket.close()
                    raise

    def release(self) -> None:
        """Let others reserve the port, which nothing listens on."""
        self._socket.close()


def free_port(host: str = LOOPBACK) -> int:
    """A port on which nothing listens and that nobody has reserved, for a server that listens within a second."""
    port = ReservedPort(host)
    port.release()
    return port.number


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """A TCP socket that listens on `host` alone, for servers that would otherwise listen on every interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)


def loopback_only(host: str) -> dict[str, str]:
    """Environment variables with which gloo and NCCL stay on the loopback interface, if `host` is there.

    Without them they listen on the address of the machine's host name.
    """
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if host == LOOPBACK else {}


def stay_on_loopback(host: str) -> None:
    """Set `loopback_only` for this process. gloo and NCCL read it nowhere else."""
    os.environ.update(loopback_only(host))


def port_in_use(port: int, host: str = LOOPBACK) -> bool:
    """Whether binding `port` on `host` fails because something listens there."""
    with socket.socket() as probe:
        # What servers set too: without it a port in TIME_WAIT would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def require_free_port(port: int, option: str, host: str = LOOPBACK) -> None:
    """Raise `ConfigError` if `port`, the value of `option`, is taken or not allowed."""
    try:
        taken = port_in_use(port, host)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{option} {port}: cannot listen on {host}:{port} ({error}). Choose a port from 1024 to 65535."
        ) from None
    if taken:
        raise ConfigError(
            f"{option} {port}: another process already listens on {host}:{port}. Choose another port, omit "
            f"the option to get a free one, or end that process (`ss -ltnp 'sport = :{port}'` names it)."
        )
