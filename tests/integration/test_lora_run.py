"""A whole run that trains adapters on two ranks, continues on one, exports, converts, and starts another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.conftest import SlimeRun
from tests.integration.test_runs import slime
from tests.train.adapters import merged, read_adapter, transformers_model

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]
FLAGS = (
    "--lora-rank", "4", "--lora-alpha", "8", "--lora-targets", "q_proj", "v_proj", "gate_proj", "down_proj",
    "--use-kl-loss", "--kl-loss-coef", "0.01", "--lr", "1e-2", "--save", "ckpt", "--check-weight-update-equal",
)  # fmt: skip
TENSOR = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel")


def test_a_run_with_adapters_trains_resumes_and_exports(slime_train: Callable[..., SlimeRun], model: Path) -> None:
    first = slime_train("--num-rollout", "2", *FLAGS, *TENSOR, name="first")
    assert first.wait() == 0, first.output
    second = slime_train("--num-rollout", "4", *FLAGS, "--load", "ckpt", "--save-hf", "tuned", name="second")
    assert second.wait() == 0, second.output
    assert second.left_over() == []

    base = load_file(model / "model.safetensors")
    steps = first.steps() + [row for row in second.steps() if row["step"] >= 2]
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    for row in steps:
        assert row["train/grad_norm"] > 1e-3  # the adapters change, so the gap shows whether they were merged
        assert row["train/logprob_gap_max"] < 1e-4
        assert row["synced_bytes"] == sum(tensor.nbytes for tensor in base.values())
    # The reference is the model without adapters, also after resuming.
    assert abs(steps[0]["train/kl"]) < 1e-6 and all(row["train/kl"] > 1e-5 for row in steps[1:])

    exported = second.root / "tuned"
    whole = load_file(exported / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], whole[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "gate_proj", "down_proj"}
    expected = merged(transformers_model(model), read_adapter(exported / "adapter"), scale=2.0)
    for name, weight in transformers_model(exported).named_parameters():
        assert float((weight - expected[name]).abs().max()) < 1e-6, name

    slime("convert", "ckpt", "again", cwd=second.root)
    again = load_file(second.root / "again" / "model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    # The adapters start another run.
    third = slime_train("--num-rollout", "1", "--lora-load", "tuned/adapter", name="third")
    assert third.wait() == 0, third.output
    assert third.steps()[0]["train/logprob_gap_max"] < 1e-4
