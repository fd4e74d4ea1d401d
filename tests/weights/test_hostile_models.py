"""A model folder that somebody made to run code: nothing of it runs."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.hostile_checkpoints import Payload
from tests.support.model_folders import Folders

from slime.cli.preflight_model import load_tokenizer
from slime.errors import CheckpointError, ConfigError
from slime.weights.hf_load import SafetensorsFolder

pytestmark = pytest.mark.slow  # imports transformers


@pytest.fixture
def model(model_folder: Folders, tmp_path: Path) -> Path:
    shutil.copytree(model_folder("qwen3"), tmp_path / "model")
    return tmp_path / "model"


def test_weights_in_pickles_are_not_read(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload(tmp_path / "canary")}, model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="Save the model with safetensors"):
        SafetensorsFolder(model)
    (model / "model.safetensors").write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
        _ = SafetensorsFolder(model).names
    assert not (tmp_path / "canary").exists()


def with_own_code(model: Path, canary: Path) -> None:
    """A tokenizer of the model's own, in a Python file of its folder."""
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    path.write_text(json.dumps(config | own))
    code = f"open({str(canary)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    (model / "own.py").write_text(code)


@pytest.mark.parametrize("light", [True, False])
def test_code_of_a_tokenizer_is_not_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, light: bool
) -> None:
    with_own_code(model, tmp_path / "canary")
    if not light:  # transformers loads what the light tokenizer cannot, and knows no class for a model of no known type
        (model / "config.json").unlink()
        (model / "chat_template.jinja").write_text("{% generation %}{% endgeneration %}")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what a user in a hurry answers
    try:
        load_tokenizer(model, with_template=True)
    except ConfigError as error:
        assert "trust_remote_code" in str(error)
    assert not (tmp_path / "canary").exists()


def test_a_chat_template_reaches_no_python(model: Path) -> None:
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (model / "chat_template.jinja").write_text(attack)
    tokenizer = load_tokenizer(model, with_template=True)
    with pytest.raises(Exception, match=r"unsafe|is undefined"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False)
