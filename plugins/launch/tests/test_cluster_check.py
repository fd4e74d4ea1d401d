"""`slime cluster check`: each thing that is wrong with a node is a line, and a real cluster is looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes import TEMPORARY, Cluster, cluster
from tests.support.tiny_models import make_tiny_model

from slime.config import read_config, resolve
from slime_launch.cluster_command import CheckedNode, compare, inputs, off
from slime_launch.node_facts import NodeFacts, fingerprint, node_facts

OUTPUT = Path("/shared/outputs")
GOOD = NodeFacts(
    canary="seen",
    contents={"/shared/model": "m", "/shared/prompts.jsonl": "p"},
    versions={"slime-rl": "1.0", "torch": "2.9", "my-reward": "0.1"},
    shared_memory=8_000_000_000,
    temporary=9_000_000_000,
    temporary_folder="/tmp",
    open_files=65536,
    proxies=(),
    no_proxy="",
)


def lines(clock: float = 0.0, **changes: Any) -> list[str]:
    """What is said of a cluster whose second node differs in something."""
    nodes = {"one": CheckedNode("10.0.0.1", GOOD, 0.0), "two": CheckedNode("10.0.0.2", replace(GOOD, **changes), clock)}
    return [str(problem) for problem in compare(nodes, GOOD, "seen", OUTPUT)]


def test_a_cluster_that_is_right_has_no_problems() -> None:
    assert lines() == []
    assert lines(clock=1.9) == []
    assert lines(proxies=("http_proxy",), no_proxy="10.0.0.1, 10.0.0.2") == []
    assert lines(proxies=("http_proxy",), no_proxy=".lab,10.0.0.0/8") == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"canary": ""}, "it does not see what this machine writes to /shared/outputs. Put --output-dir into"),
        ({"canary": "old"}, "it does not see what this machine writes"),
        ({"contents": GOOD.contents | {"/shared/model": ""}}, "/shared/model is missing or cannot be read there."),
        ({"contents": GOOD.contents | {"/shared/prompts.jsonl": "q"}}, "/shared/prompts.jsonl has another content"),
        ({"versions": GOOD.versions | {"torch": "2.8"}}, "torch 2.8 there, 2.9 here. Install the same versions"),
        ({"versions": {"slime-rl": "1.0", "torch": "2.9"}}, "my-reward none there, 0.1 here."),
        ({"versions": GOOD.versions | {"other": "3"}}, "other 3 there, none here."),
        ({"clock": -61.0}, "its clock is 61 s behind this machine's. Set the clocks by NTP"),
        ({"clock": 2.6}, "its clock is 3 s ahead of this machine's."),
        ({"shared_memory": 67_000_000}, "/dev/shm has 0.067 GB free, of 1 GB at least."),
        ({"temporary": 0}, "/tmp has 0 GB free, of 1 GB at least. Free some, or set RAY_TMPDIR"),
        ({"open_files": 1024}, "a process may open 1024 files, of 8192 at least."),
        ({"proxies": ("http_proxy",)}, "http_proxy would take calls to nodes (10.0.0.1, 10.0.0.2) to a proxy."),
        ({"proxies": ("all_proxy",), "no_proxy": "10.0.0.1"}, "all_proxy would take calls to nodes (10.0.0.2)"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_node(changes: dict[str, Any], said: str) -> None:
    (line,) = lines(**changes)
    assert line.startswith(f"two: {said}")


def test_what_this_machine_lacks_is_said_once() -> None:
    here = replace(GOOD, contents={"/shared/model": ""})
    nodes = {name: CheckedNode(name, here, 0.0) for name in ("one", "two")}
    (problem,) = compare(nodes, here, "seen", OUTPUT)
    assert str(problem) == "this machine: /shared/model is missing or cannot be read. Correct the run file"


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
    (second / "in" / "file").rename(second / "in" / "other")
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(tmp_path / "none") == ""


def test_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:k3y@proxy:1")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    (tmp_path / "canary").write_text("sings")
    facts = node_facts(str(tmp_path / "canary"), [str(tmp_path)])
    assert facts.canary == "sings" and facts.contents[str(tmp_path)]
    assert {"slime-rl", "torch", "ray", "Python"} <= {*facts.versions}
    assert facts.shared_memory > 0 and facts.open_files != 0
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
    node = on.nodes[0]
    slime = str(Path(sys.executable).with_name("slime"))
    return subprocess.run(
        node.command(slime, "cluster", "check", *words, "--ray-address", on.address, "--", *flags, folder=folder),
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
    assert right.stdout == "3 nodes answered: no problems\n"
    assert not (tmp_path / "outputs").exists()

    # Folders that each node has for itself, little shared memory, and fewer nodes and devices than asked for.
    run.write_text(text.replace(f"{tmp_path}/prompts.jsonl", str(prompts)) + f'output-dir = "{TEMPORARY}/outputs"\n')
    for number, content in ((0, "first"), (1, "other")):
        three.nodes[number].run("sh", "-c", f"echo {content} > {prompts}")
    three.nodes[1].run("mount", "-o", "remount,size=200m", "/dev/shm")
    words = (str(run), "--nodes", "4", "--timeout-s", "240", "--json")
    wrong = check(three, tmp_path, *words, flags=("--actor-num-gpus-per-node", "7"))
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
        ("cluster", "3 of 4 nodes are in it: node-0, node-1, node-2"),
    } <= found
    assert any(node == names[1] and text.startswith("/dev/shm has 0.") for node, text in found)
    assert any(node == "cluster" and "needs 7 CPUs" in text for node, text in found)
    assert len(found) == 7
