"""Weights for engines on several nodes, each rank of which opens the memory of the trainer's rank on its own device.

The first rank of each pipeline stage gathers a bucket of its stage, as for one node, and hands a copy of it to every
rank of the trainer. The request to an engine has a handle for each of its ranks: that rank opens the copy which the
trainer's rank beside it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.errors import WeightSyncError, one_line
from slime.weights.shards import is_first_of_stage
from slime.weights.transports.tensor import Layout, SharedBlock, SharedBlocks, laid_out

logger = logging.getLogger(__name__)


class RanksBeside:
    """The trainer's ranks, as those beside the engines; one such object on each rank. Made by all ranks at once.

    In a sync all ranks follow one source after the other, the first ranks of the stages in their order: each of its
    buckets, up to its last word, which it says even if it fails. A thread of each rank does that, as the rank gathers
    meanwhile. Only that thread talks to the other ranks, so all do it in the same order.
    """

    def __init__(self, beside: Sequence[Sequence[int]], device: torch.device, timeout_s: float) -> None:
        """
        Args:
            beside: `beside[engine][its rank]` is the trainer's rank on the same device.
            device: Of this rank's weights.
            timeout_s: How long a rank waits for the others.
        """
        self._beside, self._device, self._rank = beside, device, dist.get_rank()
        limit = timedelta(seconds=timeout_s)
        self._data = dist.new_group(timeout=limit)
        #: NCCL would send words through the memory of GPUs
        self._words = self._data if device.type == "cpu" else dist.new_group(backend="gloo", timeout=limit)
        self._blocks = SharedBlocks(on_gpu=device.type != "cpu")
        firsts = self._of_all(is_first_of_stage())
        self._sources = [rank for rank, first in enumerate(firsts) if first]
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="slime-weights-beside", initializer=self._take_own_stream
        )
        #: of the sync under way: what the thread has to do, and the sources after this one if it can still hand over
        self._tasks: list[Future[Any]] = []
        self._later: list[int] | None = None

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Follow the sources while the body takes part in gathering, and hands over if this rank is one of them."""
        place = self._sources.index(self._rank) if self._rank in self._sources else len(self._sources)
        self._tasks = [self._thread.submit(self._follow, self._sources[:place])]
        self._later = self._sources[place + 1 :] if place < len(self._sources) else None
        try:
            yield
        finally:
            self.end()
        # Not after a failure, which others may have to know before they say their last words.
        for task in self._tasks:
            if (failed := task.exception()) is not None:
                logger.warning("this rank could not take what others handed over: %s", failed)

    def hand_over(self, number: int, bucket: Sequence[tuple[str, Tensor]], deadline: float) -> list[list[str]]:
        """Called on a source: hand a copy of a bucket to every rank.

        Args:
            number: The bucket's, in the memory of all ranks: see `SharedBlocks.room`.
            bucket: Names and tensors.
            deadline: In monotonic seconds.

        Returns:
            For each engine, the handles of its ranks, in order.

        Raises:
            WeightSyncError: A rank has failed, or did not take its copy in time.
        """
        if self._device.type == "cuda":  # the thread's stream does not wait for the one that gathered the bucket
            torch.cuda.current_stream(self._device).synchronize()
        given = self._thread.submit(self._give, number, bucket)
        try:
            answers = given.result(max(0.0, deadline - monotonic()))
        except (RuntimeError, TimeoutError) as error:  # of gloo or NCCL, and ours
            given.cancel()
            why = "in time" if isinstance(error, TimeoutError) else f": {one_line(error)}"
            raise WeightSyncError(
                f"Weight sync: a rank of the trainer did not take its copy of a bucket {why}. Look at the ranks' logs;"
                " --weight-sync-timeout-s sets the limit."
            ) from error
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                raise WeightSyncError(f"Weight sync: rank {rank} of the trainer could not share a bucket: {answer}")
        left = [iter(answer) for answer in answers]
        return [[next(left[rank]) for rank in engine] for engine in self._beside]

    def end(self) -> None:
        """Called on a source: let the others go on to the next one, and follow those after it.

        Only the first call of a sync counts: that after the last bucket, or the one at the end of a sync that failed.
        """
        if self._later is not None:
            self._tasks += [self._thread.submit(self._last_word), self._thread.submit(self._follow, self._later)]
            self._later = None

    def close(self) -> None:
        """Free the memory and the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()

    # --- in the thread ---

    def _take_own_stream(self) -> None:
        # On the stream on which the rank gathers, a copy would wait for gathers that come after it here, and whose
        # other ranks wait for the copy.
        if self._device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]  # torch does not type it

    def _follow(self, sources: Sequence[int]) -> None:
        for source in sources:
            while (told := self._told_by(source)) is not None:
                self._share(source, *told)
            self._free()

    def _give(self, number: int, bucket: Sequence[tuple[str, Tensor]]) -> list[Any]:
        layout, size = laid_out(bucket)
        self._told_by(self._rank, (number, layout, size))
        return self._share(self._rank, number, layout, size, bucket)

    def _last_word(self) -> None:
        self._told_by(self._rank)
        self._free()

    def _told_by(self, source: int, words: Any = None) -> Any:
        """What a source says to all."""
        told = [words]
        dist.broadcast_object_list(told, src=source, group=self._words)
        return told[0]

    def _share(
        self, source: int, number: int, layout: Layout, size: int, bucket: Sequence[tuple[str, Tensor]] | None = None
    ) -> list[Any]:
        """A bucket, which the source has, for all ranks; for the source, the handles of each, or why it has none."""
        block: SharedBlock | None = None
        problem: str | None = None
        try:
            block = self._blocks.room(number, size, self._device)
            if bucket is not None:
                block.fill(layout, bucket)
        except Exception as error:  # noqa: BLE001 - the source raises it for all
            problem = one_line(error)
        # A rank without room cannot take part in the broadcast, and the others would wait for it in vain.
        problems = self._of_all(problem)
        if block is None or any(problems):
            return problems
        dist.broadcast(block.content()[:size], src=source, group=self._data)
        try:
            # One for each rank of an engine that is beside this one: on a GPU each counts as a reference.
            answer: Any = block.handles(layout, sum(rank == self._rank for engine in self._beside for rank in engine))
        except Exception as error:  # noqa: BLE001 - the source raises it for all
            answer = one_line(error)
        answers: list[Any] = [None] * dist.get_world_size() if source == self._rank else []
        dist.gather_object(answer, answers or None, dst=source, group=self._words)
        return answers

    def _of_all(self, own: Any) -> list[Any]:
        """What each rank says. All call this at once."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._words)
        return found

    def _free(self) -> None:
        if self._device.type != "cpu":
            self._blocks.clear()
