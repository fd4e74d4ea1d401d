"""Predicted bytes and seconds of weight syncs, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tests.model_scripts import sync_table

from slime.config import RunConfig, read_config
from slime.plugin.architecture import Architecture, Rule
from slime_planner.predicted_sync import Bandwidths, sync_lines, sync_parts, weight_bytes

LINKS = Bandwidths(network=100.0, device=1000.0, memory=2000.0, disk_write=10.0, disk_read=50.0)


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


def bytes_of(run: RunConfig, architecture: Architecture, transport: str) -> dict[str, float]:
    return {part.doing: part.bytes for part in sync_parts(run, architecture, LINKS, transport=transport)}


def test_parts_of_a_dense_model_over_two_nodes() -> None:
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    run = config("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2", *layout)
    # 2 x (102,400 + 10,000) numbers of 2 bytes. Each node has a stage, and its first rank a half of that.
    assert weight_bytes(run, model()) == 449_600
    gathered = {"gathering from this node": 224_800}
    assert bytes_of(run, model(), "distributed") == {**gathered, "broadcasting": 449_600}
    seconds = [part.seconds for part in sync_parts(run, model(), LINKS, transport="distributed")]
    assert seconds == pytest.approx([224.8, 4496.0])
    # Two write at once.
    assert bytes_of(run, model(), "disk") == {**gathered, "writing": 449_600, "reading by the engines": 3 * 449_600}
    assert [part.seconds for part in sync_parts(run, model(), LINKS, transport="disk")] == [112.4, 22_480, 26_976]
    shared = {"copying to shared memory": 449_600, "loading by the engines": 3 * 449_600}
    assert bytes_of(run, model(), "tensor") == {**gathered, "handing copies to other nodes": 449_600, **shared}


def test_parts_of_experts_over_two_nodes() -> None:
    layout = ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
    run = config("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2", *layout)
    mixture = model(experts=8)
    # Rank 0 has everything but the experts, of which each rank has a quarter: 4 of 16, and its node 8 of them. The
    # biases of 2 routers are float32.
    assert weight_bytes(run, mixture) == 449_600 + 16 * 20_000 + 2 * 8 * 4
    assert bytes_of(run, mixture, "distributed") == {
        "gathering from this node": 4 * 20_000,
        "gathering from other nodes": 8 * 20_000,
        "broadcasting": 769_664,
    }


def test_one_rank_gathers_nothing_and_shares_with_each_engine() -> None:
    run = config("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1")
    shared = {"copying to shared memory": 449_600, "loading by the engines": 3 * 449_600}
    assert bytes_of(run, model(), "tensor") == shared
    local = read_config(["--bf16", "--device", "cpu"])
    [broadcast] = sync_parts(local, model(), LINKS)
    assert broadcast.seconds == pytest.approx(449.6), "on one machine nothing crosses the network"


def test_adapters_that_a_rank_holds_beside_the_weights_are_not_gathered_from_anywhere() -> None:
    """They are merged: what is sent is the model alone."""
    run = config("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--lora-rank", "8")
    assert set(bytes_of(run, model(), "tensor")) == {"copying to shared memory", "loading by the engines"}


def test_lines_name_the_assumptions() -> None:
    first, second = sync_lines(
        sync_table.config_of("glm4.5-355B-A32B"), sync_table.architecture(sync_table.published("glm4.5-355B-A32B"))
    )
    assert first.startswith("705.6 GB by distributed, about 24.8 s = ")
    assert second == "assumed, not measured: 50 GB/s between nodes, 300 GB/s within a node (docs/training.md)"
    odd = read_config(["--bf16", "--fp4", "e2m1", "--update-weight-transport", "distributed"])
    assert list(sync_lines(odd, model())) == ["0.4 MB by distributed; seconds not predicted with --fp4"]


@pytest.mark.slow
def test_the_table_of_the_docs_is_current() -> None:
    page = sync_table.PAGE.read_text(encoding="utf-8")
    assert sync_table.written(page) == page, "run `python -m tests.model_scripts.sync_table`"
