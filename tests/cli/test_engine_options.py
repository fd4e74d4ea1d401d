"""Options of SGLang whose values its declarations do not list: the installed SGLang is asked before anything starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Loop, Slime

from slime.cli.preflight_engine import _LATER
from slime.config.installed import package_folder
from slime.config.sglang_options import sglang_flags

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("key", "is_open"),
    [
        *(
            (key, True)
            for key in ("attention_backend", "load_format", "quantization", "tool_call_parser", "chat_template")
        ),
        *((key, True) for key in ("speculative_algorithm", "lora_target_modules", "cuda_graph_backend_decode")),
        *(
            (key, False)
            for key in ("dtype", "tokenizer_mode", "mem_fraction_static", "context_length", "schedule_policy")
        ),
        *((key, False) for key in ("preferred_sampling_params", "disable_radix_cache")),
    ],
)
def test_sglang_is_asked_about_names_that_its_source_does_not_list(key: str, is_open: bool) -> None:
    assert sglang_flags()[f"sglang-{key.replace('_', '-')}"].type.is_open == is_open


#: what SGLang is asked for besides when its options are tried, as `_build` of the module does
BUILT = (
    "configs.model_config:ModelConfig",
    "configs.load_config:LoadConfig",
    "model_loader.loader:get_model_loader",
    "model_loader.loader:_get_quantization_config",
)


@pytest.mark.parametrize("place", [*(place for places in _LATER.values() for place in places), *BUILT])
def test_sglang_has_what_it_is_asked_for(place: str) -> None:
    """A missing name is passed over in a run: values of the option would be accepted unseen."""
    module, _, path = place.partition(":")
    base = package_folder("sglang", "sglang", "srt") / module.replace(".", "/")
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    name = path.split(".")[0]
    assert file.is_file() and re.search(rf"^(def |class )?{name}\b", file.read_text(encoding="utf-8"), re.MULTILINE), (
        f"SGLang has no {place} any more: find where a server looks the value up now, and change _LATER or _build of"
        " slime.cli.preflight_engine, or drop it there if SGLang's parser lists the values itself"
    )


@pytest.mark.parametrize(("flag", "level"), [("log-level", "loud"), ("log-level-http", "warn"), ("log-level", "trace")])
def test_levels_are_checked_without_sglang(
    slime: Slime, base_words: list[str], loop: Loop, monkeypatch: pytest.MonkeyPatch, flag: str, level: str
) -> None:
    monkeypatch.setattr("subprocess.run", None)
    ended = slime("train", *base_words, f"--sglang-{flag}", level)
    assert ended.code == 2 and loop.calls == []
    assert f"--sglang-{flag}: got '{level}', expected one of" in ended.err
    assert slime("train", *base_words, f"--sglang-{flag}", "INFO", "--dry-run").code == 0


def test_without_an_answer_the_run_is_not_refused(
    slime: Slime, base_words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(1, "python")

    monkeypatch.setattr("subprocess.run", broken)
    assert slime("train", *base_words, "--sglang-attention-backend", "triton", "--dry-run").code == 0
    assert "SGLang could not be asked whether it accepts its options" in caplog.text


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("tokenizer-path", "/no/tokenizer", "a file or folder that exists"),
        ("tokenizer-path", "./tokenizer", "a file or folder that exists"),
        ("tokenizer-path", "tokenizer/", "a file or folder that exists"),
        ("tokenizer-path", "~/tokenizer", "a file or folder that exists"),
        ("tokenizer-path", "models/llama/tokenizer", "a file or folder that exists"),
        ("speculative-draft-model-path", "../draft", "a file or folder that exists"),
        ("quantization-param-path", "/no/scales.json", "a file or folder that exists"),
        ("pdmux-config-path", "no/config.yaml", "a file or folder that exists"),
        ("speculative-draft-model-path", "/no/draft", "a file or folder that exists"),
        ("rl-quant-profile", "profile.pt", "a file or folder that exists"),
        ("speculative-adaptive-config", '{"a": 1}', "a file or folder that exists"),
        ("lora-paths", "name=/no/adapter", "a file or folder that exists"),
        ("lora-paths", '{"lora_name": "one", "lora_path": "/no/adapter"}', "a file or folder that exists"),
        ("model-loader-extra-config", "{broken", "JSON, or a file that exists: Expecting property name"),
        ("kv-events-config", "zmq", "JSON, or a file that exists: Expecting value"),
        ("hicache-storage-backend-extra-config", "@no.toml", "JSON, or a file that exists"),
        ("deepep-config", "{'a': 1}", "JSON, or a file that exists"),
        ("init-expert-location", "trivia", "JSON, or a file that exists"),
    ],
)
def test_missing_files_and_broken_json_are_refused_without_sglang(
    slime: Slime, base_words: list[str], loop: Loop, monkeypatch: pytest.MonkeyPatch, option: str, value: str, said: str
) -> None:
    monkeypatch.setattr("subprocess.run", None)
    ended = slime("train", *base_words, f"--sglang-{option}", value)
    assert ended.code == 2 and loop.calls == []
    assert f"--sglang-{option}: got " in ended.err and f"expected {said}" in ended.err


def test_sglang_is_asked_about_all_that_engines_get(
    slime: Slime, base_words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, stdout="[]\n")

    monkeypatch.setattr("subprocess.run", run)
    words = ["--async", "--inflight-kv", "keep", "--check-weight-update-equal"]
    ended = slime("train", *base_words, *words, "--sglang-attention-backend", "torch_native", "--dry-run")
    assert ended.code == 0, ended.err
    assert {"--disable-radix-cache", "--disable-shared-experts-fusion"} <= {*asked[-1]}


def test_files_that_engines_of_a_cluster_read_are_noted(
    slime: Slime, base_words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("subprocess.run", lambda words, **_: subprocess.CompletedProcess(words, 0, stdout="[]\n"))
    cluster = [*base_words, "--ray-address", "127.0.0.1:1", "--dry-run"]
    ended = slime("train", *cluster, "--sglang-speculative-draft-model-path", "/shared/draft")
    assert ended.code == 0, ended.err
    assert "got '/shared/draft', expected a file on the engines' machines, since this one has none" in caplog.text
    ended = slime("train", *cluster, "--sglang-deepep-config", "{'a': 1}")
    assert ended.code == 2 and "expected JSON, or a file that exists" in ended.err


def test_attention_of_several_data_parallel_parts_divides_the_gpus_of_an_engine(
    slime: Slime, base_words: list[str], loop: Loop
) -> None:
    ended = slime("train", *base_words, "--sglang-dp-size", "2", "--sglang-enable-dp-attention")
    assert ended.code == 2 and loop.calls == []
    assert "--sglang-dp-size 2: with --sglang-enable-dp-attention it divides the GPUs of an engine" in ended.err


@pytest.mark.parametrize("words", [["--sglang-moe-dense-tp-size", "1"], ["--sglang-enable-dp-lm-head"]])
def test_weights_that_no_check_can_compare_are_refused_with_the_check(
    slime: Slime, base_words: list[str], loop: Loop, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("subprocess.run", lambda words, **_: subprocess.CompletedProcess(words, 0, stdout="[]\n"))
    ended = slime("train", *base_words, *words, "--check-weight-update-equal")
    assert ended.code == 2 and loop.calls == []
    said = "divides weights among an engine's ranks in a way that --check-weight-update-equal cannot compare"
    assert f"{words[0]} {said}" in ended.err
    assert slime("train", *base_words, *words, "--dry-run").code == 0, "without the check they are taken"


def test_files_json_and_names_at_the_hub_are_taken(
    slime: Slime, base_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.json"
    file.write_text("{}")
    right = {
        "tokenizer-path": "organisation/tokenizer",
        "speculative-draft-model-path": "s3://bucket/draft",
        "kv-events-config": json.dumps({"publisher": "zmq", "topic": "x" * 300}),  # too long for a file name
        "disaggregation-ib-device": "mlx5_0",
        "lora-paths": f"one={tmp_path}",
        "pdmux-config-path": str(file),
        "model-loader-extra-config": '{"enable_multithread_load": true}',
        "deepep-config": str(file),
        "hicache-storage-backend-extra-config": f"@{file}",
        "init-expert-location": "trivial",
        "file-storage-path": "/not/yet",
        "served-model-name": "policy",
    }
    asked: list[str] = []

    def found_nothing(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.extend(words)
        return subprocess.CompletedProcess(words, 0, stdout="[]\n")

    monkeypatch.setattr("subprocess.run", found_nothing)
    words = [word for name, value in right.items() for word in (f"--sglang-{name}", value)]
    ended = slime("train", *base_words, *words, "--dry-run")
    assert ended.code == 0, ended.err
    assert "organisation/tokenizer" in asked


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tokenizer-path", "gpt2"),
        ("tokenizer-path", "openai-community/gpt2"),
        ("tokenizer-path", "Qwen2.5-0.5B_x"),
        ("speculative-draft-model-path", "gpt2"),
        ("lora-paths", "one=adapter"),
    ],
)
def test_names_at_the_hub_have_one_word_or_two(
    slime: Slime, base_words: list[str], monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    monkeypatch.setattr("subprocess.run", lambda words, **_: subprocess.CompletedProcess(words, 0, stdout="[]\n"))
    assert slime("train", *base_words, f"--sglang-{option}", value, "--dry-run").code == 0


def test_engines_have_the_weights_that_are_trained(
    slime: Slime, base_words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("subprocess.run", lambda words, **_: subprocess.CompletedProcess(words, 0, stdout="[]\n"))
    ended = slime("train", *base_words, "--sglang-quantization", "awq", "--dry-run")
    assert ended.code == 2 and "--sglang-quantization awq: the weights that training sends" in ended.err
    assert slime("train", *base_words, "--sglang-load-format", "dummy", "--dry-run").code == 0
    assert "engines start with random weights, until the trainer sends its own" in caplog.text


@pytest.mark.parametrize(("tokens", "fits"), [(1, False), (15, False), (16, True)])
def test_the_memory_of_an_engine_holds_a_response(
    slime: Slime, base_words: list[str], tokens: int, *, fits: bool
) -> None:
    ended = slime("train", *base_words, "--sglang-max-total-tokens", str(tokens), "--dry-run")
    assert ended.code == (0 if fits else 2)
    assert fits or f"--sglang-max-total-tokens {tokens} has no room for a prompt and a response of 8" in ended.err


def test_what_sglang_does_not_know_is_refused_before_anything_starts(
    slime: Slime, base_words: list[str], loop: Loop
) -> None:
    """One start of SGLang for many options: it answers for all of them."""
    wrong = {
        "attention-backend": ("torch_nativ", "Did you mean torch_native?"),
        "load-format": ("safetensor", "Did you mean safetensors?"),
        "tool-call-parser": ("qwn25", "Did you mean qwen25?"),
        "reasoning-parser": ("qwen-3", "Did you mean qwen3?"),
        "quantization": ("hot", "expected one of "),
        "radix-eviction-policy": ("lruu", "Did you mean lru?"),
        "chat-template": ("chatmll", "Did you mean chatml?"),
        "completion-template": ("hot", "expected one of "),
        "model-impl": ("sglan", "Did you mean sglang?"),
        "eplb-algorithm": ("deepsek", "Did you mean deepseek?"),
        "model-config-parser": ("mistrall", "Did you mean mistral?"),
        "radix-cache-backend": ("hot", "expected nothing: this SGLang has none."),
    }
    words = [word for name, (value, _) in wrong.items() for word in (f"--sglang-{name}", value)]
    ended = slime("train", *base_words, *words, "--dry-run")
    assert ended.code == 2 and loop.calls == [] and "please report" not in ended.err
    for name, (value, said) in wrong.items():
        line = next(line for line in ended.err.splitlines() if f"--sglang-{name}: " in line)
        assert f"got '{value}', expected " in line and said in line, line


@pytest.fixture
def accepted(tmp_path: Path) -> list[str]:
    """Options that SGLang looks up, with values that it knows."""
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    known = {"attention-backend": "torch_native", "tool-call-parser": "qwen25", "chat-template": str(template)}
    return [word for name, value in known.items() for word in (f"--sglang-{name}", value)]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model-loader-extra-config", '{"threads": 4}', "ValueError: Unexpected extra config keys"),
        pytest.param("tokenizer-path", "{folder}", "", marks=pytest.mark.nightly),
    ],
)
def test_what_sglang_refuses_is_refused_before_anything_starts(
    slime: Slime,
    base_words: list[str],
    loop: Loop,
    tmp_path: Path,
    accepted: list[str],
    name: str,
    value: str,
    said: str,
) -> None:
    """Its own checks come after those of names, which all of the accepted ones pass."""
    refused = f"--sglang-{name}", value.replace("{folder}", str(tmp_path))
    ended = slime("train", *base_words, *accepted, *refused, "--dry-run")
    assert ended.code == 2 and loop.calls == []
    assert f"SGLang refuses its options: {said}" in ended.err and "expected one of" not in ended.err


def test_what_sglang_accepts_is_planned(
    slime: Slime, base_words: list[str], accepted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ended = slime("train", *base_words, *accepted, "--dry-run")
    assert ended.code == 0, ended.err
    assert "SGLang could not be asked" not in caplog.text


def test_asking_loads_nothing_into_this_process() -> None:
    code = "import sys, slime.cli.preflight_engine; print({'torch', 'ray', 'sglang'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
