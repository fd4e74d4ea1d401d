"""A model folder that somebody made to run code: none of its code runs unless the user trusts it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.hostile_checkpoints import Payload
from tests.support.model_folders import Folders
from tests.support.own_tokenizer import give_own_tokenizer
from tests.support.tiny_models import write_tiny_tokenizer

from slime.cli.preflight_tokens import load_tokenizer
from slime.errors import CheckpointError, ConfigError
from slime.kit.chat import ChatTemplate
from slime.kit.readers.light_tokenizer import lightest
from slime.kit.readers.tokenize import PLAIN, batch_backend
from slime.testing import make_tokenizer
from slime.testing.samples import encode
from slime.weights.hf_config import read_tokenizer
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


@pytest.mark.parametrize("known", [True, False])
def test_code_of_a_tokenizer_runs_only_if_it_is_trusted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    mark = tmp_path / "mark"
    give_own_tokenizer(model, mark)
    # A configuration that is code too, and that runs in no case.
    (model / "configuration.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()")
    path = model / "config.json"
    own = {"auto_map": {"AutoConfig": "configuration.Own"}} | ({} if known else {"model_type": "own"})
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what a user in a hurry answers
    for with_json in (False, True):
        if with_json:
            write_tiny_tokenizer(tmp_path)
            shutil.copy(tmp_path / "tokenizer.json", model)
        for load in (partial(load_tokenizer, with_template=True), read_tokenizer):
            with pytest.raises(ConfigError, match=r"is code: .* Letters in letters.py.*--trust-remote-code"):
                load(model)
    assert not mark.exists()
    tokenizer = load_tokenizer(model, with_template=True, trust_remote_code=True)
    plain = make_tokenizer()
    assert tokenizer.encode("Ab1", add_special_tokens=False) == plain.encode("aB1", add_special_tokens=False)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False).startswith("<|im_start|>")
    assert mark.read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / "canary").exists()


def test_a_tokenizer_that_is_code_is_read_again_in_other_processes(model: Path, tmp_path: Path) -> None:
    give_own_tokenizer(model, tmp_path / "mark")
    tokenizer = read_tokenizer(model, trust_remote_code=True)
    packed = pickle.dumps(tokenizer)
    assert b"transformers_modules" not in packed, "a module that other processes cannot import"
    assert pickle.loads(packed).encode("Ab", add_special_tokens=False) == encode("aB")


def test_a_class_of_the_folder_is_used_itself_and_not_its_backend(model: Path) -> None:
    code = "from transformers import PreTrainedTokenizerFast\n\nclass Own(PreTrainedTokenizerFast):\n"
    (model / "own.py").write_text(f"{code}    def decode(self, tokens, **options):\n        return 'its own text'\n")
    path = model / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    tokenizer = read_tokenizer(model, trust_remote_code=True)
    assert tokenizer.is_fast and type(tokenizer).__name__ == "Own"
    assert lightest(tokenizer, PLAIN) is tokenizer and batch_backend(tokenizer) is None
    assert ChatTemplate(tokenizer).text(encode("4")) == "its own text"


def test_a_chat_template_reaches_no_python(model: Path) -> None:
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (model / "chat_template.jinja").write_text(attack)
    tokenizer = load_tokenizer(model, with_template=True)
    with pytest.raises(Exception, match=r"unsafe|is undefined"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False)
