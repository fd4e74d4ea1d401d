"""`slime convert` of checkpoints, tensor by tensor, writes what the training ranks export."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.families import read_architecture
from tests.support.fp8 import quantised_copy
from tests.support.hostile_checkpoints import ATTACKS
from tests.support.model_folders import Folders
from tests.support.tiny_models import transformers_model
from tests.train.harness import RankLauncher, make_batch, make_config, run_ranks
from torch import Tensor

from slime.errors import CheckpointError
from slime.weights.hf_load import SafetensorsFolder
from slime_planner.checkpoint_weights import CheckpointWeights
from slime_planner.conversion import Conversion, Output, outputs, unquantised

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}
EP = {"expert_model_parallel_size": 2}


def save_and_export(launcher: RankLauncher, config: Any, folder: Path) -> None:
    """One step, so that nothing has the values of the model folder."""
    rank = launcher.start(config)
    rank.train(make_batch())
    rank.save(folder / "checkpoint")
    rank.export_hf(folder / "exported")
    rank.close()


def saved(tmp_path: Path, source: Path, ranks: int, layout: dict[str, int]) -> tuple[CheckpointWeights, Path]:
    """The weights of a checkpoint, and the folder that its ranks exported."""
    config = make_config(source, world_size=ranks, megatron=layout, loss_type="sft_loss")
    run_ranks(save_and_export, ranks, config, tmp_path)
    return CheckpointWeights(tmp_path / "checkpoint", read_architecture(source)), tmp_path / "exported"


def save_weights(launcher: RankLauncher, config: Any, folder: Path) -> None:
    """The model folder in Megatron's format, as `slime convert --to-megatron` writes it."""
    rank = launcher.start(config)
    rank.policy.save_weights(folder)
    rank.close()


def weights_from(launcher: RankLauncher, config: Any, folder: Path) -> dict[str, Tensor]:
    """What a run of other weights has after `--initial-megatron-checkpoint`."""
    rank = launcher.start(config)
    rank.load(folder, weights_only=True)
    found = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return found


