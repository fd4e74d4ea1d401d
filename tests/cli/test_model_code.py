"""Python files in a model folder: no command runs them without `--trust-remote-code`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Slime
from tests.support.own_tokenizer import CODE_FILE, give_own_tokenizer

Refused = Callable[..., str]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def model(described_model: Path, tmp_path: Path, mark: Path) -> Path:
    """A model whose tokenizer is code."""
    shutil.copytree(described_model, tmp_path / "model")
    give_own_tokenizer(tmp_path / "model", mark)
    return tmp_path / "model"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("with_json", [False, True])
def test_training_refuses_a_tokenizer_that_is_code(
    refused: Refused, described_model: Path, model: Path, mark: Path, with_json: bool
) -> None:
    if with_json:
        shutil.copy(described_model / "tokenizer.json", model)
    message = refused("--hf-checkpoint", str(model))
    assert f"the tokenizer in {model} is code: tokenizer_config.json names Letters in {CODE_FILE}" in message
    assert "allow it with --trust-remote-code" in message
    assert ("drop auto_map from tokenizer_config.json to use tokenizer.json alone" in message) == with_json
    assert not mark.exists()


def test_evaluation_refuses_it_too(slime: Slime, prompts: Path, model: Path, mark: Path) -> None:
    ended = slime(
        "eval", str(model), "--dry-run", "--eval-prompt-data", "own", str(prompts), "--reward", "exact_match",
        "--device", "cpu",
    )  # fmt: skip
    assert ended.code == 2 and "allow it with --trust-remote-code" in ended.err
    assert not mark.exists()


def test_components_of_a_run_are_listed_without_it(
    slime: Slime, base_words: list[str], model: Path, mark: Path
) -> None:
    assert slime("plugins", "--for", *base_words, "--hf-checkpoint", str(model), "--trust-remote-code").code == 0
    assert not mark.exists()


@pytest.mark.slow  # imports torch
def test_a_conversion_copies_the_code_and_does_not_run_it(
    slime: Slime, model: Path, tmp_path: Path, mark: Path
) -> None:
    from tests.support.fp8 import quantised_copy

    quantised_copy(model, tmp_path / "fp8")
    ended = slime("convert", str(tmp_path / "fp8"), str(tmp_path / "converted"))
    assert ended.code == 0, ended.err
    assert (tmp_path / "converted" / CODE_FILE).read_text() == (model / CODE_FILE).read_text()
    assert not mark.exists()


@pytest.mark.slow  # imports transformers
def test_with_the_flag_its_tokens_are_counted_and_the_files_are_noted(
    dry_run: Slime, refused: Refused, model: Path, mark: Path
) -> None:
    ended = dry_run("--hf-checkpoint", str(model), "--trust-remote-code")
    assert ended.code == 0, ended.err
    assert f"code of {model} may run with your rights: {CODE_FILE}" in ended.out
    assert mark.exists()
    change(model / "config.json", vocab_size=90)
    message = refused("--hf-checkpoint", str(model), "--trust-remote-code")
    assert f"the tokenizer in {model} has the token" in message


def test_the_flag_without_code_is_noted(dry_run: Slime, described_model: Path) -> None:
    ended = dry_run("--trust-remote-code")
    assert ended.code == 0
    assert f"--trust-remote-code has no effect: {described_model} holds no Python files" in ended.out


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("name", ["someone/theirs--letters.Letters", "../letters.Letters", "/tmp/letters.Letters"])
def test_code_outside_the_folder_is_refused_even_with_the_flag(
    refused: Refused, model: Path, mark: Path, file: str, name: str
) -> None:
    change(model / file, auto_map={"AutoTokenizer": [None, name], "AutoConfig": name})
    message = refused("--hf-checkpoint", str(model), "--trust-remote-code")
    assert f"{model / file} names the class {name} in auto_map; expected FILE.CLASS" in message
    assert not mark.exists()


def test_the_engines_own_flag_is_refused(refused: Refused) -> None:
    assert "use --trust-remote-code" in refused("--sglang-trust-remote-code")
