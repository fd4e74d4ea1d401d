"""The prompts of a run: the rows of its files, epoch after epoch, in proportion to their weights."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.errors import CheckpointError, DataError
from slime.kit.readers.feed.order import BlockOrder, Order, RowOrder
from slime.kit.readers.feed.work import LoadedRow, Work
from slime.kit.readers.feed.workers import Answer, InProcess, Workers
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_file import LOGGED, PromptFile, bad_row_error
from slime.kit.readers.prompt_source import PromptSource, parse_sources
from slime.kit.readers.reader import Reader
from slime.kit.readers.rows import Columns, PromptRow
from slime.kit.readers.tokenize import PLAIN, PromptFormat

if TYPE_CHECKING:
    from slime.config.options import DataOptions


logger = logging.getLogger(__name__)


class Stream:
    """Reads rows in one order. Its state is an epoch and a position, whoever performs the jobs."""

    def __init__(
        self,
        order: Order,
        performer: InProcess | Workers,
        name: str,
        *,
        drop_overlong: bool,
        max_bad_rows: int | None,
    ) -> None:
        """Initialize.

        Args:
            order: The order of rows.
            performer: Performs the jobs.
            name: The files, for messages.
            drop_overlong: Leave out prompts that are too long, instead of raising.
            max_bad_rows: Unusable rows to leave out per epoch; None: the first one raises.
        """
        self._order, self._performer, self._name = order, performer, name
        self._drop_overlong, self._max_bad_rows = drop_overlong, max_bad_rows
        #: rows left out since the run began
        self.bad_rows = self.overlong = 0
        self.epoch = 0
        self._job = self._offset = 0
        self._bad_in_epoch = 0
        self._given_in_epoch = False
        self._rows: list[LoadedRow] | None = None
        self._begun: deque[tuple[int, int, Answer]] = deque()

    def next(self) -> PromptRow:
        """The next usable row. Raises `DataError` for an unusable one that may not be left out."""
        while True:
            if self._rows is None:
                self._rows = self._read()
            if self._offset == len(self._rows):
                self._turn()
                continue
            loaded = self._rows[self._offset]
            self._offset += 1
            if loaded.row is None:
                self._leave_out(loaded)
                continue
            self._given_in_epoch = True
            loaded.row.where = self._order.where(loaded, exact=False)
            return loaded.row

    def state_dict(self) -> dict[str, Any]:
        """The position of the next row, and counts of rows left out."""
        return {
            self._order.unit: self._order.size,
            "epoch": self.epoch,
            "position": self._order.position(self._job, self._offset),
            "bad_in_epoch": self._bad_in_epoch,
            "given_in_epoch": self._given_in_epoch,
            "bad_rows": self.bad_rows,
            "overlong": self.overlong,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if it belongs to other files."""
        unit, size = self._order.unit, self._order.size
        if state.get(unit) != size:
            was = f"a file of {state[unit]} {unit}" if unit in state else "data that was read differently"
            raise CheckpointError(
                f"the saved position is in {was}, but {self._name} has {size} {unit}."
                " Resume with the file the run was started with."
            )
        self.epoch = state["epoch"]
        self._job, self._offset = self._order.find(state["position"])
        self._bad_in_epoch, self._given_in_epoch = state["bad_in_epoch"], state["given_in_epoch"]
        self.bad_rows, self.overlong = state["bad_rows"], state["overlong"]
        self._rows = None
        self._begun.clear()

    def _read(self) -> list[LoadedRow]:
        """The rows of the current job; starts later jobs as well."""
        if self._job >= self._order.jobs(self.epoch):
            return []  # the saved position was right after the last row of an epoch
        if not self._begun:
            self._begin(self.epoch, self._job)
        while len(self._begun) <= self._performer.ahead:
            epoch, job, _ = self._begun[-1]
            later = job + 1 < self._order.jobs(epoch)
            self._begin(*((epoch, job + 1) if later else (epoch + 1, 0)))
        try:
            rows = self._begun[0][2]()
        except BaseException:
            self._begun.clear()  # a retry must get this job, not the next one
            raise
        self._begun.popleft()
        return rows

    def _begin(self, epoch: int, job: int) -> None:
        self._begun.append((epoch, job, self._performer.submit(self._order.job(epoch, job))))

    def _turn(self) -> None:
        """Advance to the next job, or to the next epoch."""
        self._rows, self._offset = None, 0
        self._job += 1
        if self._job < self._order.jobs(self.epoch):
            return
        if not self._given_in_epoch:
            raise DataError(
                f"{self._name} has no usable row: {self._bad_in_epoch} rows of an epoch were bad, and all others exceed"
                " the limit of tokens"
            )
        self.epoch, self._job = self.epoch + 1, 0
        self._bad_in_epoch, self._given_in_epoch = 0, False

    def _leave_out(self, loaded: LoadedRow) -> None:
        if loaded.fault == "overlong":
            if not self._drop_overlong:
                raise DataError(f"{self._order.where(loaded, exact=True)}{loaded.reason}")
            self.overlong += 1
            return
        self.bad_rows += 1
        self._bad_in_epoch += 1
        refused = self._max_bad_rows is None or self._bad_in_epoch > self._max_bad_rows
        if refused or self.bad_rows <= LOGGED:
            message = f"{self._order.where(loaded, exact=True)}{loaded.reason}"
            if refused:
                raise bad_row_error(message, self._bad_in_epoch, self._max_bad_rows)
            logger.warning("left out: %s", message)


