"""Predicted bytes and seconds of weight syncs, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slime.config import RunConfig, read_config
from slime.plugin.architecture import Architecture, Rule
from slime_planner.cluster import GPUS, Cluster
from slime_planner.known_models import described
from slime_planner.memory_here import sync_lines
from slime_planner.predicted_sync import sync_ways, weight_bytes
from slime_planner.rates import Rates

#: bytes/s: 1,000 between devices and to the host, 100 between nodes, 10 to the disk for each writer, 50 for all readers
NODES = Cluster(4, 2, replace(GPUS["h100"], link=1e-6), network=100.0, adapters=1)
RATES = replace(
    Rates(), link_share=1.0, network_share=1.0, host_link=1000.0, disk_write=10.0, disk_read=50.0, tensor_call=0.0
)


def dense(name: str, rows: int, columns: int, **options: Any) -> Rule:
    return Rule(name, {name: (rows, columns)}, name, parallel_dim=0, **options)


def model(*, experts: int = 0) -> Architecture:
    """Two layers of 100 x 100, a vocabulary of 1,024, and in each layer `experts` of 100 x 100 with a router's bias."""
    rules = [
        dense("embedding.word", 1024, 100, layout="vocab"),
        dense("output_layer.weight", 1024, 100, layout="vocab"),
    ]
    for layer in range(2):
        rules.append(dense(f"decoder.layers.{layer}.mlp", 100, 100))
        rules += [dense(f"decoder.layers.{layer}.experts.{n}", 100, 100, expert=n) for n in range(experts)]
        if experts:
            name = f"decoder.layers.{layer}.mlp.router.expert_bias"
            rules.append(Rule(name, {name: (experts,)}, name))
    return Architecture(
        "hand", {"num_layers": 2}, {"vocab_size": 1024, "share_embeddings_and_output_weights": False}, tuple(rules)
    )


def config(*words: str) -> RunConfig:
    return read_config(["--bf16", "--rollout-num-gpus", "3", "--ray-address", "head:6379", *words])


def seconds(run: RunConfig, architecture: Architecture, nodes: Cluster = NODES) -> dict[str, float]:
    return {way.name: way.seconds for way in sync_ways(run, described("hand", architecture, run), nodes, RATES)}


def test_a_dense_model_over_two_nodes() -> None:
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    run = config("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2", *layout)
    # 2 x (102,400 + 10,000) numbers of 2 bytes. Each node has a stage.
    assert weight_bytes(run, model()) == 449_600
    gathered, sent = 224.8, 2248.0  # a stage, between devices and between nodes
    found = seconds(run, model())
    assert found["one sender"] == pytest.approx(sent + gathered + 2 * sent), "the other stage comes to rank 0 first"
    assert found["stages in turn"] == pytest.approx(2 * sent)
    assert found["stages at once"] == pytest.approx(2 * sent), "a node of engines takes all of it"
    # Both write at once; three engines read.
    assert found["disk"] == pytest.approx(gathered + 224.8 + 449_600 / 20 + 3 * 449_600 / 50)
    assert "tensor" not in found


def test_experts_over_two_nodes() -> None:
    layout = ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
    run = config("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2", *layout)
    mixture = model(experts=8)
    # Each rank has a quarter of the 16 experts, and rank 0's node half of them. The biases of 2 routers are float32.
    assert weight_bytes(run, mixture) == 449_600 + 16 * 20_000 + 2 * 8 * 4
    gathered = (769_664 - 160_000) / 1000 + 160_000 / 100
    assert seconds(run, mixture)["one sender"] == pytest.approx(gathered + 769_664 / 100)


def test_engines_beside_the_ranks_get_copies_within_their_node() -> None:
    layout = ["--actor-num-nodes", "1", "--actor-num-gpus-per-node", "2", "--colocate"]
    run = config(*layout)
    # Between devices: to the rank that sends, and once more to the engines.
    assert seconds(run, model(), replace(NODES, nodes=1))["tensor"] == pytest.approx(2 * 449.6)
    run = config(*layout, "--pipeline-model-parallel-size", "2")
    # Each of two stages sends what it holds, at once.
    assert seconds(run, model(), replace(NODES, nodes=1))["tensor"] == pytest.approx(224.8 + 449.6)


def test_a_run_on_cpus_says_how_much_is_sent() -> None:
    here = ["--bf16", "--device", "cpu", "--update-weight-transport"]
    assert list(sync_lines(read_config([*here, "distributed"]), model())) == ["0.4 MB by distributed"]
    whole, more = sync_lines(read_config([*here, "disk", "--disk-delta"]), model())
    assert whole == "0.4 MB by disk" and more.startswith("a whole version, as every ")
