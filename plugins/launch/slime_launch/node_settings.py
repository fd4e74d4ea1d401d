"""Run on each node before Ray: prints, for the shell, its address and the interfaces and devices that libraries use."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m slime_launch.node_settings --head [HOST:PORT] [OPTIONS]`; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--head", default="", help="of Ray; empty on the first node")
    parser.add_argument("--names", default="", help="of all nodes")
    parser.add_argument("--port", type=int, default=20000, help="from where on the first node looks for a free one")
    parser.add_argument("--interface")
    stated = parser.parse_args(argv)
    addresses = addresses_by_interface()
    try:
        address, interface = choose(addresses, stated.interface, stated.head, stated.names.split())
        port = None if stated.head else free_port(address, stated.port)
    except LookupError as error:
        print(f"slime launch: {error.args[0]}", file=sys.stderr)
        return 1
    found = {"SLIME_NODE_ADDRESS": address}
    if port is not None:
        found["SLIME_HEAD_PORT"] = str(port)
    # `=`: this one, and not others whose names begin with it.
    libraries = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if devices := active_infiniband(INFINIBAND):
        libraries["NCCL_IB_HCA"] = f"={','.join(devices)}"
    # What the site or --setup has set is known better there.
    named = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if stated.interface else ()
    found |= {name: value for name, value in libraries.items() if name in named or not os.environ.get(name)}
    if proxies := [name for name in PROXIES if variable(name)]:
        past = past_proxies(address, stated.head, stated.names.split())
        found |= {"no_proxy": past, "NO_PROXY": past}
        print(f"slime launch: calls to nodes go past {', '.join(proxies)}: no_proxy is {past}", file=sys.stderr)
    print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in found.items()))
    return 0


def addresses_by_interface() -> dict[str, list[str]]:
    """The IPv4 addresses of each interface that is up, loopback left out."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        name: [one.address for one in found if one.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
        if name in up and name != "lo"
    }


def choose(
    addresses: Mapping[str, Sequence[str]], interface: str | None, head: str, names: Sequence[str]
) -> tuple[str, str]:
    """The address of this node that others reach, and the interface that has it.

    On the first node it is the one its name stands for, unless that is loopback, as on Debian: then the one from which
    another node is reached. On the others, the one from which the first node is reached.

    Raises:
        LookupError: There is none.
    """
    owner = {address: name for name, found in addresses.items() for address in found}
    if interface is not None:
        if not addresses.get(interface):
            raise LookupError(f"--interface {interface} has no IPv4 address here; there are {_listed(addresses)}")
        return addresses[interface][0], interface
    # This node's own name may be among them, and leads to loopback or to the address of its name.
    own = () if head else _addresses_of_name()
    hosts = [head.rpartition(":")[0]] if head else names
    reached = (_source_of_route_to(host) for host in hosts)
    address = next((one for one in chain(own, reached) if one in owner), next(iter(owner), None))
    if address is None:
        raise LookupError(f"no network interface but loopback has an IPv4 address here: {_listed(addresses)}")
    return address, owner[address]


def past_proxies(address: str, head: str, names: Sequence[str]) -> str:
    """The value of `no_proxy` with which calls between nodes use no proxy.

    It keeps what `no_proxy` and `NO_PROXY` already exempt, and adds the nodes: the names, the addresses that they stand
    for, and the network of this node.

    Args:
        address: Of this node.
        head: HOST:PORT of the first node; empty on that node itself.
        names: Of all nodes.
    """
    stated = [one.strip() for name in ("no_proxy", "NO_PROXY") for one in os.environ.get(name, "").split(",")]
    if "*" in stated:
        return "*"  # exempts every host, but urllib and others understand it only if it stands alone
    known = [address, str(_network_of(address)), head.rpartition(":")[0], *names]
    for name in names:
        with contextlib.suppress(OSError):
            # Without the interface of a link-local address (`fe80::1%eth0`), which `no_proxy` cannot have.
            known += [str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, None)]
    return ",".join(dict.fromkeys(one for one in [*stated, *known] if one))


def _network_of(address: str) -> ipaddress.IPv4Network:
    """The network that an address of this node belongs to: the other nodes are most likely in it too."""
    import psutil

    masks = (one.netmask for found in psutil.net_if_addrs().values() for one in found if one.address == address)
    return ipaddress.IPv4Interface(f"{address}/{next(masks, None) or 32}").network


def variable(name: str) -> str:
    """A variable that some set in small letters and others in capitals; empty if it is not set."""
    return os.environ.get(name) or os.environ.get(name.upper()) or ""


def _listed(addresses: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(found) or 'no address'})" for name, found in addresses.items()) or "none"


def _source_of_route_to(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _addresses_of_name() -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except OSError:
        return []


def family_of(address: str) -> socket.AddressFamily:
    """That of IPv6 or IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def free_port(address: str, start: int) -> int:
    """The first free port from `start` on. Raises `LookupError` if the next thousand are taken."""
    for port in range(start, start + 1000):
        with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise LookupError(f"no port from {start} to {start + 999} is free on {address}")


def active_infiniband(root: Path) -> list[str]:
    """InfiniBand devices with a port that is up. RDMA over Ethernet is left out: which of its ports to use depends on
    the network, and NCCL chooses."""
    return [
        device.name
        for device in (sorted(root.iterdir()) if root.is_dir() else ())
        if any(_is_up(port) for port in sorted(device.glob("ports/*")))
    ]


def _is_up(port: Path) -> bool:
    try:
        return (
            "ACTIVE" in (port / "state").read_text(encoding="utf-8")
            and (port / "link_layer").read_text(encoding="utf-8").strip() == "InfiniBand"
        )
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