@dataclass(frozen=True)
class FeedOptions:
    """How the files are read."""

    columns: Columns
    form: PromptFormat = PLAIN
    #: None: file order
    shuffle_seed: int | None = None
    streaming: bool = False
    workers: int = 0
    bad_rows: Literal["stop", "skip"] = "stop"
    max_bad_rows: int = 0
    overlong: Literal["error", "drop"] = "error"
    #: most tokens a prompt may have; None: no limit
    max_tokens: int | None = None

    @classmethod
    def of(cls, data: DataOptions, max_tokens: int | None) -> FeedOptions:
        """The options that a run states."""
        return cls(
            columns=Columns(data.input_key, data.label_key, data.metadata_key, data.tool_key),
            form=PromptFormat.of(data),
            shuffle_seed=data.rollout_seed if data.rollout_shuffle else None,
            streaming=data.streaming_data,
            workers=data.num_data_workers,
            bad_rows=data.bad_rows,
            max_bad_rows=data.max_bad_rows,
            overlong=data.overlong_prompts,
            max_tokens=max_tokens,
        )


class PromptFeed:
    """The rows of a run's files, one after the other, tokenized if there is a tokenizer.

    Files without weights form one set of rows, in the order given or shuffled together. Files with weights take turns,
    each with its own order and epochs: of n rows, a file with share w has given w * n, to within one row. The order
    does not depend on `options.workers`.
    """

    def __init__(self, files: Sequence[str], options: FeedOptions, tokenizer: Any = None) -> None:
        """Initialize.

        Args:
            files: The files, as `--prompt-data` takes them.
            options: How to read them.
            tokenizer: None: rows get no tokens.

        Raises:
            DataError: A file is missing, unreadable, empty, or has too many unusable rows.
        """
        sources = parse_sources(files)
        if not sources:
            raise DataError("there are no prompt files")
        mixed = sources[0].weight is not None
        self.options = options
        self._prompt_files: list[PromptFile] = []
        self._readers: list[Reader] = []
        try:
            for source in sources:
                self._open(source)
            self._performer: InProcess | Workers
            if options.workers:
                self._performer = Workers(options.workers, self._readers, tokenizer, options.form, options.max_tokens)
            else:
                self._performer = InProcess(Work(self._readers, tokenizer, options.form, options.max_tokens))
        except BaseException:
            for reader in self._readers:
                reader.close()
            raise
        parts = [range(n, n + 1) for n in range(len(sources))] if mixed else [range(len(sources))]
        self._names = [", ".join(str(sources[n]) for n in part) for part in parts]
        self._streams = [self._stream(part, number if mixed else None) for number, part in enumerate(parts)]
        self._shares = _whole_numbers(
            [source.weight for source in sources if source.weight is not None] or [Fraction(1)]
        )
        self._credits = [0] * len(self._streams)
        self._dropped_at_opening = sum(file.bad_rows for file in self._prompt_files)

    @property
    def files(self) -> list[PromptFile]:
        """The files as sequences of rows; empty for a stream."""
        return self._prompt_files

    @property
    def performer(self) -> InProcess | Workers:
        """Whatever performs the reading: this process or workers."""
        return self._performer

    def next(self) -> PromptRow:
        """The next usable row. Raises `DataError`; see `Stream.next`."""
        # Each row credits every stream with its share and charges the chosen one a whole row. Among the streams with
        # credit, choose the one that would first be owed a whole row: Pfair scheduling, earliest deadline first
        # (Baruah et al. 1996), which keeps every stream within one row of its share.
        whole = sum(self._shares)
        owed = [credit + share for credit, share in zip(self._credits, self._shares, strict=True)]
        chosen = min(
            (n for n, due in enumerate(owed) if due > 0), key=lambda n: (-((owed[n] - whole) // self._shares[n]), n)
        )
        row = self._streams[chosen].next()
        owed[chosen] -= whole
        self._credits = owed
        return row

    def state_dict(self) -> dict[str, Any]:
        """The position of the next row."""
        return {"streams": [stream.state_dict() for stream in self._streams], "credits": list(self._credits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if it belongs to other files."""
        if len(state["streams"]) != len(self._streams):
            raise CheckpointError(
                f"the saved position is in a mixture of {len(state['streams'])} files, but this run mixes"
                f" {len(self._streams)}. Resume with the files the run was started with."
            )
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
        self._credits = list(state["credits"])

    def metrics(self) -> dict[str, float]:
        """`data/...`: epochs started, and rows left out since the run began."""
        metrics = {
            "data/epoch": float(min(stream.epoch for stream in self._streams)),
            "data/bad_rows": float(self._dropped_at_opening + sum(stream.bad_rows for stream in self._streams)),
            "data/overlong_prompts": float(sum(stream.overlong for stream in self._streams)),
        }
        if len(self._streams) > 1:
            metrics |= {f"data/epoch/{n}": float(stream.epoch) for n, stream in enumerate(self._streams)}
        return metrics

    def close(self) -> None:
        """End the workers and close the files."""
        self._performer.close()
        for reader in self._readers:
            reader.close()

    def _open(self, source: PromptSource) -> None:
        options, columns = self.options, self.options.columns
        if options.streaming:
            self._readers.append(open_reader(source, columns, by_block=True))
            return
        file = PromptFile(
            source,
            input_key=columns.input_key,
            label_key=columns.label_key,
            metadata_key=columns.metadata_key,
            tool_key=columns.tool_key,
            bad_rows=options.bad_rows,
            max_bad_rows=options.max_bad_rows,
        )
        self._prompt_files.append(file)
        self._readers.append(file.reader)

    def _stream(self, part: range, number: int | None) -> Stream:
        options = self.options
        seed = None
        if options.shuffle_seed is not None:
            seed = f"{options.shuffle_seed}" if not number else f"{options.shuffle_seed}/{number}"
        order: Order
        if options.streaming:
            order = BlockOrder([self._readers[n] for n in part], part.start, seed)
        else:
            order = RowOrder([self._prompt_files[n] for n in part], part.start, seed)
        return Stream(
            order,
            self._performer,
            self._names[number or 0],
            drop_overlong=options.overlong == "drop",
            max_bad_rows=options.max_bad_rows if options.bad_rows == "skip" else None,
        )


def _whole_numbers(weights: Sequence[Fraction]) -> list[int]:
    """The exact proportions of the weights, as integers."""
    common = lcm(*(weight.denominator for weight in weights))
    return [int(weight * common) for weight in weights]


class PromptDataset:
    """The dataset that a custom data source reads.

    Rows come in file order, or in an order that depends on the seed and the epoch alone. The files are opened and
    checked on first use, which raises `DataError` if something is wrong with them.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str],
        *,
        input_key: str = "prompt",
        label_key: str | None = "label",
        metadata_key: str = "metadata",
        shuffle_seed: int | None = None,
        options: FeedOptions | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Initialize.

        Args:
            path: One file or several, as `--prompt-data` takes them.
            input_key: Key of the prompt.
            label_key: Key of the label; None if rows have no label.
            metadata_key: Key of the metadata.
            shuffle_seed: None: file order.
            options: Replaces all of the options above.
            tokenizer: Given one, rows have tokens.
        """
        self.paths = [str(path)] if isinstance(path, str | Path) else list(path)
        self._options = options or FeedOptions(Columns(input_key, label_key, metadata_key), shuffle_seed=shuffle_seed)
        self._tokenizer = tokenizer
        self._latest: dict[int, PromptRow] = {}

    def __len__(self) -> int:
        return sum(len(file) for file in self._files())

    def __getitem__(self, number: int) -> PromptRow:
        """Row `number` of the files. Does not move the position of `rows`."""
        for file in self._files():
            if number < len(file):
                return file[number]
            number -= len(file)
        raise IndexError(f"{', '.join(self.paths)}: no row {number}")

    def rows(self, n: int) -> list[PromptRow]:
        """The next `n` rows; the next epoch follows the last row."""
        rows = [self._feed.next() for _ in range(n)]
        self._latest = {id(row.prompt): row for row in rows}
        return rows

    def sample(self, n: int) -> list[str | list[dict[str, Any]]]:
        """The prompts of the next `n` rows."""
        return [row.prompt for row in self.rows(n)]

    def row_of(self, prompt: object) -> PromptRow | None:
        """The row, of those that `rows` returned last, whose prompt is this object; None for any other object."""
        return self._latest.get(id(prompt))

    def state_dict(self) -> dict[str, Any]:
        """The position of the next row."""
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if it belongs to other files."""
        self._feed.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """`data/...`: see `PromptFeed.metrics`."""
        return self._feed.metrics()

    def close(self) -> None:
        """End the workers and close the files."""
        if "_feed" in self.__dict__:
            self._feed.close()

    @cached_property
    def _feed(self) -> PromptFeed:
        return PromptFeed(self.paths, self._options, self._tokenizer)

    def _files(self) -> Sequence[PromptFile]:
        if self._options.streaming:
            raise DataError("a stream has no numbered rows: --streaming-data reads them in its own order")
        return self._feed.files
