"""Runs over nodes with Ray: an engine over two of them, with a pipeline stage of the trainer on each; and over three
with an engine each, one of them behind a slow link, lost, or cut off."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.conftest import SlimeRun, launch, started_runs
from tests.support.nodes import Cluster, cluster

from slime.observe.metrics import depends_on_time

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
Start = Callable[..., SlimeRun]

LAYOUT = (
    "--actor-num-nodes", "2", "--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1",
    "--rollout-num-gpus-per-engine", "2", "--threads-per-rank", "1", "--threads-per-engine", "1",
    "--sglang-dist-timeout", "60",
)  # fmt: skip
#: on three nodes: two data-parallel ranks, and an engine on each node
THREE = (
    "--actor-num-nodes", "2", "--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "1",
    "--threads-per-rank", "1", "--threads-per-engine", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes that serve one device each."""
    with cluster([1, 1]) as made:
        yield made


@contextlib.contextmanager
def starting_on(folder: Path, model: Path, data: Path) -> Iterator[Start]:
    """Starts `slime train` on the first node of a cluster, or on this machine if that is None."""

    def start(where: Cluster | None, *flags: str, name: str, layout: Sequence[str] = LAYOUT) -> SlimeRun:
        words = ["train", "--run-name", name, "--hf-checkpoint", str(model), "--prompt-data", str(data), *layout]
        words += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
        words += ["--advantage-estimator", "grpo", "--reward", "exact_match", "--entropy-coef", "0.1", "--lr", "1e-3"]
        words += ["--sglang-max-total-tokens", "16384", "--startup-timeout-s", "400", *flags]
        log, prefix, variables = folder / f"{name}.log", [], {}
        if where is not None:
            words += ["--ray-address", where.address]
            prefix, variables = where.nodes[0].command(folder=folder), where.nodes[0].own_variables
        process, mark = launch(words, folder, log, prefix=prefix, **variables)
        started.append(run := SlimeRun(folder, process, mark, log, name))
        return run

    with started_runs() as started:
        yield start


@pytest.fixture
def train_on(tmp_path: Path, model: Path, data: Path) -> Iterator[Start]:
    """Starts runs in the test's folder; see `starting_on`."""
    with starting_on(tmp_path, model, data) as start:
        yield start


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Iterator[SlimeRun]:
    """The same run on one machine, which has ended."""
    profiled = ("--profile-steps", "1", "--profile-ranks", "1")
    with starting_on(tmp_path_factory.mktemp("one"), model, data) as start:
        yield run_alone(start, LAYOUT, "--update-weight-transport", "distributed", *profiled)


