"""Dry runs of the published models: `slime train "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" --dry-run`.

The weights are one file with a header for all tensors and no data: a hole of the right size.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from tests.model_scripts.layouts import layout_words
from tests.model_scripts.test_model_scripts import NAMES, arrays, published
from tests.support.families import architecture
from tests.support.tiny_models import write_tiny_tokenizer

from slime.cli import preflight_model
from slime.cli.main import main

#: some have tens of thousands of experts' tensors, whose headers are read and compared
_EXPERTS = ("deepseek", "glm4.", "kimi", "qwen3-235B", "qwen3-30B")


def write_hollow_model(folder: Path, name: str, *, as_published: bool = False) -> None:
    """A folder with everything but numbers, in bfloat16; `as_published`, its config.json may say fp8."""
    config = {key: value for key, value in published(name).items() if as_published or key != "quantization_config"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(folder)
    entries, end = {}, 0
    for tensor, shape in architecture(config).shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(_EXPERTS)) for name in NAMES]
)
def test_a_dry_run_of_a_published_model_predicts_its_memory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A hole holds no numbers worth reading, and reading samples of 70,000 tensors takes most of the time.
    monkeypatch.setattr(preflight_model, "not_finite", lambda *_, **__: iter(()))
    write_hollow_model(tmp_path / "model", name)
    Path("prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    words = arrays(name, HF_CHECKPOINT=str(tmp_path / "model"), SAVE_DIR="saved")
    code = main(
        [
            *("train", "--dry-run", "--prompt-data", "prompts.jsonl", "--num-rollout", "2", "--lr", "1e-6"),
            *("--rollout-batch-size", "4096", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "512"),
            *("--advantage-estimator", "grpo", "--reward", "exact_match", "--run-name", "run"),
            # A cluster, so that this machine needs no GPUs. Nothing listens there: connecting is refused at once.
            *("--device", "cuda", "--ray-address", "127.0.0.1:1", *layout_words(name)),
            *words["MODEL_ARGS"],
            *words["CKPT_ARGS"],
        ]
    )
    printed = capsys.readouterr()
    assert code == 0, printed.err
    found = re.search(
        r" a training rank[^:]*: ([\d.]+) GiB = weights [\d.]+ [GM]iB \+ gradients [\d.]+ [GM]iB \+ optimizer"
        r" [\d.]+ GiB; in a step [\d.]+ GiB with activations [\d.]+ [GM]iB \(micro-batches of 8,192 tokens",
        printed.out,
    )
    assert found is not None, printed.out
    assert 3 < float(found[1]) < 75  # the suggested layout fits into GPUs with 80 GB
    assert "an engine: weights" in printed.out
    if name in ("deepseek-v3", "glm4.5-355B-A32B", "glm4.5-106B-A12B"):
        assert "1 layer for multi-token prediction: not trained, and copied into exports" in printed.out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "quantization_config" in published(name)])
def test_a_folder_as_published_in_fp8_is_refused_with_the_command_that_converts_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight_model, "not_finite", lambda *_, **__: iter(()))
    write_hollow_model(tmp_path / "model", name, as_published=True)
    words = arrays(name, HF_CHECKPOINT="model")
    code = main(["train", "--dry-run", "--num-rollout", "1", *words["MODEL_ARGS"], *words["CKPT_ARGS"]])
    assert code == 2
    assert "`slime convert model model-bf16`" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("qwen3-0.6B", "--post-self-attn-layernorm", "--post-self-attn-layernorm says True, and config.json of"),
        ("qwen3-0.6B", "--post-mlp-layernorm", "--post-mlp-layernorm says True, and config.json of"),
        ("qwen3-0.6B", "--mtp-num-layers 1", "--mtp-num-layers says 1, and config.json of"),
        ("glm4-9B", "--no-post-mlp-layernorm", "--post-mlp-layernorm says False, and config.json of"),
        ("qwen3-0.6B", "--spec module function", "`slime plugins new family NAME`"),
        ("qwen3-0.6B", "--use-gated-attention", "no model family of slime has gated attention"),
        ("qwen3-0.6B", "--allgather-cp", "--context-parallel-size is enough for the others"),
    ],
)
def test_a_flag_for_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str, message: str
) -> None:
    write_hollow_model(tmp_path / "model", name)
    folder = ("--hf-checkpoint", str(tmp_path / "model"))
    assert main(["train", "--dry-run", "--num-rollout", "1", *folder, *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_flags_that_name_what_the_model_has_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hollow_model(tmp_path / "model", "moonlight-16B-A3B")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    folder = ("--hf-checkpoint", str(tmp_path / "model"))
    assert main(["train", "--dry-run", "--num-rollout", "1", *folder, "--mtp-num-layers", "1"]) == 2
    assert "--mtp-num-layers" not in capsys.readouterr().err  # only what else a run needs
