"""`slime cluster check`: each thing that is wrong with a node is a line, and a real cluster is looked at."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.nodes import TEMPORARY, Cluster, cluster
from tests.support.tiny_models import make_tiny_model

from slime.config import read_config, resolve
from slime_launch import cluster_command, node_settings, node_state
from slime_launch.ask_nodes import inputs
from slime_launch.cluster_command import Checked, off
from slime_launch.cluster_problems import (
    CheckedNode,
    compare,
    of_folder,
    of_links,
    of_many,
    of_memory,
    of_ports,
    settings_of,
)
from slime_launch.link_speed import Link, rounds
from slime_launch.node_facts import DRIVER, Inspector, NodeFacts, Question, fingerprint
from slime_launch.node_state import Ports

OUTPUT = Path("/shared/outputs")
GOOD = NodeFacts(
    canary="seen",
    contents={"/shared/model": "m", "/shared/prompts.jsonl": "p"},
    versions={"slime-rl": "1.0", "torch": "2.9", "my-reward": "0.1", DRIVER: "535.1"},
    memory=64_000_000_000,
    shared_memory=8_000_000_000,
    temporary=9_000_000_000,
    temporary_folder="/tmp",
    open_files=65536,
    proxies=(),
    no_proxy="",
    infiniband=(),
    ports=Ports((32768, 60999), (22, 6379)),
    left_behind=(),
    device_memory=(),
    token=True,
    ray_settings={},
)


def lines(clock: float = 0.0, **changes: Any) -> list[str]:
    """What is said of a cluster whose second node differs in something."""
    nodes = {"one": CheckedNode("10.0.0.1", GOOD, 0.0), "two": CheckedNode("10.0.0.2", replace(GOOD, **changes), clock)}
    return [str(problem) for problem in compare(nodes, GOOD, "seen", OUTPUT)]


def test_a_cluster_that_is_right_has_no_problems() -> None:
    assert lines() == []
    assert lines(clock=1.9) == []
    assert lines(versions={name: version for name, version in GOOD.versions.items() if name != DRIVER}) == []
    assert lines(proxies=("http_proxy",), no_proxy="10.0.0.1, 10.0.0.2") == []
    assert lines(proxies=("http_proxy",), no_proxy=".lab,10.0.0.0/8") == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"canary": ""}, "it does not see what this machine writes to /shared/outputs. Put --output-dir into"),
        ({"canary": "old"}, "it does not see what this machine writes"),
        ({"versions": GOOD.versions | {"NCCL": "2.27.5"}}, "NCCL 2.27.5 there, none here. Install the same versions"),
        ({"versions": GOOD.versions | {DRIVER: "550.54"}}, "NVIDIA's driver 550.54 there, 535.1 here."),
        (
            {"left_behind": ["process 7 of me (sglang::scheduler)"]},
            "process 7 of me (sglang::scheduler) is not of this Ray cluster. End it if an earlier job has left it",
        ),
        (
            {"device_memory": ["process 8 (python) holds 512 MiB of a GPU"]},
            "process 8 (python) holds 512 MiB of a GPU.",
        ),
        ({"contents": GOOD.contents | {"/shared/model": ""}}, "/shared/model is missing or cannot be read there."),
        ({"contents": GOOD.contents | {"/shared/prompts.jsonl": "q"}}, "/shared/prompts.jsonl has another content"),
        ({"versions": GOOD.versions | {"torch": "2.8"}}, "torch 2.8 there, 2.9 here. Install the same versions"),
        ({"token": False}, "Ray was started there without a token: whoever reaches its ports can run programs as you."),
        ({"versions": {"slime-rl": "1.0", "torch": "2.9"}}, "my-reward none there, 0.1 here."),
        ({"versions": GOOD.versions | {"other": "3"}}, "other 3 there, none here."),
        ({"clock": -61.0}, "its clock is 61 s behind this machine's. Set the clocks by NTP"),
        ({"clock": 2.6}, "its clock is 3 s ahead of this machine's."),
        ({"temporary": 0}, "/tmp has 0 GB free, of 1 GB at least. Free some, or set RAY_TMPDIR"),
        ({"open_files": 1024}, "a process may open 1024 files, of 8192 at least."),
        ({"proxies": ("http_proxy",)}, "http_proxy would take calls to nodes (10.0.0.1, 10.0.0.2) to a proxy."),
        ({"proxies": ("all_proxy",), "no_proxy": "10.0.0.1"}, "all_proxy would take calls to nodes (10.0.0.2)"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_node(changes: dict[str, Any], said: str) -> None:
    (line,) = lines(**changes)
    assert line.startswith(f"two: {said}")


def test_memory_is_compared_with_what_the_run_takes() -> None:
    small = replace(GOOD, memory=3_000_000_000, shared_memory=1_500_000_000)
    nodes = {"one": CheckedNode("10.0.0.1", GOOD, 0.0), "two": CheckedNode("10.0.0.2", small, 0.0)}
    assert [*of_memory(nodes, 2.9e9, 4e8)] == [*of_memory(nodes, 0, 0)] == []
    (line,) = map(str, of_memory(nodes, 4e9, 0))
    assert line.startswith("two: 3 GB of its memory can be had, and the run's processes take 4 GB of a node's. Free it")
    (line,) = map(str, of_memory(nodes, 0, 1e9))
    assert line.startswith("two: /dev/shm has 1.5 GB free, of 2 GB at least. Free it, or enlarge it: `docker run")


def test_what_this_machine_lacks_is_said_once() -> None:
    here = replace(GOOD, contents={"/shared/model": ""})
    nodes = {name: CheckedNode(name, here, 0.0) for name in ("one", "two")}
    (problem,) = compare(nodes, here, "seen", OUTPUT)
    assert str(problem) == "this machine: /shared/model is missing or cannot be read. Correct the run file"


def test_ports_that_a_run_would_not_get_are_named() -> None:
    def said(ports: Ports, wanted: dict[int, str]) -> list[str]:
        nodes = {"two": CheckedNode("10.0.0.2", replace(GOOD, ports=ports), 0.0)}
        return [str(problem) for problem in of_ports(nodes, wanted)]

    assert said(GOOD.ports, {30000: "--engine-port"}) == []
    (line,) = said(Ports((32768, 60999), (30000,)), {30000: "--engine-port", 30001: "--engine-port"})
    assert line == "two: --engine-port 30000: something listens there. Choose another, or drop the option"
    (line,) = said(Ports((32768, 60999), (61000,)), {61000: "--engine-port"})
    assert line == "two: --engine-port 61000: something listens there. Choose another, or drop the option"
    for first in (32767, 40000):  # of two engines
        (line,) = said(GOOD.ports, {first: "--engine-port", first + 1: "--engine-port"})
        found = f"two: --engine-port {max(first, 32768)} is among those that the kernel takes for connections"
        assert line == f"{found}, 32768-60999. Choose one from 20000 on and below 32768, or drop the option"
    for ports, free in ((Ports((9000, 65000), (22,)), 0), (Ports((20010, 60999), (20001, 20002)), 8)):
        (line,) = said(ports, {})
        assert line.startswith(f"two: {free} ports from 20000 on are free below {ports.kernels[0]}, from where")


def test_the_map_of_ports_has_spans() -> None:
    ports = Ports((32768, 60999), (22, 6379, 20000, 20001, 20002, 31000))
    assert str(ports) == (
        "20000-32767 of runs, 12764 free; 32768-60999 of the kernel; taken: 22, 6379, 20000-20002, 31000"
    )
    assert str(Ports((9000, 65000), ())).startswith("none of runs; 9000-65000 of the kernel; taken: none")


def test_pairs_of_nodes_that_do_not_talk_or_talk_slowly_are_named() -> None:
    fast = [Link((one, "d"), 1e-4, 1e9) for one in ("a", "b", "c")]
    assert [*of_links(fast)] == []
    cut = Link(("a", "b"), reason="Connection refused")
    lines = [str(problem) for problem in of_links([*fast, cut, Link(("b", "c"), 1e-4, 0.1e9)])]
    assert lines[0].startswith("a and b: processes of them do not reach each other: Connection refused. Open all ports")
    assert lines[1].startswith("b and c: 0.1 GB/s between them, and 1 GB/s between others. Look at their cables")
    assert len(lines) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_each_pair_meets_once_and_no_node_is_in_two_at_a_time(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    found = list(rounds(names))
    met = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(met) == len({*met}) == count * (count - 1) // 2
    for pairs in found:
        seated = [name for pair in pairs for name in pair]
        assert len(seated) == len({*seated})


def test_rays_settings_are_looked_at_above_64_nodes() -> None:
    assert [*of_many({}, 64)] == []
    (line,) = map(str, of_many({"num_workers_soft_limit": "16"}, 65))
    assert line.startswith("cluster: 65 nodes, and Ray has its defaults for worker_register_timeout_seconds, ")
    assert "num_workers_soft_limit" not in line and "RAY_worker_register_timeout_seconds=120" in line


def test_settings_of_rays_control_service_are_asked_of_the_head() -> None:
    def node(**settings: str) -> CheckedNode:
        return CheckedNode("10.0.0.1", replace(GOOD, ray_settings=settings), 0.0)

    gcs = {"gcs_rpc_server_connect_timeout_s": "60"}
    both = {"num_workers_soft_limit": "16"}
    assert settings_of({"one": node(**gcs, **both), "two": node(**both)}, "one") == {**gcs, **both}
    assert settings_of({"one": node(**both), "two": node(**gcs)}, "one") == {}


def test_a_folder_too_small_or_too_slow_for_checkpoints_is_named() -> None:
    right: dict[str, Any] = {"free": 3e11, "written": 1e9, "checkpoint": 10**11, "deadline_s": 3600.0}

    def said(**changes: float) -> list[str]:
        return [str(problem) for problem in of_folder(OUTPUT, **(right | changes))]

    assert said() == []
    (line,) = said(free=10**11)
    assert line.startswith("shared folder: /shared/outputs has 100 GB free, and two checkpoints take up to 200 GB.")
    (line,) = said(written=1e7)
    assert line.startswith("shared folder: /shared/outputs takes 0.01 GB/s, so that a checkpoint of up to 100 GB takes")
    assert "--step-timeout-s 3600" in line
    # A run that saves nothing, and a folder whose speed could not be measured.
    assert said(checkpoint=0, free=0, written=1) == [] and said(written=0) == []


def test_a_full_disk_is_one_finding_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    problems: list[Any] = []
    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(Path, "open", full)
    with cluster_command._canary(tmp_path, problems) as found:
        assert found == ("", "")
    assert cluster_command._speed(tmp_path, problems) == 0.0
    assert len(problems) == 2
    assert all(str(one).startswith("shared folder: ") and str(tmp_path) in str(one) for one in problems)
    node = CheckedNode("10.0.0.1", replace(GOOD, canary=""), 0.0)
    assert compare({"one": node}, GOOD, "", OUTPUT) == []
    assert not any("disk-write" in line for line in Checked({"one": node}, problems).lines())


def test_processes_of_another_ray_are_found() -> None:
    # A stand-in: a process whose arguments are those of an engine that another session's run has started.
    session = "session_2026-01-02_03-04-05_000006_789"
    words = ["-c", "import time; time.sleep(60)", session, "-m", "slime.engine.launch"]
    shown = " ".join([sys.executable, *words])[:60].strip()
    with subprocess.Popen([sys.executable, *words]) as left:

        def found(of_session: str) -> list[str]:
            return [one for one in node_state.left_behind(of_session) if f"process {left.pid} " in one]

        try:
            process = psutil.Process(left.pid)
            deadline = time.monotonic() + 30
            while not found(f"{session}2"):
                assert time.monotonic() < deadline, (process, process.cmdline())
            assert found(f"{session}2") == [f"process {left.pid} of {process.username()} ({shown})"]
            # One that this session has started, or that uses it, is not left behind.
            assert found(session) == []
            # Other processes of the machine come and go.
            assert not any(f"process {left.pid} " in one for one in node_state.left_behind(f"{session}2", [left.pid]))
        finally:
            left.kill()


def test_what_the_driver_says_of_gpus_is_read(stand_in: Any) -> None:
    answers = {
        "--query-gpu=driver_version": (0, "550.54.15\n550.54.15"),
        "--query-compute-apps": (0, "4711, /usr/bin/python3, 40536"),
    }
    stand_in("nvidia-smi", answers)
    assert node_state.driver() == "550.54.15"
    assert node_state.device_memory_held() == ["process 4711 (/usr/bin/python3) holds 40536 MiB of a GPU"]
    stand_in("nvidia-smi", {"": (9, "NVIDIA-SMI has failed because it couldn't communicate with the driver")})
    assert node_state.driver() == "" and node_state.device_memory_held() == []


def test_what_was_measured_are_words_of_slime_plan() -> None:
    nodes = {"one": CheckedNode("10.0.0.1", GOOD, 0.0), "two": CheckedNode("10.0.0.2", GOOD, 0.0)}
    links = [Link(("one", "two"), 2e-3, 1.25e9)]
    lines = [*Checked(nodes, [], links, 5e8).lines()]
    assert lines[0].startswith("ports of one, two: 20000-32767 of runs, 12768 free")
    assert lines[-2] == "for `slime plan`: --network 1x1.2GB --rate-network-share 1 --rate-disk-write 5e+08"
    assert lines[-1] == "2 nodes answered: no problems"
    # NCCL uses InfiniBand where there is any.
    nodes["two"] = CheckedNode("10.0.0.2", replace(GOOD, infiniband=("mlx5_0",)), 0.0)
    assert [*Checked(nodes, [], links, 5e8).lines()][-2] == "for `slime plan`: --rate-disk-write 5e+08"


def test_a_slow_answer_explains_a_late_clock() -> None:
    # The answer took 3 s: the node looked at its clock at some moment of them.
    assert off(3.0, 2.5) == 0.0
    assert off(3.0, 10.0) == 7.0
    assert off(3.0, -4.0) == -4.0


def test_the_content_of_a_folder_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        (folder / "in").mkdir(parents=True)
        (folder / "in" / "file").write_bytes(b"x" * 3_000_000)
    assert fingerprint(first) == fingerprint(second) != ""
    (second / "in" / "file").write_bytes(b"x" * 2_999_999 + b"y")
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first, whole=False) == fingerprint(second, whole=False) != ""
    (second / "in" / "file").rename(second / "in" / "other")
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first, whole=False) != fingerprint(second, whole=False)
    assert fingerprint(tmp_path / "none") == ""


def test_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:k3y@proxy:1")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("RAY_num_workers_soft_limit", "16")
    (tmp_path / "canary").write_text("sings")
    with socket.create_server(("127.0.0.1", 0)) as high, socket.socket() as low:
        port = node_settings.free_port("127.0.0.1", 20000)
        low.bind(("127.0.0.1", port))
        low.listen()
        facts = Inspector().facts(Question(str(tmp_path / "canary"), [str(tmp_path)], "no session"))
        assert port in facts.ports.taken and high.getsockname()[1] not in facts.ports.taken
    assert facts.ray_settings["num_workers_soft_limit"] == "16"
    assert facts.canary == "sings" and facts.contents[str(tmp_path)]
    assert {"slime-rl", "torch", "ray", "Python"} <= {*facts.versions}
    assert facts.memory > 0 and facts.shared_memory > 0 and facts.open_files != 0
    # The address of a proxy may have a key.
    assert "http_proxy" in facts.proxies and "k3y" not in str(facts)


def test_inputs_are_what_a_run_reads(run_file: Path) -> None:
    flags = ["--eval-prompt-data", "math", "/data/eval.jsonl", "--eval-interval", "5", "--ref-load", "/data/ref"]
    config = resolve(read_config([str(run_file), *flags, "--device", "cpu", "--use-kl-loss"]))
    assert set(inputs(config)) == {"/data/model", "/data/prompts.jsonl", "/data/eval.jsonl", "/data/ref"}


# --- on a real cluster ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with cluster([2, 2, 2]) as made:
        yield made


def check(on: Cluster, folder: Path, *words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return slime(on, folder, "cluster", "check", *words, flags=("--", *flags))


def slime(on: Cluster, folder: Path, *words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    node = on.nodes[0]
    program = str(Path(sys.executable).with_name("slime"))
    return subprocess.run(
        node.command(program, *words, "--ray-address", on.address, *flags, folder=folder),
        env={**os.environ, **node.own_variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.row("L9")
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_of_three_nodes_is_checked(three: Cluster, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    run = tmp_path / "run.toml"
    prompts = TEMPORARY / "prompts.jsonl"
    text = f"""\