def samples_of(run: SlimeRun, rollout: int) -> list[tuple[str, str, float]]:
    lines = (run.run_dir / "rollouts" / f"{rollout:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["prompt"], row["response"], row["reward"]) for row in map(json.loads, lines)]


def assert_same(run: SlimeRun, alone: SlimeRun) -> None:
    """Both computed the same: samples to the token, numbers and weights to the bit."""
    assert [samples_of(run, number) for number in (0, 1)] == [samples_of(alone, number) for number in (0, 1)]
    steps, expected = run.steps(), alone.steps()
    computed = [name for name in expected[0] if name.startswith("train/") and not depends_on_time(name)]
    assert {"train/loss", "train/grad_norm", "train/logprob_gap_max"} <= {*computed}
    for one, other in zip(steps, expected, strict=True):
        assert {name: one[name] for name in computed} == {name: other[name] for name in computed}
        assert one["train/grad_norm"] > 1e-3 and one["train/logprob_gap_max"] < 1e-4
    weights, wanted = (load_file(one.root / one.name / "model.safetensors") for one in (run, alone))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def left_on(where: Cluster) -> list[str]:
    """What still runs of engines on the nodes, a moment after the end of a run."""
    deadline = time.monotonic() + 30
    while True:
        found = [node.run("sh", "-c", "pgrep -af '[s]glang::|[s]lime.engine' || true") for node in where.nodes]
        if not any(found) or time.monotonic() > deadline:
            return [line for text in found for line in text.splitlines()]
        time.sleep(0.5)


def run_alone(train_on: Start, layout: Sequence[str], *flags: str) -> SlimeRun:
    same = ("--deterministic", "--num-rollout", "2", "--check-weight-update-equal", "--save-hf", "one")
    run = train_on(None, *same, *flags, name="one", layout=layout)
    assert run.wait() == 0, run.output
    return run


@pytest.mark.slow
@pytest.mark.row("L4")
def test_two_stages_on_one_machine_send_their_weights_and_are_profiled(one: SlimeRun) -> None:
    assert one.left_over() == []
    traces = sorted((one.run_dir / "profiles").iterdir())
    names = ["step-000001-engine-0-TP-0", "step-000001-engine-0-TP-1", "step-000001-trainer-1"]
    assert [path.name.partition(".")[0] for path in traces] == names
    assert all("aten::mm" in gzip.decompress(path.read_bytes()).decode() for path in traces)
    steps = one.steps()
    assert len(steps) == 2
    for row in steps:
        assert row["perf/sync/slowest_stage"] in (0, 1)
        sizes = [row[f"perf/sync/stage{stage}_bytes"] for stage in range(2)]
        assert min(sizes) > 0 and sum(sizes) == row["synced_bytes"]
        assert row["train/grad_norm"] > 1e-3 and row["train/logprob_gap_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.row("N7")
def test_a_run_over_two_nodes_computes_what_one_machine_computes(
    nodes: Cluster, one: SlimeRun, train_on: Start
) -> None:
    two = train_on(
        nodes, "--deterministic", "--num-rollout", "2", "--check-weight-update-equal", "--save-hf", "two", name="two"
    )
    assert two.wait(400) == 0, two.output
    assert_same(two, one)
    # one server of the engine on each node, and a rank on each
    hosts = {path.name for path in (two.run_dir / "logs").iterdir()}
    assert {"engine-0.log", "engine-0-node-1.log", "trainer-0.log", "trainer-1.log"} <= hosts
    assert left_on(nodes) == []


@pytest.mark.slow
@pytest.mark.row("N7")
def test_an_engine_for_which_the_cluster_has_no_room_is_refused_before_anything_starts(
    nodes: Cluster, train_on: Start
) -> None:
    fits = train_on(nodes, "--num-rollout", "1", "--dry-run", name="fits")
    assert fits.wait() == 0, fits.output
    assert "has 2 nodes of 1 CPU; an engine spans 2 nodes" in " ".join(fits.output.split())
    large = ("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4", "--num-rollout", "1")
    planned = train_on(nodes, *large, "--dry-run", name="planned")
    started = train_on(nodes, *large, name="started")
    for run in (planned, started):
        assert run.wait() == 2, run.output
        assert "the run needs 4 CPUs (2 training ranks with 1 engine x 4) and Ray sees 2" in " ".join(
            run.output.split()
        )


@pytest.mark.nightly
@pytest.mark.row("N7")
def test_a_lost_server_and_a_lost_node_are_named_and_the_run_goes_on(nodes: Cluster, train_on: Start) -> None:
    run = train_on(
        nodes, "--num-rollout", "60", "--use-fault-tolerance", "--save", "ckpt", "--save-interval", "1", name="lost"
    )
    run.wait_for_output(r"checkpoint after 2 rollouts", 400)
    second = nodes.nodes[1]
    scheduler = second.run("pgrep", "-f", "sglang::scheduler").split()[0]
    second.run("kill", "-KILL", scheduler)
    run.wait_for_output(r"engine 0 is back after", 300)  # both of its servers
    second.kill()
    killed = time.monotonic()
    run.wait_for_output(rf"ending the run: node {second.address} has ended, or cannot be reached", 60)
    assert time.monotonic() - killed < 10
    nodes.restart(1)
    assert run.wait(600) == 0, run.output
    assert len(run.steps()) == 60
    assert sum(row.get("restarts/engine", 0) for row in run.steps()) >= 1
    # After that of the engine. That its process may have been missed before its node was does not count.
    assert re.search(r"restart 2 of 3, from ckpt/rollout_", run.output), run.output
    assert run.output.count("resumed from") == 1, run.output
    assert all(row["train/logprob_gap_max"] < 1e-3 for row in run.steps())
    assert left_on(nodes) == []


@pytest.mark.nightly
@pytest.mark.row("N7")
@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_colocated_over_two_nodes_the_run_computes_the_same(
    nodes: Cluster, one: SlimeRun, train_on: Start, transport: str
) -> None:
    turns = ("--colocate", "--update-weight-transport", transport, "--check-weight-update-equal")
    two = train_on(nodes, *turns, "--deterministic", "--num-rollout", "2", "--save-hf", "two", name="two")
    assert two.wait(400) == 0, two.output
    assert_same(two, one)
    for row in two.steps():  # the stages are on different nodes
        sizes = [row[f"perf/sync/stage{stage}_bytes"] for stage in range(2)]
        assert min(sizes) > 0 and sum(sizes) == row["synced_bytes"]


@pytest.mark.nightly
@pytest.mark.row("N7")
def test_deltas_reach_the_copies_on_both_nodes_of_an_engine(nodes: Cluster, one: SlimeRun, train_on: Start) -> None:
    deltas = ("--update-weight-transport", "disk", "--disk-delta", "--check-weight-update-equal")
    two = train_on(nodes, *deltas, "--deterministic", "--num-rollout", "2", "--save-hf", "two", name="two")
    assert two.wait(400) == 0, two.output
    assert_same(two, one)
    assert all(0 < row["perf/sync/changed_share"] <= 1 for row in two.steps())
    assert left_on(nodes) == []


@pytest.mark.nightly
@pytest.mark.row("N7")
def test_over_ipv6_alone_the_run_computes_the_same(one: SlimeRun, train_on: Start) -> None:
    with cluster([1, 1], ipv6=True) as two_nodes:
        two = train_on(two_nodes, "--deterministic", "--num-rollout", "2", "--save-hf", "two", name="two")
        assert two.wait(400) == 0, two.output
    assert_same(two, one)


@pytest.mark.nightly
@pytest.mark.row("N7")
def test_over_three_nodes_and_a_slow_link_the_run_computes_the_same(train_on: Start) -> None:
    one = run_alone(train_on, THREE)
    with cluster([1, 1, 1]) as three:
        # 20 Mbit/s, both ways
        three.nodes[1].slow_down(20)
        flags = ("--deterministic", "--num-rollout", "2", "--check-weight-update-equal", "--save-hf", "two")
        two = train_on(three, *flags, name="two", layout=THREE)
        assert two.wait(600) == 0, two.output
        assert_same(two, one)
        assert left_on(three) == []


@pytest.mark.nightly
@pytest.mark.row("N7")
def test_a_lost_engine_node_and_one_that_is_cut_off_are_named_and_the_run_goes_on(train_on: Start) -> None:
    flags = ("--num-rollout", "60", "--use-fault-tolerance", "--save", "ckpt", "--save-interval", "1")
    flags += ("--max-restarts", "9")
    with cluster([1, 1, 1]) as three:
        run = train_on(three, *flags, name="lost", layout=THREE)
        run.wait_for_output(r"checkpoint after 2 rollouts", 400)
        number = engine_node(three)
        three.nodes[number].kill()
        run.wait_for_output(rf"node {three.nodes[number].address} has ended, or cannot be reached", 60)
        three.restart(number)
        run.wait_for_output(r"resumed from", 400)
        done = len(run.steps())
        run.wait_until(lambda: len(run.steps()) > done, 400, "step after the restart")

        # Nothing resets its connections now: Ray's health checks are what notices, and the run has to end its attempt.
        number = engine_node(three)
        three.nodes[number].cut_off()
        run.wait_for_output(r"(?s)ending the run: .*\nending the run: .*\nrestart \d of 9, from ckpt/rollout_", 300)
        three.restart(number)
        assert run.wait(600) == 0, run.output
        # A rollout that was not saved yet is repeated.
        assert {row["step"] for row in run.steps()} == {*range(60)}
        assert run.output.count("resumed from") == 2, run.output
        assert all(row["train/logprob_gap_max"] < 1e-3 for row in run.steps())
        assert left_on(three) == []


def engine_node(where: Cluster) -> int:
    """A node that is not the driver's: one that has an engine and no rank of the trainer, if there is one."""
    ranks = [node.run("sh", "-c", "ls -l /proc/[0-9]*/fd/1 2>/dev/null || true") for node in where.nodes]
    return next((number for number in (1, 2) if "/trainer-" not in ranks[number]), 2)
