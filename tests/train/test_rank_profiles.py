"""Profiles of a rank: which steps and ranks get one, and what is said when a GPU's memory runs out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from slime.config import RunConfig
from slime.config.options import ClusterOptions, RunOptions
from slime.errors import TrainerError
from slime.train.rank_profiles import RankProfiles


def profiles(folder: Path, rank: int = 0, device: str = "cpu", **options: object) -> RankProfiles:
    config = RunConfig(
        run=RunOptions.model_validate(options), cluster=ClusterOptions.model_validate({"device": device})
    )
    return RankProfiles(config, folder, rank)


@pytest.mark.row("L10")
def test_the_steps_of_the_range_are_written_as_chrome_traces(tmp_path: Path) -> None:
    of_rank = profiles(tmp_path, profile_steps="1-2")
    for step in range(4):
        with of_rank.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
    files = sorted((tmp_path / "profiles").iterdir())
    assert [path.name for path in files] == [f"step-00000{step}-trainer-0.trace.json.gz" for step in (1, 2)]
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}


@pytest.mark.parametrize(("rank", "written"), [(1, True), (0, False)])
def test_other_ranks_are_not_profiled(tmp_path: Path, rank: int, written: bool) -> None:
    with profiles(tmp_path, rank, profile_steps="3", profile_ranks=[1, 2]).step(3):
        pass
    assert (tmp_path / "profiles").exists() == written


@pytest.mark.parametrize("asked", [True, False])
def test_a_gpu_without_memory_says_what_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    # Stand-ins for the functions of a GPU's memory.
    gib = 2**30
    stats = {"allocated_bytes.all.current": 70 * gib, "reserved_bytes.all.current": 75 * gib}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib, 80 * gib))
    begun: list[int] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: begun.append(max_entries))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))

    of_rank = profiles(tmp_path, device="cuda", memory_snapshot=asked)
    with of_rank.step(6):
        pass
    with pytest.raises(TrainerError) as caught, of_rank.step(7):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.")
    said = str(caught.value)
    assert said.startswith(
        "training on rollout 7: the GPU of rank 0 ran out of memory: tensors have 70.0 GiB of 75.0 GiB that PyTorch"
        " holds, 1.0 of 80.0 GiB are free."
    )
    assert said.endswith("CUDA out of memory. Tried to allocate 6.00 GiB.")
    snapshot = tmp_path / "profiles" / "step-000007-trainer-0.memory.pickle"
    assert (len(begun) == 1, snapshot.exists(), str(snapshot) in said) == (asked, asked, asked)
