"""Weights that are damaged, or that transformers and engines would read differently, are found before a run starts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.cli.conftest import Slime, change_config, split, write_weights

pytestmark = pytest.mark.slow

Refused = Callable[..., str]
QUERY, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def test_a_truncated_file_is_refused_with_its_sizes(refused: Refused, model: Path) -> None:
    path = model / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1000)
    message = refused("--hf-checkpoint", str(model))
    assert message == (
        f"{path} is truncated: it has {size - 1000} bytes, and its header describes {size}. Download it again."
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated or no safetensors file: it has 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is truncated or no safetensors file: it has 43 bytes"),
        (b"\x02\0\0\0\0\0\0\0{}", "does not hold the tensors that its config.json describes (30 tensors): 30 missing"),
        (b'\x09\0\0\0\0\0\0\0{"a": 1} ', "has a damaged header"),
        ((20_000).to_bytes(8, "little") + b"[" * 20_000, "has a damaged header (RecursionError)"),
    ],
)
def test_a_file_that_is_no_weights_is_refused(refused: Refused, model: Path, content: bytes, message: str) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert message in refused("--hf-checkpoint", str(model))


def test_weights_that_are_a_pipe_are_refused(refused: Refused, model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert f"{model} has neither model.safetensors nor" in refused("--hf-checkpoint", str(model))


def test_missing_unexpected_and_misshapen_tensors_are_named(refused: Refused, model: Path) -> None:
    write_weights(model, **{QUERY: np.ones((64, 32), np.float32), NORM: None, "extra": np.ones(1, np.float32)})
    message = refused("--hf-checkpoint", str(model))
    assert f"(30 tensors): 1 missing: {NORM}; 1 unexpected: extra" in message
    assert f"has 1 tensors of the wrong shape: {QUERY} has shape [64, 32], expected [64, 64]" in message


def test_an_untied_model_without_an_output_layer_is_refused(refused: Refused, model: Path) -> None:
    write_weights(model, **{"lm_head.weight": None})
    assert "(30 tensors): 1 missing: lm_head.weight" in refused("--hf-checkpoint", str(model))


def test_an_output_layer_of_a_tied_model_must_be_its_embedding(dry_run: Slime, refused: Refused, model: Path) -> None:
    change_config(model, tie_word_embeddings=True)
    copy = np.full((128, 64), 0.5, np.float32)
    write_weights(model, **{"lm_head.weight": copy})
    assert dry_run("--hf-checkpoint", str(model)).code == 0
    for other in (np.where(np.arange(64) == 63, 1, copy), copy.astype(np.float16), copy[:64]):
        write_weights(model, **{"lm_head.weight": other.astype(other.dtype if other.dtype != float else np.float32)})
        message = refused("--hf-checkpoint", str(model))
        assert (
            "lm_head.weight differs from model.embed_tokens.weight, and config.json says that the model has" in message
        )
        assert "Set tie_word_embeddings to false if" in message


def test_an_embedding_of_another_vocabulary_is_refused(refused: Refused, model: Path) -> None:
    change_config(model, vocab_size=130)
    message = refused("--hf-checkpoint", str(model))
    assert "model.embed_tokens.weight has shape [128, 64], expected [130, 64]" in message


def test_quantized_weights_are_refused(refused: Refused, model: Path) -> None:
    write_weights(model, **{QUERY: np.ones((64, 64), np.int8)})
    message = refused("--hf-checkpoint", str(model))
    assert f"1 tensors that are not floating-point numbers of 16 to 64 bits: {QUERY} (I8)" in message


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_fp8_weights_are_planned_without_engines_and_refused_with_them(
    dry_run: Slime, refused: Refused, slime: Slime, model: Path, prompts: Path
) -> None:
    change_config(model, quantization_config=FP8)
    words = split("--num-rollout 1 --rollout-batch-size 2 --loss-type sft_loss --device cpu --dry-run")
    planned = slime("train", "--hf-checkpoint", str(model), "--prompt-data", str(prompts), *words)
    assert planned.code == 0, planned.err
    text = " ".join(planned.out.split())
    assert "; fp8, one scale for each 128 x 128 weights: trained dequantised, exported in bfloat16" in text
    message = refused("--hf-checkpoint", str(model))
    assert "engines cannot start from it: the weights that training sends are not quantised. Convert it" in message
    assert f"`slime convert {model} damaged-bf16`, then --hf-checkpoint damaged-bf16" in message
    reference = dry_run("--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", str(model))
    assert reference.code == 0, reference.err


def test_engines_on_a_cpu_cannot_evaluate_fp8_weights(slime: Slime, model: Path, prompts: Path) -> None:
    change_config(model, quantization_config=FP8)
    words = ("eval", str(model), "--eval-prompt-data", "own", str(prompts), "--reward", "exact_match", "--dry-run")
    ended = slime(*words, "--device", "cpu")
    assert ended.code == 2 and "SGLang has no fp8 arithmetic on a CPU. Convert it first" in ended.err


def test_a_model_quantised_in_another_way_is_refused(refused: Refused, model: Path) -> None:
    change_config(model, quantization_config={"quant_method": "gptq"})
    message = refused("--hf-checkpoint", str(model))
    assert f"{model}: config.json: quantization_config describes weights that slime cannot read" in message


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_found(refused: Refused, model: Path, dtype: type, wrong: float) -> None:
    values = np.ones(64, dtype)
    values[40] = wrong
    write_weights(model, **{NORM: values})
    message = refused("--hf-checkpoint", str(model))
    assert f"has NaN or infinity in 1 tensors: {NORM}. Every loss would be NaN" in message


@pytest.mark.parametrize(("wrong", "code"), [(0x7F80, 2), (0xFFC0, 2), (0x7F7F, 0), (0xFF7F, 0)])
def test_nan_and_infinity_of_bfloat16_are_found(dry_run: Slime, model: Path, wrong: int, code: int) -> None:
    write_weights(model, **{NORM: np.full(64, wrong, np.uint16)})
    path = model / "model.safetensors"
    # numpy has no bfloat16: the bits are written as whole numbers, and the header is changed.
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[NORM]["dtype"] = "BF16"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    assert dry_run("--hf-checkpoint", str(model)).code == code


def test_the_largest_finite_numbers_are_accepted(dry_run: Slime, model: Path) -> None:
    write_weights(model, **{NORM: np.full(64, np.finfo(np.float16).max, np.float16)})
    assert dry_run("--hf-checkpoint", str(model)).code == 0


def test_a_number_outside_the_sample_is_found_on_request(dry_run: Slime, refused: Refused, model: Path) -> None:
    change_config(model, intermediate_size=4096)
    large = np.ones((4096, 64), np.float32)
    large[100, 0] = np.nan
    write_weights(model, **{"model.layers.0.mlp.up_proj.weight": large})
    assert dry_run("--hf-checkpoint", str(model)).code == 0
    assert "NaN or infinity" in refused("--hf-checkpoint", str(model), "--check-weights", "all")


# --- an index ----------------------------------------------------------------------------------------


def split_weights(model: Path) -> dict[str, str]:
    """Two files; returns the index's map."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, model / file)
    return {name: file for file, held in parts.items() for name in held}


