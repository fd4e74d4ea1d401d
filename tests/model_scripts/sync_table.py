"""The table of predicted weight syncs in `docs/training.md`.

    python -m tests.model_scripts.sync_table

writes it anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.model_scripts.layouts import layout_words
from tests.model_scripts.test_model_scripts import arrays, published
from tests.support.families import architecture

from slime.config import RunConfig, read_config
from slime_planner.predicted_sync import GPUS, sync_parts, weight_bytes

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
#: script -> name, nodes of 8 GPUs for training, GPUs for engines, GPUs of an engine
MODELS = {
    "llama3.1-8B": ("8B (Llama 3.1)", 1, 8, 1),
    "llama3.1-70B": ("70B (Llama 3.1)", 4, 32, 8),
    "glm4.5-355B-A32B": ("355B (GLM-4.5)", 16, 128, 16),
    "deepseek-v3": ("671B (DeepSeek-V3)", 32, 128, 16),
}
#: bytes per second between nodes: 100, 200, 400 Gb/s
NETWORKS = (12.5e9, 25e9, 50e9)


def config_of(script: str) -> RunConfig:
    """A run in bfloat16 with the layout of `scripts/models/README.md`, on nodes of 8 GPUs."""
    _, nodes, gpus, each = MODELS[script]
    words = layout_words(script)
    words[words.index("--actor-num-gpus-per-node") + 1] = "8"
    cluster = ["--actor-num-nodes", str(nodes), "--ray-address", "head:6379", "--device", "cuda"]
    engines = ["--rollout-num-gpus", str(gpus), "--rollout-num-gpus-per-engine", str(each)]
    transport = ["--update-weight-transport", "distributed"]
    return read_config([*arrays(script)["MODEL_ARGS"], *words, *cluster, *engines, *transport])


def seconds(script: str, transport: str, network: float = GPUS.network) -> float:
    """The predicted seconds of a sync."""
    links = dataclasses.replace(GPUS, network=network)
    parts = sync_parts(config_of(script), architecture(published(script)), links, transport=transport)
    return sum(part.seconds for part in parts)


def table() -> str:
    """The table."""
    rates = " / ".join(f"{network / 1e9:g}" for network in NETWORKS)
    heads = ("model, bfloat16", "bytes", "training", "engines", f"`distributed` at {rates} GB/s", "`tensor`", "`disk`")
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for script, (name, nodes, gpus, each) in MODELS.items():
        size = weight_bytes(config_of(script), architecture(published(script))) / 1e9
        sent = " / ".join(f"{seconds(script, 'distributed', network):.1f}" for network in NETWORKS)
        shared = f"{seconds(script, 'tensor'):.2f} s" if nodes == 1 else "`slime plan`"
        engines = f"{gpus // each} x {each} GPUs" if each > 1 else f"{gpus // each}"
        node = "node" if nodes == 1 else "nodes"
        lines.append(
            f"| {name} | {size:.0f} GB | {nodes} {node} | {engines} | {sent} s | {shared}"
            f" | {seconds(script, 'disk'):.0f} s |"
        )
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table of today."""
    before, rest = page.split("| model, bfloat16 |", 1)
    return before + table() + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
