"""Addresses: written as the parts of URLs, found for this host, and TCP ports reserved or refused clearly."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from slime.errors import ConfigError

LOOPBACK = "127.0.0.1"

#: free ports are chosen from the part of this range that is below the kernel's own
_RANGE = (20_000, 32_767)
#: and so far below, since SGLang's ranks with DP attention meet on ports up to 239 above their server's
_ROOM = 256
_ATTEMPTS = 64


def bracketed(host: str) -> str:
    """A host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int) -> str:
    """`HOST:PORT`."""
    return f"{bracketed(host)}:{port}"


def http_url(host: str, port: int) -> str:
    """The address of a server."""
    return f"http://{host_port(host, port)}"


def own_address(hosts: Iterable[str]) -> str:
    """This host's address as these hosts reach it.

    Loopback if all of them are this host; otherwise the address from which the first other one is reached.
    """
    for host in hosts:
        [(family, *_, address), *_] = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(address)
            own = str(probe.getsockname()[0])
        if not ipaddress.ip_address(own).is_loopback:
            return own
    return LOOPBACK


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
        low, high = _RANGE[0], min(_RANGE[1], _first_ephemeral_port() - 1) - _ROOM
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


def on_interface_of(host: str) -> dict[str, str]:
    """Environment variables with which gloo and NCCL use the interface that has this host's address `host`.

    Without them they use the address of the machine's host name: the network's where loopback would do, and loopback
    where other nodes must reach them. What the user has set for a network stays.
    """
    if host == LOOPBACK:
        return _chosen("lo")
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == host for one in addresses):
            return {name: value for name, value in _chosen(interface).items() if name not in os.environ}
    return {}


def _chosen(interface: str) -> dict[str, str]:
    # To NCCL a name without `=` is the beginning of names: eth1 would also be eth10.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def use_interface_of(host: str) -> None:
    """Set `on_interface_of` for this process. gloo and NCCL read it nowhere else."""
    os.environ.update(on_interface_of(host))


def require_free_port(port: int, option: str) -> None:
    """Raise `ConfigError` if a server cannot listen on `port`, the value of `option`: it is taken or not allowed."""
    place = host_port(LOOPBACK, port)
    try:
        with socket.socket() as probe:
            # What servers set too: without it a port in TIME_WAIT would count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            problem = (
                f"another process already listens on {place}. Choose another port, omit the option to get a free one,"
                f" or end that process (`ss -ltnp 'sport = :{port}'` names it)."
            )
        else:
            problem = f"cannot listen on {place} ({error}). Choose a port from 1024 to 65535."
        raise ConfigError(f"{option} {port}: {problem}") from None
