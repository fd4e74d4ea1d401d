from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from slime.engine.ports import (
    ReservedPort,
    free_port,
    http_url,
    listening_socket,
    on_interface_of,
    own_address,
    require_free_port,
)
from slime.errors import ConfigError


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    require_free_port(port, "--router-port")
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()


def test_a_reserved_port_can_be_listened_on_but_not_reserved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = ReservedPort()
    monkeypatch.setattr("slime.engine.ports.random.sample", lambda *_: [reserved.number] * 3)
    assert free_port() != reserved.number
    with listening_socket("127.0.0.1", reserved.number):
        assert free_port() != reserved.number
    reserved.release()
    assert free_port() == reserved.number


def test_free_ports_are_outside_the_ephemeral_range() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    further = 239  # SGLang with DP attention
    assert all(free_port() + further < max(first_ephemeral, 20_100) for _ in range(50))


def test_a_port_in_use_is_refused_with_the_name_of_its_option() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--router-port {port}: another process already listens") as caught:
            require_free_port(port, "--router-port")
    assert caught.value.exit_code == 2


def test_an_invalid_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--router-port 70000.*1024 to 65535"):
        require_free_port(70000, "--router-port")


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert http_url("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert urlsplit(http_url("fd77::1", 30000))[:2] == ("http", "[fd77::1]:30000")
    assert urlsplit(http_url("fd77::1", 30000)).hostname == "fd77::1"


def test_servers_on_this_host_reach_it_over_loopback() -> None:
    assert own_address(["127.0.0.1", "localhost"]) == "127.0.0.1"


def test_gloo_and_nccl_use_the_interface_of_the_address_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7"], "eth1": ["fe80::1%eth1", "fd77::7"]}
    found = {name: [SimpleNamespace(address=one) for one in of] for name, of in addresses.items()}
    monkeypatch.setattr("slime.engine.ports.psutil.net_if_addrs", lambda: found)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    expected = {"10.0.0.7": "eth0", "fd77::7": "eth1", "127.0.0.1": "lo"}
    for address, interface in expected.items():
        assert on_interface_of(address) == {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    assert on_interface_of("10.0.0.8") == {}  # an address that only a router knows
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert on_interface_of("10.0.0.7") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert on_interface_of("127.0.0.1")["NCCL_SOCKET_IFNAME"] == "=lo"  # no message may leave this machine
