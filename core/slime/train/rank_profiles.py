"""What a rank spent chosen steps on, and what its GPU's memory holds: --profile-steps and --memory-snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from slime.errors import TrainerError
from slime.observe.profiles import folder_of_profiles, profile_name

if TYPE_CHECKING:
    from slime.config import RunConfig

#: allocations that are remembered, about 100 bytes of host memory each without their Python frames
_ALLOCATIONS = 200_000
_GIB = 2**30


class RankProfiles:
    """The profiles of one rank; none unless it is one of --profile-ranks."""

    def __init__(self, config: RunConfig, run_dir: Path | None, rank: int) -> None:
        """Begin to record allocations, if a snapshot is asked for."""
        options = config.run
        chosen = run_dir is not None and rank in options.profile_ranks
        self._steps = options.profiled_steps if chosen else range(0)
        self._memory = chosen and options.memory_snapshot
        self._run_dir, self._rank, self._cuda = run_dir, rank, config.device == "cuda"
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The body trains on rollout `number`.

        Raises:
            TrainerError: The GPU's memory ran out; the message says what it held, and where the snapshot is.
        """
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        try:
            if number in self._steps:
                with profile(activities=activities, record_shapes=True) as profiler:
                    yield
                profiler.export_chrome_trace(str(self._path(number, ".trace.json.gz")))
            else:
                yield
        except torch.OutOfMemoryError as error:
            raise TrainerError(f"training on rollout {number}: {self._out_of_memory(number)} {error}") from error
        if self._memory and number in self._steps:
            self._snapshot(number)

    def _out_of_memory(self, number: int) -> str:
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        allocated, reserved = (stats[f"{kind}_bytes.all.current"] / _GIB for kind in ("allocated", "reserved"))
        said = (
            f"the GPU of rank {self._rank} ran out of memory: tensors have {allocated:.1f} GiB of {reserved:.1f} GiB"
            f" that PyTorch holds, {free / _GIB:.1f} of {total / _GIB:.1f} GiB are free."
        )
        if self._memory:
            said += f" {self._snapshot(number)} shows what they are: open it at https://pytorch.org/memory_viz."
        return said

    def _snapshot(self, number: int) -> Path:
        path = self._path(number, ".memory.pickle")
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # PyTorch states no types of it
        return path

    def _path(self, number: int, ending: str) -> Path:
        assert self._run_dir is not None
        folder = folder_of_profiles(self._run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{profile_name(number)}-trainer-{self._rank}{ending}"
