"""Checkpoints that are written while training continues: from copies, by a thread of the rank.

Megatron plans the files and its writer writes them, as it does when training waits. To do that in the background, it
would use a process for each rank. A forked one inherits the locks of Ray's and gloo's threads as they are in that
moment, and sooner or later waits for one forever. A fresh one needs seconds of imports, the memory of a second
interpreter, and every tensor in shared memory. A thread needs none of these, and hardly slows training down: copying,
writing and hashing are done without Python's lock.

The thread calls nothing collective: what the ranks do together, planning and completing the folders, they do in their
main threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron.core.dist_checkpointing.dict_utils import nested_values
from torch import Tensor

from slime.train.checkpoint_io import attributed, plan

T = TypeVar("T")


class BackgroundWrite(Generic[T]):
    """The folders of one checkpoint that this rank writes in the background.

    Called with each folder and its state, as `slime.train.checkpoint_io.write_now` is; then `start`, and `finish`.
    """

    def __init__(self) -> None:
        self._planned: list[tuple[Path, Any]] = []
        self._writing: Future[T]

    def __call__(self, folder: Path, state: dict[str, Any]) -> None:
        """Plan how `state` is written to `folder`, and copy this rank's share to host memory (collective).

        Raises:
            CheckpointError: The folder cannot be written.
        """
        live = {data.untyped_storage().data_ptr() for data in _tensors(state)}
        with attributed(folder):
            request = plan(folder, state)
        if request.async_fn is not None:
            _, buckets, _ = request.async_fn_args
            for _, _, (_, tensors) in buckets:
                # In place: what was gathered for this is freed as it is copied. Megatron has cloned views on the host.
                for number, (item, tensor) in enumerate(tensors):
                    if not tensor.is_cpu or tensor.untyped_storage().data_ptr() in live:
                        tensors[number] = item, tensor.detach().to("cpu", copy=True)
        self._planned.append((folder, request))

    def start(self, then: Callable[[], T]) -> None:
        """Begin to write the copies; `then` is called in the same thread when they are on disk."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint")
        self._writing = pool.submit(self._write, then)
        pool.shutdown(wait=False)

    def _write(self, then: Callable[[], T]) -> T:
        for _, request in self._planned:
            if request.async_fn is not None:
                request.async_fn(*request.async_fn_args)
        return then()

    @property
    def written(self) -> bool:
        """Whether the thread has ended, also by an error; never blocks."""
        return self._writing.done()

    def finish(self) -> T:
        """Wait for the thread, and complete the folders (collective); what `then` returned.

        Raises:
            CheckpointError: A rank could not write its share.
        """
        answer = self._writing.result()
        for folder, request in self._planned:
            with attributed(folder):
                for complete in request.finalize_fns:
                    complete()
        return answer


def _tensors(state: dict[str, Any]) -> Iterator[Tensor]:
    """What the entries of a state to be saved hold."""
    for entry in nested_values(state):
        if isinstance(data := getattr(entry, "data", None), Tensor):
            yield data
