"""A third party's model family: scaffolded, filled, built, tested, trained with a real engine, and removed.

It is ERNIE 4.5, dense, which no family that ships describes: it rotates neighbouring dimensions of whole heads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.downstream.conftest import Environment
from tests.support.tiny_models import write_tiny_tokenizer

from slime.testing.random_models import write_random_model

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(700)]

PACKAGE, MODULE = "slime-family-ernie45", "slime_family_ernie45"
#: file of the scaffold -> what its author changes: (old, new)
EDITS = {
    f"{MODULE}/__init__.py": [
        ('"architectures": ["Ernie45ForCausalLM"]', '"architectures": ["Ernie4_5_ForCausalLM"]'),
        ('"head_dim": 16', '"head_dim": 32'),
        ('"model_type": "ernie45"', '"model_type": "ernie4_5"'),
        ('"rope_theta": 10000.0', '"rope_theta": 500000.0'),
        ('"vocab_size": 128', '"use_bias": False,\n    "vocab_size": 128'),
        ('model_types=("ernie45",)', 'model_types=("ernie4_5",)'),
        ('causal_lm="Ernie45ForCausalLM"', 'causal_lm="Ernie4_5_ForCausalLM"'),
    ],
    f"{MODULE}/impl.py": [
        (
            '"attention_bias", (None, False), "biases on the attention projections"',
            '"use_bias", (None, False), "biases"',
        ),
        ("qk_norm=True", "qk_norm=False"),
        ('"qk_layernorm": True', '"qk_layernorm": False'),
        ('"rotary_interleaved": False', '"rotary_interleaved": True'),
    ],
    "tests/test_contract.py": [
        ("Qwen3ForCausalLM", "Ernie4_5ForCausalLM"),
        ("queries_and_keys_have_norms", "heads_have_their_own_size"),
        ('    assert shapes["model.layers.1.self_attn.q_norm.weight"] == (16,)\n', ""),
        ("(32, 64)", "(64, 64)"),
        ("attention_bias is True", "use_bias is True"),
        ('"attention_bias": True', '"use_bias": True'),
    ],
}


def write_package(environment: Environment, folder: Path) -> Path:
    """The scaffold, with its author's changes."""
    done = environment.slime("plugins", "new", "family", "ernie45", cwd=folder)
    assert done.returncode == 0, done.stderr
    for name, edits in EDITS.items():
        path = folder / PACKAGE / name
        text = path.read_text()
        for old, new in edits:
            assert old in text, (name, old)
            text = text.replace(old, new)
        path.write_text(text)
    return folder / PACKAGE


@pytest.mark.row("N6")
def test_a_family_of_a_third_party_is_built_tested_trained_and_removed(
    bare_environment: Environment, tmp_path: Path
) -> None:
    environment = bare_environment
    package = write_package(environment, tmp_path)
    environment.pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(package))
    [wheel] = tmp_path.glob("*.whl")
    environment.pip("install", "--no-deps", "--no-index", str(wheel))
    tested = environment.python("-m", "pytest", "-q", str(package / "tests"), cwd=tmp_path, timeout_s=300)
    assert tested.returncode == 0 and "5 passed" in tested.stdout, tested.stdout

    shown = environment.python("-c", f"import json, {MODULE} as it; print(json.dumps(it.EXAMPLE))")
    config = json.loads(shown.stdout)
    model = write_random_model(tmp_path / "model", config, model_class="Ernie4_5ForCausalLM")
    write_tiny_tokenizer(model)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"q{i:03d}", "label": "a"}) + "\n" for i in range(8)))
    (tmp_path / "reward.py").write_text(
        "def letters(samples):\n    return [sum(c.isalpha() for c in sample.response) / 10 for sample in samples]\n"
    )
    command = ["train", "--run-name", "run", "--hf-checkpoint", str(model), "--prompt-data", str(data)]
    command += ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--lr", "1e-3"]
    command += ["--rollout-max-response-len", "8", "--sglang-max-total-tokens", "16384", "--save-hf", "exported"]
    command += ["--advantage-estimator", "grpo", "--custom-rm-path", "reward.py:letters", "--check-weight-update-equal"]
    done = environment.slime(*command, cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "outputs" / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row]
    assert len(steps) == 2
    for step in steps:
        assert step["train/logprob_gap_max"] < 1e-4
        assert step["train/grad_norm"] > 1e-3
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "ernie4_5"
    used = json.loads((tmp_path / "outputs" / "run" / "plugins.json").read_text())["used"]["family"]
    assert (used["id"], used["distribution"], used["version"]) == ("ernie45/ernie45", PACKAGE, "0.1.0")

    environment.pip("uninstall", "-y", PACKAGE)
    refused = environment.slime(*command, cwd=tmp_path)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "model family 'ernie4_5'" in refused.stderr and "is not installed" in refused.stderr
    assert "slime-family-*" in refused.stderr
    assert "Traceback" not in refused.stderr