@pytest.mark.slow
@pytest.mark.engine
def test_a_model_folder_becomes_a_checkpoint_of_weights_and_the_same_folder_again(
    model_folder: Folders, tmp_path: Path
) -> None:
    folder, checkpoint = model_folder("qwen3_moe", tied=True), tmp_path / "checkpoint"
    options = {"loss_type": "sft_loss"}
    run_ranks(save_weights, 2, make_config(folder, world_size=2, megatron=EP, **options), checkpoint)
    original = load_file(folder / "model.safetensors")
    weights = CheckpointWeights(checkpoint, read_architecture(folder))
    assert weights.shapes.keys() == original.keys()
    assert all(weights.read(name).equal(tensor) for name, tensor in original.items())

    other = model_folder("qwen3_moe", seed=2, tied=True)
    config = make_config(other, world_size=2, megatron=TP | {"sequence_parallel": True}, **options)
    started = run_ranks(weights_from, 2, config, checkpoint)[0]
    assert started.keys() == original.keys()
    assert all(started[name].equal(tensor) for name, tensor in original.items())


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [
        pytest.param("qwen3", 2, TP, id="tensor parallel, vocabulary padded"),
        pytest.param("llama", 2, PP, id="pipeline parallel, tied"),
        pytest.param("qwen3_moe", 2, EP, id="expert parallel"),
        pytest.param("deepseek_v3", 2, EP, id="latent attention, experts, prediction"),
    ],
)
def test_a_checkpoint_becomes_the_folder_that_its_ranks_export(
    family: str, ranks: int, layout: dict[str, int], model_folder: Folders, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 130} if family == "qwen3" else {}  # which 2 x 128 rows hold
    source = model_folder(family, tied=family == "llama", **sizes)
    weights, exported = saved(tmp_path, source, ranks, layout)
    original = SafetensorsFolder(source)
    carried = {name: original.shape(name) for name in original.names if name not in weights.shapes}
    conversion = Conversion(
        source,
        {},
        outputs(original, weights.shapes | carried),
        lambda name: original.whole(name) if name in carried else weights.read(name),
        "checkpoint",
    )
    conversion.write(tmp_path / "converted", verify=True)
    expected, found = (load_file(path / "model.safetensors") for path in (exported, tmp_path / "converted"))
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert files_of(exported).keys() == files_of(tmp_path / "converted").keys()
    before = load_file(source / "model.safetensors")
    assert any(not torch.equal(found[name], before[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.engine
def test_a_checkpoint_of_another_model_or_with_parts_missing_is_refused(model_folder: Folders, tmp_path: Path) -> None:
    source = model_folder("qwen3")
    saved(tmp_path, source, 1, {})

    def refusal(described_by: Path) -> str:
        with pytest.raises(CheckpointError) as error:
            CheckpointWeights(tmp_path / "checkpoint", read_architecture(described_by))
        return str(error.value)

    narrow = refusal(model_folder("qwen3", intermediate_size=88))
    assert "mlp.linear_fc1.weight has shape [256, 64], which does not fit model.layers.0.mlp.gate_proj" in narrow
    assert "or more layers or experts, of decoder.layers." in refusal(model_folder("qwen3", num_hidden_layers=2))
    assert "it has no decoder.layers.3." in refusal(model_folder("qwen3", num_hidden_layers=4))
    assert "linear_qkv.weight has shape [256, 64], which does not fit" in refusal(model_folder("llama"))
    ATTACKS["in_a_tensor"](tmp_path / "checkpoint", tmp_path / "canary")
    with pytest.raises(CheckpointError, match="could run code"):
        CheckpointWeights(tmp_path / "checkpoint", read_architecture(source)).read("model.embed_tokens.weight")
    assert not (tmp_path / "canary").exists()
    part = tmp_path / "checkpoint" / "__0_0.distcp"
    os.truncate(part, part.stat().st_size // 3)
    weights = CheckpointWeights(tmp_path / "checkpoint", read_architecture(source))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        for name in weights.shapes:
            weights.read(name)


# --- the writer: no checkpoint needed -----------------------------------------------------------------------

MATRICES = {f"layers.{number}.weight": torch.randn(64, 32 + number) for number in range(8)}


def conversion_of(
    source: Path, read: Callable[[str], Tensor] = MATRICES.__getitem__, *, origin: str = "a", max_bytes: int = 20_000
) -> Conversion:
    types = (torch.float32, torch.bfloat16)
    tensors = [Output(name, tuple(one.shape), types[i % 2]) for i, (name, one) in enumerate(MATRICES.items())]
    return Conversion(source, {"model_type": "x"}, tensors, read, origin, max_bytes)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def test_files_stay_below_their_size_and_hold_every_tensor_in_its_type(source: Path, tmp_path: Path) -> None:
    conversion_of(source).write(tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert held.keys() == MATRICES.keys()
    for number, (name, tensor) in enumerate(MATRICES.items()):
        assert torch.equal(held[name], tensor.to((torch.float32, torch.bfloat16)[number % 2]))
    assert all(sum(one.nbytes for one in load_file(file).values()) <= 20_000 for file in files)
    assert SafetensorsFolder(tmp_path / "out").names == MATRICES.keys()
    assert not list(tmp_path.glob(".out*")) and not list((tmp_path / "out").glob("conversion*"))


def test_an_interrupted_conversion_goes_on_with_the_next_file(source: Path, tmp_path: Path) -> None:
    read: list[str] = []

    def until(last: str) -> Callable[[str], Tensor]:
        def one(name: str) -> Tensor:
            if name == last:
                raise CheckpointError("the disk went away")
            read.append(name)
            return MATRICES[name]

        return one

    with pytest.raises(CheckpointError, match="went away"):
        conversion_of(source, until("layers.5.weight")).write(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    complete = {path.name for path in (tmp_path / ".out.partial").glob("*.safetensors")}
    assert complete
    first, read[:] = list(read), []
    conversion_of(source, until("none")).write(tmp_path / "out")
    assert set(first) & set(read) <= {"layers.4.weight"} and len(read) < len(MATRICES)
    assert SafetensorsFolder(tmp_path / "out").names == MATRICES.keys()


def test_files_of_another_conversion_are_not_taken_over(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        conversion_of(source, {"layers.0.weight": torch.zeros(64, 32)}.__getitem__, max_bytes=1).write(tmp_path / "out")
    assert (tmp_path / ".out.partial" / "model-00001-of-00008.safetensors").is_file()
    conversion_of(source, origin="b", max_bytes=1).write(tmp_path / "out")
    held = load_file(tmp_path / "out" / "model-00001-of-00008.safetensors")
    assert torch.equal(held["layers.0.weight"], MATRICES["layers.0.weight"])


def test_a_file_that_changed_after_it_was_written_is_found_by_comparing(source: Path, tmp_path: Path) -> None:
    def flip(text: str) -> None:
        if text.startswith("model-00002") and text.endswith("comparing"):
            [path] = (tmp_path / ".out.partial").glob("model-00002*")
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"model-00002\S+ differs from what was to be written in 1 tensors"):
        conversion_of(source).write(tmp_path / "out", verify=True, report=flip)
    assert not (tmp_path / "out").exists()


def test_a_folder_for_which_there_is_no_space_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    partial = tmp_path / ".out.partial"

    def missing() -> int:
        before = sorted(partial.glob("model-*.safetensors"))
        with pytest.raises(CheckpointError) as error:
            conversion_of(source).write(tmp_path / "out")
        assert sorted(partial.glob("model-*.safetensors")) == before
        said = re.search(r"/out cannot be written: it needs ([\d,]+) bytes, and ([\d,]+) are free", str(error.value))
        assert said is not None and int(said[2].replace(",", "")) == free
        return int(said[1].replace(",", ""))

    whole = missing()
    free = whole - 1
    assert missing() == whole
    free = whole
    with pytest.raises(KeyError):  # interrupted in the middle
        conversion_of(source, {name: MATRICES[name] for name in list(MATRICES)[:5]}.__getitem__).write(tmp_path / "out")
    there = sum(path.stat().st_size for path in partial.glob("model-*.safetensors"))
    assert 0 < there < whole and list(partial.glob("*.unfinished"))
    free = 0
    rest = missing()
    assert rest == whole - there
    assert not list(partial.glob("*.unfinished")), "it takes the place that is needed"
    free = rest
    conversion_of(source).write(tmp_path / "out")
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    described = {"config.json", "model.safetensors.index.json"}  # made up at the end, from a few bytes
    assert whole == sum(size for name, size in written.items() if name not in described)


def test_two_conversions_into_the_same_folder_are_kept_apart(source: Path, tmp_path: Path) -> None:
    def second(_: str) -> None:
        with pytest.raises(CheckpointError, match="is being written by another"):
            conversion_of(source).write(tmp_path / "out")

    conversion_of(source).write(tmp_path / "out", report=second)


# --- fp8, and the whole command, killed in the middle --------------------------------------------------------


def test_fp8_weights_become_the_bfloat16_numbers_they_stand_for(model_folder: Folders, tmp_path: Path) -> None:
    expected = quantised_copy(model_folder("qwen3", intermediate_size=200), tmp_path / "fp8", block=(48, 40))
    unquantised(tmp_path / "fp8", "a").write(tmp_path / "out", verify=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in expected.items())
    assert {tensor.dtype for name, tensor in found.items() if "norm" not in name} == {torch.bfloat16}
    loaded = transformers_model(tmp_path / "out")
    assert loaded(torch.arange(8)[None]).logits.isfinite().all()
    assert transformers_model(tmp_path / "out").config.to_dict().get("quantization_config") is None


@pytest.mark.slow
def test_the_command_that_was_killed_continues(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", intermediate_size=1024, num_hidden_layers=6)
    expected = quantised_copy(folder, tmp_path / "fp8")
    script = (
        "import itertools, os, sys, time; from slime_planner import conversion\n"
        "write, written = conversion._write_file, itertools.count(1)\n"
        "def held(*words):\n"
        "    write(*words)\n"
        "    if next(written) == 3 and 'HELD' in os.environ: time.sleep(600)\n"
        "conversion._write_file = held\n"
        "conversion.Conversion.__init__.__defaults__ = (2**18,)\n"
        "from slime.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", script, "convert", str(tmp_path / "fp8"), str(tmp_path / "out"), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    partial = tmp_path / ".out.partial"
    with subprocess.Popen(words, env=environment | {"HELD": "1"}, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 200
        while len(list(partial.glob("model-*.safetensors"))) < 3:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    done = {path.name: path.stat().st_mtime_ns for path in partial.glob("model-*.safetensors")}
    assert not (tmp_path / "out").exists() and len(done) == 3
    ended = subprocess.run(
        [*words, "--verify"], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "continuing the conversion" in ended.stderr
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in done} == done
    found = SafetensorsFolder(tmp_path / "out")
    assert found.names == expected.keys()
    assert all(torch.equal(found.whole(name), t.to(found.whole(name).dtype)) for name, t in expected.items())
