"""A whole run of a mixture of experts with latent attention: generated, trained, synced, exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.conftest import SlimeRun
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_mixture_with_latent_attention_is_trained_by_expert_parallel_ranks(
    slime_train: Callable[..., SlimeRun], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", "deepseek_v3", seed=0)
    run = slime_train(
        "--hf-checkpoint", str(folder), "--num-rollout", "2", "--actor-num-gpus-per-node", "2",
        "--expert-model-parallel-size", "2", "--check-weight-update-equal", "--save-hf", "exported",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    steps = run.steps()
    assert len(steps) == 2
    for step in steps:
        assert step["train/logprob_gap_max"] < 1e-4
        assert step["train/grad_norm"] > 1e-3
        assert step["train/dropped_tokens"] == 0
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "exported"))
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if "layers.3." in name} & moved == set()  # kept, not trained
    assert any(".experts." in name for name in moved) and any("kv_b_proj" in name for name in moved)
    plugins = (run.run_dir / "plugins.json").read_text()
    assert "families/deepseek_v3" in plugins