def write_index(model: Path, weight_map: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_several_files_with_an_index_are_accepted(dry_run: Slime, model: Path) -> None:
    write_index(model, split_weights(model))
    assert dry_run("--hf-checkpoint", str(model)).code == 0


def test_files_without_their_index_as_in_a_folder_half_written_are_refused(refused: Refused, model: Path) -> None:
    split_weights(model)
    message = refused("--hf-checkpoint", str(model))
    assert f"{model} has neither model.safetensors nor model.safetensors.index.json; it holds" in message
    assert "model-00001-of-00002.safetensors" in message


def test_one_truncated_file_of_several_is_named(refused: Refused, model: Path) -> None:
    write_index(model, split_weights(model))
    path = model / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    assert f"{path} is truncated" in refused("--hf-checkpoint", str(model))


@pytest.mark.parametrize("file", ["/etc/passwd", "../other.safetensors", "a/../../b.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(refused: Refused, model: Path, file: str) -> None:
    write_index(model, split_weights(model) | {NORM: file})
    assert f"names files outside the folder: {file}. Do not use this model" in refused("--hf-checkpoint", str(model))


def test_the_links_of_the_hubs_cache_are_followed(dry_run: Slime, model: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (model / "model.safetensors").rename(tmp_path / "blobs" / "0a1b")
    (model / "model.safetensors").symlink_to("../blobs/0a1b")
    assert dry_run("--hf-checkpoint", str(model)).code == 0


def test_files_of_an_index_that_are_missing_or_hold_other_tensors(refused: Refused, model: Path) -> None:
    index = split_weights(model)
    write_index(model, index | {NORM: "model-00003-of-00002.safetensors"})
    assert "names files that are not there: model-00003" in refused("--hf-checkpoint", str(model))
    write_index(model, index | {NORM: "model-00001-of-00002.safetensors"})
    assert f"names 1 tensors that are not in their files: {NORM}" in refused("--hf-checkpoint", str(model))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', "[" * 50_000])
def test_a_broken_index_is_refused(refused: Refused, model: Path, content: str) -> None:
    (model / "model.safetensors.index.json").write_text(content)
    assert "is not a safetensors index" in refused("--hf-checkpoint", str(model))


def test_an_index_beside_another_single_file_is_refused(dry_run: Slime, refused: Refused, model: Path) -> None:
    """transformers reads the single file, and engines those of the index."""
    whole = load_file(model / "model.safetensors")
    write_index(model, split_weights(model))
    save_file(whole, model / "model.safetensors")
    assert dry_run("--hf-checkpoint", str(model)).code == 0
    save_file(whole | {NORM: whole[NORM] + 1}, model / "model.safetensors")
    assert f"differ in 1 tensors: {NORM}. Remove one of them" in refused("--hf-checkpoint", str(model))


def test_more_files_without_an_index_are_refused(dry_run: Slime, refused: Refused, model: Path) -> None:
    """Engines read all of them."""
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert dry_run("--hf-checkpoint", str(model)).code == 0, "engines leave it out"
    save_file({NORM: np.zeros(64, np.float32)}, model / "old.safetensors")
    message = refused("--hf-checkpoint", str(model))
    assert (
        "has consolidated.safetensors, old.safetensors beside model.safetensors, and no model.safetensors.i" in message
    )


def test_an_adapter_in_the_model_folder_is_refused(refused: Refused, model: Path) -> None:
    (model / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    message = refused("--hf-checkpoint", str(model))
    assert f"{model} has an adapter_config.json: transformers would compute the model with these adapters" in message


@pytest.mark.parametrize(("before", "after"), [("model.", "language_model.model."), ("model.", ""), ("", "module.")])
def test_names_with_another_beginning_are_explained(refused: Refused, model: Path, before: str, after: str) -> None:
    tensors = load_file(model / "model.safetensors")
    renamed = {after + name.removeprefix(before) if name.startswith(before) else name: t for name, t in tensors.items()}
    save_file(renamed, model / "model.safetensors")
    message = refused("--hf-checkpoint", str(model))
    assert f"{len(renamed.keys() - tensors.keys())} unexpected: {min(renamed.keys() - tensors.keys())}" in message
    wanted = "begin with 'language_model.'" if after.startswith("language") else "begin with 'module.'"
    assert (wanted if after else "lack 'model.' at their beginning") in message


@pytest.mark.parametrize(
    ("begin", "end", "message"),
    [
        (4, 4, "leaves a gap before it"),
        (-4, -4, "overlaps the tensor before it"),
        (-4, 0, "overlaps the tensor before it"),
    ],
)
def test_tensors_that_share_bytes_or_leave_a_gap_are_refused(
    refused: Refused, model: Path, begin: int, end: int, message: str
) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    first, last = header[QUERY]["data_offsets"]
    assert first > 0, "another tensor is before it"
    header[QUERY]["data_offsets"] = [first + begin, last + end]
    if begin != end:  # the shape fits the bytes
        header[QUERY]["shape"] = [(last + end - first - begin) // 4]
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    assert f"{path} has a damaged header: {QUERY} {message} (data_offsets)" in refused("--hf-checkpoint", str(model))
