"""Every model family that ships: two GRPO steps of `slime train`, with the model's shape in Megatron's flags."""

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
from tests.support.own_tokenizer import CODE_FILE, give_own_tokenizer
from tests.support.tiny_models import make_tiny_model, published, transformers_model

from slime.plugin import FamilySpec
from slime.testing.samples import encode
from slime.weights.hf_config import read_tokenizer
from slime_families import slime_register_families

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FAMILIES: list[FamilySpec] = slime_register_families()
LAYERS = 2
REWARD = """
def letters(samples):
    return [sum(c.isalpha() for c in sample.response) / 10 for sample in samples]
"""
#: a family whose published tokenizers are Python code in the model folder
WITH_CODE = "kimi_k2"
#: family -> layout of the trainer, for those that do not train on one rank
LAYOUTS = {"deepseek_v3": ("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2")}


def shape_flags(config: dict[str, Any]) -> list[str]:
    """What a model's script states for its `config.json`."""
    flags = {
        "--num-layers": LAYERS,
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": config["num_attention_heads"],
        "--normalization": "RMSNorm",
        "--norm-epsilon": config["rms_norm_eps"],
        "--rotary-base": int(config["rope_theta"]),
        "--vocab-size": config["vocab_size"],
    }
    switches = ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    if "kv_lora_rank" in config:
        switches.append("--multi-latent-attention")
        flags |= {
            "--q-lora-rank": config["q_lora_rank"],
            "--kv-lora-rank": config["kv_lora_rank"],
            "--qk-head-dim": config["qk_nope_head_dim"],
            "--qk-pos-emb-head-dim": config["qk_rope_head_dim"],
            "--v-head-dim": config["v_head_dim"],
        }
    else:
        switches.append("--group-query-attention")
        flags["--num-query-groups"] = config["num_key_value_heads"]
        flags["--kv-channels"] = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if experts := config.get("n_routed_experts", config.get("num_experts")):
        flags |= {
            "--num-experts": experts,
            "--moe-router-topk": config["num_experts_per_tok"],
            "--moe-ffn-hidden-size": config["moe_intermediate_size"],
        }
    return [*switches, *(str(word) for flag in flags.items() for word in flag)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_takes_two_grpo_steps(
    family: FamilySpec, slime_train: Callable[..., SlimeRun], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", family.name, seed=0, num_hidden_layers=LAYERS)
    trusted = ["--trust-remote-code"] if family.name == WITH_CODE else []
    if trusted:
        give_own_tokenizer(folder, tmp_path / "mark")
    (tmp_path / "reward.py").write_text(REWARD)
    run = slime_train(
        "--hf-checkpoint", str(folder), *shape_flags(published(family.name)), *LAYOUTS.get(family.name, ()),
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


def assert_code_ran_and_is_kept(run: SlimeRun, model: Path) -> None:
    # the command, the rollout process, and the three processes of the engine
    assert len(set((run.root / "mark").read_text().split())) >= 5
    rows = [json.loads(line) for line in (run.run_dir / "rollouts" / "000000.jsonl").read_text().splitlines()]
    assert all(row["prompt_tokens"] == len(row["prompt"]) for row in rows)
    hashes = {CODE_FILE: sha256((model / CODE_FILE).read_bytes()).hexdigest()}
    assert json.loads((run.run_dir / "plugins.json").read_text())["model_code"] == hashes
    exported = read_tokenizer(run.root / "exported", trust_remote_code=True)
    assert exported.encode("Ab", add_special_tokens=False) == encode("aB")
