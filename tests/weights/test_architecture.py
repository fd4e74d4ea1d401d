"""`config.json` to Megatron keywords, and what is refused."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.families import architecture
from tests.support.tiny_models import published, write_tiny_tokenizer
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto as tables

from slime.errors import ConfigError, SlimeError
from slime.kit.models import mixture_rules
from slime.plugin.architecture import Experts, Rules
from slime.weights import hf_config
from slime.weights.hf_config import PLAIN_CLASSES, read_hf_config, read_tokenizer

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
PUBLISHED_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_keywords_come_from_the_configuration() -> None:
    model = architecture(LLAMA | {"rope_theta": 500000.0, "tie_word_embeddings": True})
    assert model.family == "llama"
    assert model.transformer["kv_channels"] == 16
    assert model.transformer["num_query_groups"] == 2
    assert model.transformer["layernorm_epsilon"] == 1e-5
    assert not model.transformer["qk_layernorm"]
    assert model.gpt["vocab_size"] == 100
    assert model.gpt["rotary_base"] == 500000.0
    assert model.gpt["share_embeddings_and_output_weights"] is True


def test_rules_of_experts_are_made_when_they_are_read() -> None:
    rules = mixture_rules(3, hidden=8, experts=4, ffn=16, shared_ffn=16, expert_bias=True)
    of_all = [part for part in rules.parts if isinstance(part, Experts)]
    assert len(rules.parts) == 6 and [part.count for part in of_all] == [4]
    assert repr(rules) == "<Rules of 6 parts>"
    assert "_all" not in vars(rules)
    assert [rule.expert for rule in rules] == [None] * 3 + [0, 0, 1, 1, 2, 2, 3, 3] + [None] * 2
    assert len(rules) == 13 and rules[3:5] == of_all[0].rules(0)
    assert rules[3].hf == {f"model.layers.3.mlp.experts.0.{part}_proj.weight": (16, 8) for part in ("gate", "up")}
    assert pickle.loads(pickle.dumps(rules)) == rules == tuple(rules)


def test_rules_are_joined_and_compared_as_a_tuple_is() -> None:
    own = tuple(mixture_rules(0, hidden=8, experts=2, ffn=16))
    further = own[:1]
    assert Rules(own) + further == (*own, *further) and further + Rules(own) == (*further, *own)
    assert isinstance(Rules(own) + Rules(further), tuple)
    assert Rules(own) == list(own) and Rules(own) != further
    assert Rules([]) != "" and Rules([]) != b""


def test_without_rotary_options_whole_heads_are_rotated_with_the_usual_base() -> None:
    model = architecture(LLAMA)
    assert (model.gpt["rotary_base"], model.gpt["rotary_percent"]) == (10000.0, 1.0)


def test_qwen3_norms_queries_and_keys_and_sizes_heads_by_itself() -> None:
    model = architecture(QWEN3)
    assert model.transformer["qk_layernorm"]
    assert model.transformer["kv_channels"] == 32


def test_qwen3_without_head_dim_has_heads_of_128_as_in_transformers() -> None:
    without = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert architecture(without).transformer["kv_channels"] == 128


@pytest.mark.parametrize("scaling", [None, PUBLISHED_SCALING])
def test_both_rope_spellings_are_equivalent(scaling: dict[str, Any] | None) -> None:
    older = LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling}
    newer = LLAMA | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default", **(scaling or {})}}
    assert architecture(older) == architecture(newer)
    assert architecture(newer).gpt["rope_scaling"] is (scaling is not None)


def test_the_published_scaling_keeps_its_factor() -> None:
    assert architecture(LLAMA | {"rope_scaling": PUBLISHED_SCALING}).gpt["rope_scaling_factor"] == 32.0


def test_keywords_are_json_able() -> None:
    model = architecture(QWEN3)
    assert json.loads(json.dumps([model.transformer, model.gpt])) == [model.transformer, model.gpt]


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({"model_type": "qwen4"}, "Did you mean qwen3"),
        ({"model_type": None}, "expected the name of a model family"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": PUBLISHED_SCALING}, "llama3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"rope_theta": 0}, "rope_theta is 0; expected a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; expected a number above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected a positive integer"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001; expected a positive integer, at most 10000"),
    ],
)
def test_settings_that_change_the_computation_are_refused(change: dict[str, Any], mentions: str) -> None:
    with pytest.raises(SlimeError, match=mentions):
        architecture({**QWEN3, **change})


@pytest.mark.parametrize("key", ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_scaling_constants_megatron_cannot_compute_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        architecture(LLAMA | {"rope_scaling": {**PUBLISHED_SCALING, key: 2.0}})


def test_llama_feed_forward_biases_are_refused() -> None:
    with pytest.raises(ConfigError, match="mlp_bias"):
        architecture(LLAMA | {"mlp_bias": True})


def test_a_folder_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hf_config(tmp_path)


def test_reading_an_architecture_needs_no_torch() -> None:
    code = "import sys; from tests.support.families import architecture; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0


@pytest.mark.parametrize("family", ["kimi_k2", "qwen3"])
def test_the_tokenizer_is_read_whether_or_not_transformers_knows_the_model(family: str, tmp_path: Path) -> None:
    """For a type that it does not know, transformers fails at YaRN positions in `config.json`."""
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published(family)))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("1+1=", add_special_tokens=False)) == "1+1="
    assert "<|im_start|>" in tokenizer.chat_template


@pytest.mark.slow
@pytest.mark.parametrize("stated", PLAIN_CLASSES)
def test_a_tokenizer_of_a_plain_class_is_read_without_torch(stated: str, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": stated}))
    (tmp_path / "config.json").write_text(json.dumps(published("qwen3")))
    code = (
        "import pathlib, sys; from slime.weights.hf_config import read_tokenizer;"
        f" print(read_tokenizer(pathlib.Path({str(tmp_path)!r})), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=240, check=True, capture_output=True, text=True)
    assert done.stdout == f"{AutoTokenizer.from_pretrained(tmp_path)} False\n"


def test_the_table_of_wrong_classes_is_that_of_transformers() -> None:
    assert hf_config._types_with_wrong_class() == tables.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS


@pytest.mark.parametrize("source", [None, "X = {1}", "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS: set = made()", "{"])
def test_without_the_table_transformers_chooses(
    source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    if source is not None:
        (tmp_path / "models" / "auto").mkdir(parents=True)
        (tmp_path / "models" / "auto" / "tokenization_auto.py").write_text(source)
    monkeypatch.setitem(sys.modules, "transformers", package)
    assert hf_config._types_with_wrong_class() is None


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "deepseek_v3", "mistral"])
def test_the_class_of_a_tokenizer_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert type(read_tokenizer(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))
