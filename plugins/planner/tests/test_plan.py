"""A dry run with the planner, without it, and beside `slime plan`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Slime

import slime_planner
from slime_planner.devices import Devices

MODELS = Path(slime_planner.__file__).parent / "models"


def test_without_the_planner_only_its_lines_are_missing(dry_run: Slime) -> None:
    planned, bare = dry_run(), dry_run("--plugins.deny", "planner")
    assert bare.code == planned.code == 0, bare
    labels = [line[:13].strip() for line in planned.out.splitlines()]
    assert labels[labels.index("devices") + 1] == "planned for" and "weight sync" in labels
    first, last = labels.index("planned for"), labels.index("network")
    assert bare.out.splitlines() == planned.out.splitlines()[:first] + planned.out.splitlines()[last:]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3-8B", "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 4"),
        pytest.param(
            "qwen3-30B-A3B",
            "--pipeline-model-parallel-size 2 --expert-model-parallel-size 8 --actor-num-gpus-per-node 8"
            " --actor-num-nodes 2 --colocate --rollout-num-gpus-per-engine 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dry_run_of_a_description_says_the_numbers_of_a_plan(
    slime: Slime, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    """On a machine without GPUs, of a folder with a `config.json` alone: both plan for nodes of eight H100."""
    monkeypatch.setattr("slime_planner.at_hand.find_devices", Devices)
    for module in ("preflight", "preflight_machine"):
        monkeypatch.setattr(f"slime.cli.{module}.nvidia_devices", lambda: 0)
    (tmp_path / "model").mkdir()
    shutil.copy(MODELS / f"{name}.json", tmp_path / "model" / "config.json")
    flags = f"--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 2048 --bf16 {layout}".split()
    flags += ["--rollout-max-prompt-len", "512"]
    named = f"--hf-checkpoint model --prompt-data {prompts} --num-rollout 2 --reward exact_match --device cuda".split()
    dry = slime("train", "--dry-run", *named, "--advantage-estimator", "grpo", *flags)
    assert dry.code == 0, dry.err
    nodes = "2" if "--actor-num-nodes" in flags else "1"
    plan = slime("plan", "model", "--nodes", nodes, "--gpus", "8xH100-80GB", *flags)
    assert plan.out and not plan.err  # its code is 1 where the run does not fit, as the larger one does not
    said, planned = (" ".join(one.out.split()) for one in (dry, plan))
    assert "and this machine has 0" in said
    for pattern in (
        r"\d nodes? x 8 H100 \([\d.]+ GiB each\), 8 x 400 Gb/s and 2,048 GiB of host memory a node",
        r"[\d.]+ GiB = weights .*?; in a step [\d.]+ GiB with activations [\d.]+ [GM]iB",
        r"a device of an engine: .*? tokens\b.*? tokens\b",
        r"a step: about \d+ s = generation \d+, training [\d.]+ \(in turn\) \+ sync [\d.]+",
        r"training: log-probs .*? optimizer [\d.]+ s",
        r"weight sync of \d+ GB: .*?; a step has ",
        r"assumed matrix [\d.]+, .*? reserved \S+",
    ):
        in_dry, in_plan = re.search(pattern, said), re.search(pattern, planned)
        assert in_dry and in_plan, (pattern, said, planned)
        assert in_dry[0] == in_plan[0]
