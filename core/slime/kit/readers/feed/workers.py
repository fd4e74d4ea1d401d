"""Processes that read and tokenise prompts ahead of when they are wanted."""

from __future__ import annotations

import asyncio
import pickle
import threading
import weakref
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from slime.errors import DataError, SlimeError
from slime.kit.processes import Call, WorkerPool
from slime.kit.readers.feed.work import Job, LoadedRow, Work, describe
from slime.kit.readers.light_tokenizer import recipe_of
from slime.kit.readers.reader import Reader
from slime.kit.readers.rows import PromptRow
from slime.kit.readers.tokenize import PromptFormat

#: seconds a job may take, and a worker to start
DEADLINE_S = 600.0
#: seconds the workers have to end
_CLOSE_S = 10.0
#: jobs handed out ahead, for each worker
_AHEAD = 2
# One thread each: the processes are what runs in parallel.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}

Answer = Callable[[], list[LoadedRow]]


class InProcess:
    """Does the work here, when it is wanted."""

    #: jobs that are worth submitting before they are wanted
    ahead = 0

    def __init__(self, work: Work) -> None:
        self._work = work

    def submit(self, job: Job) -> Answer:
        """What performs the job."""
        return lambda: self._work.perform(job)

    def close(self) -> None:
        """Nothing to end."""


class Workers:
    """A few processes that do the work; they end with `close`, and with this process, however that ends."""

    def __init__(
        self,
        count: int,
        readers: Sequence[Reader],
        tokenizer: Any,
        form: PromptFormat,
        max_tokens: int | None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Start `count` processes; they read `readers`. Raises `DataError` for a tokenizer that does not pickle."""
        self.ahead = _AHEAD * count
        self._readers = readers
        recipe = None if tokenizer is None else recipe_of(tokenizer, form)
        self._pool = WorkerPool(
            "the data workers",
            Call(f"{__name__}:build_handler", (list(readers), recipe, form, max_tokens)),
            Call(f"{__name__}:import_only"),
            size=count,
            timeout_s=deadline_s,
            startup_timeout_s=deadline_s,
            growth=1,
            env=_ONE_THREAD,
        )
        # A thread with an event loop of its own: rows are asked for by code that has none, or must not wait in it.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="data-workers", daemon=True).start()
        self._finalizer = weakref.finalize(self, _close, self._loop, self._pool)

    @property
    def pids(self) -> list[int]:
        """The processes that have been started."""
        return self._pool.pids

    def submit(self, job: Job) -> Answer:
        """Have the job done by the next process that is free; the answer waits for it.

        The answer raises `DataError`, with the files and lines, where the process ended or the deadline passed.
        """
        future = asyncio.run_coroutine_threadsafe(self._pool.call(pickle.dumps(job)), self._loop)

        def answer() -> list[LoadedRow]:
            try:
                content, _seconds = future.result()
            except SlimeError as error:
                raise DataError(
                    f"a data worker failed: {error}. It read {describe(job, self._readers)}."
                    " --num-data-workers 0 reads in the rollout process itself"
                ) from None
            return _unpack(content)

        return answer

    def close(self) -> None:
        """End the processes."""
        self._finalizer()


def _close(loop: asyncio.AbstractEventLoop, pool: WorkerPool) -> None:
    closing: Coroutine[Any, Any, None] = pool.close()
    asyncio.run_coroutine_threadsafe(closing, loop).result(_CLOSE_S)
    loop.call_soon_threadsafe(loop.stop)


# --- in the worker processes ---------------------------------------------------------------------


def import_only() -> None:
    """Nothing: importing this module is what takes time."""


def build_handler(
    _prepared: None, readers: list[Reader], recipe: Any, form: PromptFormat, max_tokens: int | None
) -> Callable[[bytes], bytes]:
    """What turns a pickled job into packed rows."""
    work = Work(readers, None if recipe is None else recipe.make(), form, max_tokens)
    return lambda job: _pack(work.perform(pickle.loads(job)))


def _pack(rows: Sequence[LoadedRow]) -> bytes:
    """Rows as plain tuples, and the tokens of all of them in one array: a fraction of the time that objects take."""
    tokens, lengths = array("i"), array("i")
    packed: list[tuple[object, ...]] = []
    for loaded in rows:
        row = loaded.row
        if row is None:
            packed.append((loaded.file, loaded.position, loaded.fault, loaded.reason))
            continue
        packed.append((loaded.file, loaded.position, row.prompt, row.label, row.metadata, row.tools))
        lengths.append(-1 if row.tokens is None else len(row.tokens))
        if row.tokens is not None:
            tokens.extend(row.tokens)
    return pickle.dumps((packed, lengths.tobytes(), tokens.tobytes()), protocol=5)


def _unpack(content: bytes) -> list[LoadedRow]:
    """What `_pack` packed."""
    packed, lengths_bytes, tokens_bytes = pickle.loads(content)
    lengths, tokens = array("i", lengths_bytes), array("i", tokens_bytes).tolist()
    rows: list[LoadedRow] = []
    begin, usable = 0, 0
    for values in packed:
        if len(values) == 4:
            file, position, fault, reason = values
            rows.append(LoadedRow(file, position, None, fault, reason))
            continue
        file, position, prompt, label, metadata, tools = values
        length = lengths[usable]
        usable += 1
        ids = None if length < 0 else tokens[begin : begin + length]
        begin += max(length, 0)
        rows.append(LoadedRow(file, position, PromptRow(prompt, label, metadata, "", tools, ids)))
    return rows
