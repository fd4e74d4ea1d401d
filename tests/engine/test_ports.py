from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slime.engine.ports import ReservedPort, free_port, listening_socket, port_in_use, require_free_port
from slime.errors import ConfigError


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    assert not port_in_use(port)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert port_in_use(port)


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
    assert all(free_port() < max(first_ephemeral, 20_100) for _ in range(50))


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
