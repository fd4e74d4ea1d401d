"""Every model family that ships: two GRPO steps of `slime train`, with the flags of a published model, scaled down."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.conftest import SlimeRun
from tests.model_scripts.test_model_scripts import arrays
from tests.support.families import read_architecture
from tests.support.own_tokenizer import CODE_FILE, give_own_tokenizer
from tests.support.tiny_models import as_transformers_writes, make_tiny_model, published, transformers_model

from slime.plugin import FamilySpec
from slime.testing.samples import encode
from slime.weights.hf_config import read_tokenizer
from slime_families import slime_register_families

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

FAMILIES: list[FamilySpec] = slime_register_families()
LAYERS = 2
#: family -> script of a published model; there is none for `glm`, whose models SGLang has no class for
SCRIPTS = {
    "llama": "llama3-8B",
    "qwen2": "qwen2.5-7B",
    "qwen3": "qwen3-8B",
    "qwen3_moe": "qwen3-30B-A3B",
    "glm4": "glm4-9B",
    "glm4_moe": "glm4.5-355B-A32B",
    "glm4_moe_lite": "glm4.7-30B-A3B",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
}
REWARD = """
def letters(samples):
    return [sum(c.isalpha() for c in sample.response) / 10 for sample in samples]
"""
#: a family whose published tokenizers are Python code in the model folder
WITH_CODE = "kimi_k2"
#: family -> layout of the trainer, for those that do not train on one rank
LAYOUTS = {"deepseek_v3": ("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2")}


def sizes(config: dict[str, Any]) -> list[str]:
    """The sizes of a small `config.json`, as flags: the last word on what a script states for the published model."""
    flags: dict[str, Any] = {
        "--num-layers": LAYERS,
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": config["num_attention_heads"],
        "--norm-epsilon": config["rms_norm_eps"],
        "--rotary-base": int(config["rope_theta"]),
        "--vocab-size": config["vocab_size"],
    }
    if "kv_lora_rank" in config:
        flags |= {
            "--q-lora-rank": config["q_lora_rank"],
            "--kv-lora-rank": config["kv_lora_rank"],
            "--qk-head-dim": config["qk_nope_head_dim"],
            "--qk-pos-emb-head-dim": config["qk_rope_head_dim"],
            "--v-head-dim": config["v_head_dim"],
        }
    else:
        flags["--num-query-groups"] = config["num_key_value_heads"]
        flags["--kv-channels"] = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if experts := config.get("n_routed_experts", config.get("num_experts")):
        flags |= {
            "--num-experts": experts,
            "--moe-router-topk": config["num_experts_per_tok"],
            "--moe-ffn-hidden-size": config["moe_intermediate_size"],
        }
    if "n_shared_experts" in config:
        flags |= {
            "--moe-layer-freq": "[0]*1+[1]*1",
            "--moe-shared-expert-intermediate-size": config["n_shared_experts"] * config["moe_intermediate_size"],
        }
    if config.get("n_group", 1) > 1:
        flags |= {"--moe-router-num-groups": config["n_group"], "--moe-router-group-topk": config["topk_group"]}
    if scaling := config.get("rope_scaling"):
        positions = scaling["original_max_position_embeddings"]
        flags |= {"--rotary-scaling-factor": scaling["factor"], "--original-max-position-embeddings": positions}
    return [str(word) for flag in flags.items() for word in flag]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_takes_two_grpo_steps(
    family: FamilySpec, slime_train: Callable[..., SlimeRun], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", family.name, seed=0, num_hidden_layers=LAYERS)
    trusted = ["--trust-remote-code"] if family.name == WITH_CODE else []
    if trusted:
        give_own_tokenizer(folder, tmp_path / "mark")
    (tmp_path / "reward.py").write_text(REWARD)
    script = SCRIPTS.get(family.name)
    shape = [] if script is None else [*arrays(script)["MODEL_ARGS"], *sizes(published(family.name))]
    run = slime_train(
        "--hf-checkpoint", str(folder), *shape, *LAYOUTS.get(family.name, ()),
        "--advantage-estimator", "grpo", "--custom-rm-path", f"{tmp_path}/reward.py:letters",
        "--num-rollout", "2", "--check-weight-update-equal", "--save-hf", "exported",
        *trusted,
        reward=False,
    )  # fmt: skip
    code = run.wait()
    if family.not_served:
        assert code == 2, run.output
        assert family.not_served in run.output
        return
    assert code == 0, run.output
    steps = run.steps()
    assert len(steps) == 2
    for step in steps:
        assert step["train/logprob_gap_max"] < 1e-4
        assert step["train/grad_norm"] > 1e-3
        assert step["synced_bytes"] > 1e5
        assert step.get("train/dropped_tokens", 0) == 0
    assert f"families/{family.name}" in (run.run_dir / "plugins.json").read_text()

    if trusted:
        assert_code_ran_and_is_kept(run, folder)

    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "exported"))
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    # the layer for multi-token prediction, if there is one, is kept and not trained
    assert not any(f"layers.{LAYERS}." in name for name in moved)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= moved
    assert any(".experts." in name for name in moved) == any(".experts." in name for name in before)
    exported = transformers_model(tmp_path / "exported")
    assert torch.equal(exported.get_output_embeddings().weight, after["lm_head.weight"])
    with torch.no_grad():
        assert exported(torch.tensor([[40, 41, 42]])).logits.isfinite().all()


@pytest.mark.parametrize("family", [one for one in FAMILIES if not one.not_served], ids=lambda family: family.name)
def test_a_model_that_transformers_wrote_is_trained_exported_and_served_again(
    family: FamilySpec, slime_train: Callable[..., SlimeRun], tmp_path: Path
) -> None:
    """Its `config.json` lacks what SGLang needs of some families; exports have it."""
    folder = as_transformers_writes(make_tiny_model(tmp_path / "model", family.name, seed=0, num_hidden_layers=LAYERS))
    words = ["--advantage-estimator", "grpo", "--num-rollout", "1", "--save-hf"]
    for start, exported in ((folder, "first"), (tmp_path / "first", "second")):
        run = slime_train("--hf-checkpoint", str(start), *words, exported, *LAYOUTS.get(family.name, ()), name=exported)
        assert run.wait() == 0, run.output
        assert run.steps()[0]["train/logprob_gap_max"] < 1e-4
        config = json.loads((tmp_path / exported / "config.json").read_text())
        assert config["architectures"] == [family.causal_lm]
    assert read_architecture(tmp_path / "second") == read_architecture(folder)


def assert_code_ran_and_is_kept(run: SlimeRun, model: Path) -> None:
    # the command, the rollout process, and the three processes of the engine
    assert len(set((run.root / "mark").read_text().split())) >= 5
    rows = [json.loads(line) for line in (run.run_dir / "rollouts" / "000000.jsonl").read_text().splitlines()]
    assert all(row["prompt_tokens"] == len(row["prompt"]) for row in rows)
    hashes = {CODE_FILE: sha256((model / CODE_FILE).read_bytes()).hexdigest()}
    assert json.loads((run.run_dir / "plugins.json").read_text())["model_code"] == hashes
    exported = read_tokenizer(run.root / "exported", trust_remote_code=True)
    assert exported.encode("Ab", add_special_tokens=False) == encode("aB")
