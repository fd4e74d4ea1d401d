"""Weights for engines on several nodes, each rank of which opens the memory of the trainer's rank on its own device.

Rank 0 gathers a bucket, as for one node, and sends a copy of it to every rank of the trainer. The request to an
engine has a handle for each of its ranks: that rank opens the copy which the trainer's rank beside it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from slime.errors import WeightSyncError, one_line
from slime.weights.transports.tensor import Layout, SharedBlock

logger = logging.getLogger(__name__)


class RanksBeside:
    """The trainer's ranks, as those beside the engines; one such object on each rank. Made by all ranks at once."""

    def __init__(self, beside: Sequence[Sequence[int]], device: torch.device, timeout_s: float) -> None:
        """
        Args:
            beside: For each engine, the trainer's rank on the device of each of its ranks.
            device: Of this rank's weights.
            timeout_s: How long a rank waits for the others.
        """
        self._beside, self._device, self._rank = beside, device, dist.get_rank()
        limit = timedelta(seconds=timeout_s)
        self._data = dist.new_group(timeout=limit)
        #: NCCL would send words through the memory of GPUs
        self._words = self._data if device.type == "cpu" else dist.new_group(backend="gloo", timeout=limit)
        self._blocks: dict[int, SharedBlock] = {}
        #: of rank 0: whether the others wait for its next word
        self._waited_for = True

    def hand_over(self, index: int, block: SharedBlock, layout: Layout) -> list[list[str]]:
        """Of rank 0: a copy of a bucket for every rank.

        Args:
            index: Which of the others' blocks gets it. Engines have loaded what was in it.
            block: Holds the bucket.
            layout: Its tensors.

        Returns:
            For each engine, the handles of its ranks, in order.

        Raises:
            WeightSyncError: A rank has failed, or did not take its copy in time.
        """
        self._waited_for = False
        try:
            self._tell((index, block.size, layout))
            answers: list[Any] = self._problems(None)
            if not any(answers):
                dist.broadcast(block.content(), src=0, group=self._data)
                answers = self._answers(self._handles(block, layout))
        except RuntimeError as error:  # of gloo or NCCL
            raise WeightSyncError(
                f"Weight sync: a rank of the trainer did not take its copy of a bucket: {error}. Look at the ranks'"
                " logs; --weight-sync-timeout-s sets the limit."
            ) from error
        self._waited_for = True
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                raise WeightSyncError(f"Weight sync: rank {rank} of the trainer could not share a bucket: {answer}")
        left = [iter(answer) for answer in answers]
        return [[next(left[rank]) for rank in engine] for engine in self._beside]

    def end(self) -> None:
        """Of rank 0: let the others go, if they wait."""
        if self._waited_for:
            with suppress(RuntimeError):
                self._tell(None)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Of the others: take copies of what rank 0 hands over while the body takes part in gathering it."""
        failed: list[BaseException] = []

        def follow() -> None:
            try:
                self._follow()
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                failed.append(error)

        thread = Thread(target=follow, name="slime-weights-beside", daemon=True)
        thread.start()
        yield
        thread.join()
        if failed:
            logger.warning("this rank could not take what rank 0 handed over: %s", failed[0])

    def _follow(self) -> None:
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0, group=self._words)
            if told[0] is None:
                break
            index, size, layout = told[0]
            problem: str | None = None
            try:
                block = self._room(index, size)
            except Exception as error:  # noqa: BLE001 - rank 0 raises it for all
                problem = one_line(error)
            # A rank without room cannot take part in the broadcast, and the others would wait for it in vain.
            if any(self._problems(problem)):
                continue
            dist.broadcast(block.content(), src=0, group=self._data)
            try:
                answer: list[str] | str = self._handles(block, layout)
            except Exception as error:  # noqa: BLE001 - rank 0 raises it for all
                answer = one_line(error)
            dist.gather_object(answer, dst=0, group=self._words)
            del block
        if self._device.type != "cpu":
            self._blocks.clear()

    def _room(self, index: int, size: int) -> SharedBlock:
        """Memory of this rank for a bucket: what it has already, or new."""
        if self._device.type != "cpu":  # one bucket of GPU memory at a time
            self._blocks.clear()
        block = self._blocks.get(index)
        if block is None or block.size != size:
            block = None
            self._blocks.pop(index, None)  # before more is taken
            block = self._blocks[index] = SharedBlock(size, self._device)
        return block

    def _problems(self, own: str | None) -> list[str | None]:
        """Why each rank has no room, None where it has. All ranks call this at once."""
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._words)
        return found

    def _tell(self, words: Any) -> None:
        dist.broadcast_object_list([words], src=0, group=self._words)

    def _answers(self, own: list[str]) -> list[Any]:
        answers: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, answers, dst=0, group=self._words)
        return answers

    def _handles(self, block: SharedBlock, layout: Layout) -> list[str]:
        """One for each rank of an engine that is beside this one: on a GPU each counts as a reference."""
        return block.handles(layout, sum(rank == self._rank for engine in self._beside for rank in engine))
