"""Engines that somebody else started: what differs from the run is refused before it starts, by name and engine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Slime
from tests.support.fake_sglang import FakeSGLang, serving

Refused = Callable[..., str]
pytestmark = pytest.mark.row("N9")
FLAG = "--rollout-external-engine-addrs"


@pytest.fixture
def fake(base_words: list[str]) -> Iterator[FakeSGLang]:
    model = Path(base_words[base_words.index("--hf-checkpoint") + 1])
    with serving(FakeSGLang(model)) as fake:
        yield fake


def test_engines_that_fit_are_shown(dry_run: Slime, fake: FakeSGLang) -> None:
    ended = dry_run(FLAG, fake.address)
    assert ended.code == 0, ended.err
    assert f"of others, compared with the run: {fake.address}" in ended.out


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("version", "0.4.1", "SGLang's version: got 0.4.1, expected"),
        ("dtype", "bfloat16", "--dtype: got 'bfloat16', expected 'float32'"),
        ("tp_size", 2, "--tp-size: got 2, expected 1"),
        ("quantization", "fp8", "--quantization: got 'fp8', expected None"),
        ("model_path", "/nowhere", "its model folder /nowhere cannot be read here"),
    ],
)
def test_each_option_that_differs_is_named(
    refused: Refused, fake: FakeSGLang, name: str, value: object, said: str
) -> None:
    fake.info[name] = value
    message = refused(FLAG, fake.address)
    assert f"{FLAG}: {fake.url}: " in message and said in message


def test_another_architecture_vocabulary_or_size_is_named(refused: Refused, fake: FakeSGLang, tmp_path: Path) -> None:
    fake.model["architectures"], own = ["Qwen3ForCausalLM"], fake.model["architectures"]
    assert "architectures: got ['Qwen3ForCausalLM'], expected ['LlamaForCausalLM']" in refused(FLAG, fake.address)
    fake.model["architectures"], fake.tokens = own, [1, 2, 3]
    assert re.search(r"its tokenizer makes other tokens of 'The 3 quick .*got \[1, 2, 3\]", refused(FLAG, fake.address))
    fake.tokens = None
    other = Path(shutil.copytree(fake.info["model_path"], tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    fake.info["model_path"] = str(other)
    assert f"num_hidden_layers: got 7, expected {config['num_hidden_layers']}" in refused(FLAG, fake.address)


@pytest.mark.parametrize("place", ["a special token", "another"])
def test_a_vocabulary_that_differs_in_one_token_is_named(refused: Refused, fake: FakeSGLang, place: str) -> None:
    own = fake.tokenizer
    number = own.all_special_ids[0] if place == "a special token" else own("~")["input_ids"][0]
    assert number not in own("The 3 quick foxes")["input_ids"]
    other = lambda text: {"input_ids": [0 if one == number else one for one in own(text)["input_ids"]]}  # noqa: E731
    fake.tokenizer = other if number else (lambda text: {"input_ids": [one or 1 for one in own(text)["input_ids"]]})
    message = refused(FLAG, fake.address)
    assert message.count("its tokenizer makes other tokens of ") == 1
    assert own.decode([number]) in message


def test_keys_come_from_a_file_and_are_shown_nowhere(
    dry_run: Slime, refused: Refused, fake: FakeSGLang, tmp_path: Path
) -> None:
    fake.api_key, fake.admin_key = "secret-of-requests", "secret-of-changes"
    assert "--rollout-external-engine-keys names the file" in refused(FLAG, fake.address)
    path = tmp_path / "keys"
    path.write_text("secret-of-requests\nwrong\n")
    assert "/abort_request: status 401" in refused(FLAG, fake.address, "--rollout-external-engine-keys", str(path))
    path.write_text("secret-of-requests\nsecret-of-changes\n")
    ended = dry_run(FLAG, fake.address, "--rollout-external-engine-keys", str(path))
    assert ended.code == 0 and f"key: those of {path}" in ended.out
    assert "secret-of" not in ended.out + ended.err
    path.write_text("")
    assert "got 0 words" in refused(FLAG, fake.address, "--rollout-external-engine-keys", str(path))


def test_what_needs_engines_of_the_runs_own_is_refused(refused: Refused) -> None:
    message = refused(
        FLAG, "here", "10.0.0.7:30000", "10.0.0.7:30000", "--update-weight-transport", "tensor", "--colocate",
        "--engine-port", "30000", "--rollout-num-gpus", "5", "--rollout-quantization", "fp8",
    )  # fmt: skip
    assert "got 'here', expected HOST:PORT" in message
    assert "names 10.0.0.7:30000 more than once" in message
    for name in ("--update-weight-transport tensor", "--colocate", "--engine-port", "--rollout-quantization"):
        assert f"{name} excludes {FLAG}" in message
    assert "--rollout-num-gpus 5 contradicts" in message


def test_an_engine_that_is_not_there_is_named(refused: Refused) -> None:
    assert f"{FLAG}: http://127.0.0.1:9: it does not answer" in refused(FLAG, "127.0.0.1:9")
