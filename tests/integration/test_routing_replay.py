"""The engines' choice of experts, replayed in training, end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun
from tests.integration.in_house import train_in_house
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model

Start = Callable[..., SlimeRun]
pytestmark = [pytest.mark.engine, pytest.mark.slow]

REWARD = """
def letters(samples):
    return [sum(c.isalpha() for c in sample.response) / 10 for sample in samples]
"""
#: a function for --rollout-sample-filter-path that drops nothing, and records how routed experts are stored
WITNESS = """
import json
from pathlib import Path

from slime.rollout.train_batch import RoutedExperts

divided = RoutedExperts.divided


def recorded(self, layers, put, fetch):
    found = divided(self, layers, put, fetch)
    shapes = [[list(part.shape) for [part] in fetch(parts)] for parts in found.parts]
    Path("witness.json").write_text(json.dumps([layers, [list(shape) for shape in found.shapes], shapes]))
    return found


RoutedExperts.divided = recorded


def keep_all(args, groups):
    pass
"""


@pytest.mark.row("N6")
@pytest.mark.row("N7")
def test_ranks_of_two_stages_fetch_the_experts_of_their_layers_and_send_what_changed(
    slime_train: Start, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", seed=0)
    (tmp_path / "witness.py").write_text(WITNESS)
    run = slime_train(
        "--hf-checkpoint", str(model), "--num-rollout", "2", "--use-rollout-routing-replay",
        "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2",
        "--decoder-first-pipeline-num-layers", "2", "--rollout-sample-filter-path", "witness.py:keep_all",
        "--update-weight-transport", "disk", "--disk-delta", "--check-weight-update-equal",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    assert run.left_over() == []
    layers, shapes, parts = json.loads((tmp_path / "witness.json").read_text())
    assert layers == [[0, 1], [2]]
    assert [shape[1:] for shape in shapes] == [[3, 2]] * 8
    assert parts == [[[shape[0], 2, 2], [shape[0], 1, 2]] for shape in shapes]
    steps = run.steps()
    assert len(steps) == 2
    for row in steps:
        assert row["train/grad_norm"] > 1e-3 and row["train/logprob_gap_max"] < 1e-4
        assert min(row["perf/sync/stage0_bytes"], row["perf/sync/stage1_bytes"]) > 0
        assert 0 < row["perf/sync/changed_share"] <= 1


@pytest.mark.row("N6")
def test_replay_closes_the_gap_that_other_experts_make(data: Path, fork_server: Path, tmp_path: Path) -> None:
    """The engine computes in bfloat16, so its routers often choose otherwise than the trainer's in float32."""
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", seed=0)
    (tmp_path / "reward.py").write_text(REWARD)
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--lr", "1e-3", "--num-rollout", "2"]
    flags += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "32"]
    flags += ["--custom-rm-path", f"{tmp_path}/reward.py:letters", "--advantage-estimator", "grpo"]
    flags += ["--check-weight-update-equal"]
    bfloat16 = ("--dtype", "bfloat16")
    engine = cpu_engine(model, tmp_path, extra_args=bfloat16, fork_server=fork_server, routed_experts=True)
    with running(engine):
        gaps = [
            [step["logprob_gap_max"] for step in train_in_house([*flags, *more], engine, tmp_path)]
            for more in ([], ["--use-rollout-routing-replay"])
        ]
    without, replayed = map(min, gaps)
    assert max(gaps[1]) < without / 3, gaps
    assert replayed > 0
