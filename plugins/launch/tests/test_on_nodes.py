"""What runs on the nodes: which address and interface, which InfiniBand devices, who is missing."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from slime_launch import node_settings
from slime_launch.node_settings import active_infiniband, addresses_by_interface, choose, free_port, main
from slime_launch.wait_for_nodes import wait_for

TWO = {"eth0": ["10.1.0.5"], "ib0": ["10.2.0.5"], "eth1": []}


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)


def test_the_first_node_takes_the_address_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "10.2.0.5")
    assert choose(TWO, None, "", []) == ("10.2.0.5", "ib0")


def test_a_name_that_stands_for_loopback_or_another_machine_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.1.1", "192.0.2.1")
    assert choose(TWO, None, "", []) == ("10.1.0.5", "eth0")


def test_the_others_take_the_address_from_which_they_reach_the_first() -> None:
    own = addresses_by_interface()
    if not own or not any(own.values()):
        pytest.skip("this machine has no network interface but loopback")
    address, interface = next((found[0], name) for name, found in own.items() if found)
    assert choose({"other0": ["203.0.113.9"], **own}, None, f"{address}:20000", []) == (address, interface)


def test_an_interface_may_be_named() -> None:
    assert choose(TWO, "ib0", "", []) == ("10.2.0.5", "ib0")
    with pytest.raises(LookupError, match=r"--interface eth1 has no IPv4 address here; there are eth0 \(10.1.0.5\)"):
        choose(TWO, "eth1", "", [])


def test_a_node_without_a_network_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LookupError, match="but loopback"):
        choose({}, None, "", [])
    assert main(["--interface", "none0"]) == 1
    assert "--interface none0 has no IPv4 address here" in capsys.readouterr().err


def test_the_first_node_without_a_name_takes_the_address_from_which_it_reaches_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = {"node-0": "127.0.0.1", "node-1": "10.2.0.5"}
    named(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(node_settings, "_source_of_route_to", routes.__getitem__)
    assert choose(TWO, None, "", ["node-0", "node-1"]) == ("10.2.0.5", "ib0")


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        assert port < free_port("127.0.0.1", port) < port + 1000
    assert 20000 <= free_port("::1", 20000) < 21000


def test_what_the_site_has_set_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(node_settings, "addresses_by_interface", lambda: {"lo": ["127.0.0.1"]})
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "export GLOO_SOCKET_IFNAME=lo\n" in out and "NCCL_SOCKET_IFNAME" not in out
    assert "export SLIME_HEAD_PORT=" in out
    # What the command says is meant.
    assert main(["--interface", "lo", "--head", "127.0.0.1:1"]) == 0
    out = capsys.readouterr().out
    assert "export NCCL_SOCKET_IFNAME==lo\n" in out.replace("'", "") and "SLIME_HEAD_PORT" not in out


def test_calls_to_nodes_go_past_proxies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(node_settings, "addresses_by_interface", lambda: {"lo": ["127.0.0.1"]})
    for name in (*node_settings.PROXIES, "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    found = {"node-1": ["10.2.0.1", "fd00::1"], "node-2": ["10.3.0.2", "fe80::2%eth0"]}

    def resolve(name: str, *_: object) -> list[Any]:
        if name not in found:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0)) for address in found[name]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    words = ["--interface", "lo", "--head", "10.2.0.1:6379", "--names", "node-1 node-2 node-3"]
    assert main(words) == 0
    assert "no_proxy" not in capsys.readouterr().out
    monkeypatch.setenv("HTTP_PROXY", "http://me:k3y@proxy:1")
    monkeypatch.setenv("no_proxy", ".lab, 10.2.0.1")
    monkeypatch.setenv("NO_PROXY", ".site,.lab")
    assert main(words) == 0
    said = capsys.readouterr()
    past = ".lab,10.2.0.1,.site,127.0.0.1,127.0.0.0/8,node-1,node-2,node-3,fd00::1,10.3.0.2,fe80::2"
    assert f"export no_proxy={past}\nexport NO_PROXY={past}\n" in said.out
    assert said.err == f"slime launch: calls to nodes go past http_proxy: no_proxy is {past}\n"
    # It exempts every host, and counts only if nothing else is in the variable.
    monkeypatch.setenv("NO_PROXY", "*")
    assert main(words) == 0
    assert "export no_proxy='*'\nexport NO_PROXY='*'\n" in capsys.readouterr().out


def test_infiniband_devices_that_are_up_are_found(tmp_path: Path) -> None:
    for device, state, layer in (
        ("mlx5_0", "4: ACTIVE", "InfiniBand"),
        ("mlx5_1", "1: DOWN", "InfiniBand"),
        ("mlx5_2", "4: ACTIVE", "Ethernet"),
        ("mlx5_3", "4: ACTIVE", "InfiniBand"),
    ):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
    (tmp_path / "mlx5_4" / "ports" / "1").mkdir(parents=True)
    assert active_infiniband(tmp_path) == ["mlx5_0", "mlx5_3"]
    assert active_infiniband(tmp_path / "none") == []


@pytest.mark.slow
def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    seen = iter([set(), {"a"}, {"a", "b"}])
    assert wait_for(["a", "b"], lambda: next(seen), 60, stop) == []
    assert wait_for(["a", "b", "c"], lambda: {"b"}, 0, stop) == ["a", "c"]
    # Whoever stops the job does not wait for nodes that do not come.
    stop.touch()
    assert wait_for(["a", "b"], lambda: {"b"}, 600, stop) == ["a"]
