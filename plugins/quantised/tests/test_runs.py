"""Steps of a run with the real trainer and the real engine, which gets its weights quantised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.in_house import train_in_house
from tests.support.engines import cpu_engine, running
from tests.support.families import read_architecture
from tests.support.model_folders import Folders

from slime_quantised.fp8 import Fp8

REWARD = """
def letters(samples):
    return [sum(c.isalpha() for c in sample.response) / 10 for sample in samples]
"""


@pytest.mark.engine
@pytest.mark.row("Q1")
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"intermediate_size": 256}),
        pytest.param("qwen3_moe", {"moe_intermediate_size": 128}, marks=pytest.mark.nightly),
    ],
    ids=["dense", "experts"],
)
def test_the_gap_of_a_run_is_what_quantised_weights_alone_make(
    family: str, sizes: dict[str, int], model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    folder = model_folder(family, seed=1, hidden_size=128, head_dim=128, **sizes)
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i:03d}", "label": "a"}) + "\n" for i in range(8)))
    flags = ["--hf-checkpoint", str(folder), "--prompt-data", str(prompts), "--lr", "1e-3", "--num-rollout", "3"]
    flags += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "6"]
    flags += ["--custom-rm-path", f"{tmp_path}/reward.py:letters", "--advantage-estimator", "grpo", "--use-tis"]
    flags += [
        "--rollout-quantization",
        "fp8",
        "--rollout-quantization-gap-interval",
        "2",
        "--check-weight-update-equal",
    ]
    config = {"quantization_config": Fp8(read_architecture(folder)).model.engine_config["quantization_config"]}
    arguments = ("--load-format", "dummy", "--json-model-override-args", json.dumps(config))
    engine = cpu_engine(folder, tmp_path, fork_server=fork_server, extra_args=arguments)
    with running(engine):
        steps = train_in_house(flags, engine, tmp_path)
    assert ["dequantized_gap_max" in step for step in steps] == [True, False, True]
    for step in steps:
        assert step["logprob_gap_mean"] > 1e-3
        assert step["grad_norm"] > 1e-4
        assert step.get("dequantized_gap_max", 0.0) < 1e-4
