"""Folders that several pipeline stages write: at the same time, and as one writer would."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from slime.plugin.architecture import Architecture
from slime.weights.hf_save import save_hf
from slime.weights.transports.delta import DeltaTransport
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.stages import Turns


def two_stages(name: str, folder: Path, versions: Path, model: Architecture) -> list[DiskTransport]:
    """The transports of two stages, without engines."""
    store = HashStore()

    def of_stage(stage: int) -> DiskTransport:
        turns = Turns(store, stage, 2)
        if name == "disk":
            return DiskTransport(
                engines=[], timeout_s=60.0, turns=turns, folder=versions, source_folder=folder, model=model
            )
        return DeltaTransport(
            engines=[], timeout_s=60.0, turns=turns, folder=versions, source_folder=folder, model=model,
            full_every=2, receive=lambda *_: versions,
        )  # fmt: skip

    return [of_stage(stage) for stage in range(2)]


def sync(stages: list[DiskTransport], parts: list[Iterator[tuple[str, Tensor]]], version: str) -> dict[str, float]:
    """One sync, in which each stage sends its part; the first one's metrics."""

    def part(stage: int) -> dict[str, float]:
        turns = stages[stage].turns
        assert turns is not None
        with turns.sync():
            return stages[stage].send(parts[stage], version=version)
        raise AssertionError("an error of the other stage")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(part, 1)
        metrics = part(0)
        other.result()
    return metrics


@pytest.mark.parametrize("name", ["disk", "delta"])
def test_stages_write_at_the_same_time_and_each_says_how_long(name: str, model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", seed=1)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    stages = two_stages(name, folder, tmp_path / "versions", read_architecture(folder))
    for version in range(3):  # of deltas: a whole one, what changed, and a whole one
        begun = [threading.Event(), threading.Event()]

        def part(stage: int, begun: list[threading.Event] = begun) -> Iterator[tuple[str, Tensor]]:
            begun[stage].set()
            assert begun[1 - stage].wait(20), f"stage {1 - stage} did not begin before stage {stage} had ended"
            time.sleep(0.1)
            yield from ((key, weights[key]) for key in names[stage::2])

        metrics = sync(stages, [part(0), part(1)], str(version))
        assert all(metrics[f"perf/sync/stage{stage}_seconds"] >= 0.1 for stage in range(2)), version


@pytest.mark.parametrize("predicts", [False, True], ids=["kept", "repeated"])
def test_what_is_not_trained_and_what_repeats_a_tensor_is_written_once(
    predicts: bool, model_folder: Folders, tmp_path: Path
) -> None:
    """Of layers for multi-token prediction: all as they were; or trained, with copies of the vocabulary's tensors."""
    folder, model = model_folder("glm4_moe", seed=1), read_architecture(model_folder("glm4_moe", seed=1))
    model = model.with_predicting_layers() if predicts else model
    trained = load_file(model_folder("glm4_moe", seed=2) / "model.safetensors")
    weights = {key: trained[key] for key in sorted(model.shapes)}
    stages = two_stages("disk", folder, tmp_path / "versions", model)
    sync(stages, [iter(list(weights.items())[stage::2]) for stage in range(2)], "new")
    save_hf(tmp_path / "one", iter(weights.items()), folder, model)
    expected = load_file(tmp_path / "one" / "model.safetensors")
    files = [load_file(path) for path in (tmp_path / "versions" / "version-new").glob("*.safetensors")]
    assert len(files) == 2 and sum(map(len, files)) == len(expected) > len(weights)
    assert all(held[key].equal(expected[key]) for held in files for key in held)