[checkpoint]
hf-checkpoint = "model"
[data]
prompt-data = "{tmp_path}/prompts.jsonl"
[rollout]
num-rollout = 2
rollout-batch-size = 4
[reward]
name = "exact_match"
[estimator]
name = "grpo"
[run]
run-name = "one"
"""
    run.write_text(text)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "q", "label": "a"}\n')
    right = check(three, tmp_path, str(run), "--nodes", "3", "--timeout-s", "240")
    assert right.returncode == 0, right.stdout + right.stderr
    *shown, last = right.stdout.splitlines()
    assert last == "3 nodes answered: no problems"
    assert shown[0].startswith(f"ports of {three.nodes[0].name} (") and "6379" in shown[0]
    plan = next(line for line in shown if line.startswith("for `slime plan`: "))
    assert "--network 1x" in plan and "--rate-disk-write" in plan
    assert not (tmp_path / "outputs").exists()

    # Folders that each node has for itself, little shared memory, and fewer nodes and devices than asked for.
    run.write_text(text.replace(f"{tmp_path}/prompts.jsonl", str(prompts)) + f'output-dir = "{TEMPORARY}/outputs"\n')
    for number, content in ((0, "first"), (1, "other")):
        three.nodes[number].run("sh", "-c", f"echo {content} > {prompts}")
    three.nodes[1].run("mount", "-o", "remount,size=200m", "/dev/shm")
    # Besides: a process that an earlier job has left, a wall between two nodes, and a stated port that is taken.
    three.nodes[2].run("bash", "-c", "(exec -a sglang::scheduler sleep 600) >/dev/null 2>&1 &")
    three.nodes[2].run("ip", "route", "add", "blackhole", f"{three.nodes[1].address}/32")
    words = (str(run), "--nodes", "4", "--timeout-s", "240", "--json")
    wrong = check(three, tmp_path, *words, flags=("--actor-num-gpus-per-node", "7", "--engine-port", "6379"))
    three.nodes[2].run("ip", "route", "del", "blackhole", f"{three.nodes[1].address}/32")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    told = json.loads(wrong.stdout)
    names = [f"{node.name} ({node.address})" for node in three.nodes]
    assert set(told["nodes"]) == set(names)
    found = {(one["node"], one["found"]) for one in told["problems"]}
    unseen = f"it does not see what this machine writes to {TEMPORARY}/outputs"
    assert {
        (names[1], unseen),
        (names[2], unseen),
        (names[1], f"{prompts} has another content than here"),
        (names[2], f"{prompts} is missing or cannot be read there"),
        ("cluster", f"3 of 4 nodes are in it: {', '.join(names)}"),
    } <= found
    assert any(node == names[1] and text.startswith("/dev/shm has 0.") for node, text in found)
    assert any(node == "cluster" and "needs 7 CPUs" in text for node, text in found)
    assert any(node == names[2] and "(sglang::scheduler 600) is not of this Ray" in text for node, text in found)
    links = {tuple(link["nodes"]): link for link in told["links"]}
    assert {pair for pair, link in links.items() if link["broadcast"] is None} == {(names[1], names[2])}
    assert len(links) == 3 and all(link["broadcast"] or link["reason"] for link in links.values())
    cut = links[names[1], names[2]]["reason"]
    assert (f"{names[1]} and {names[2]}", f"processes of them do not reach each other: {cut}") in found
    assert any(node == names[0] and text.startswith("--engine-port 6379: ") for node, text in found)
    assert len(found) == 10

    # The run itself looks, too, and has started nothing by then.
    asked = ("--actor-num-gpus-per-node", "6", "--rollout-batch-size", "6", "--n-samples-per-prompt", "2")
    asked += ("--rollout-max-response-len", "8", "--output-dir", str(TEMPORARY / "outputs"))
    refused = slime(three, tmp_path, "train", str(run), "--prompt-data", f"{tmp_path}/prompts.jsonl", *asked)
    told_of = " ".join(refused.stderr.split())
    assert refused.returncode == 2, refused.stdout + refused.stderr
    for name in names[1:]:
        assert f"{name}: it does not see what this machine writes to {TEMPORARY}/outputs/one." in told_of
