"""The prompts of a run: the rows of its files, epoch after epoch, in proportion to their weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import CheckpointError, DataError
from slime.kit.context_length import longest_training_prompt
from slime.kit.readers.feed.feed_workers import FeedWorkers
from slime.kit.readers.feed.order import BlockOrder, Order, RowOrder
from slime.kit.readers.feed.work import AwaitedRows, LoadedRow, Work
from slime.kit.readers.light_tokenizer import lightest
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_file import LOGGED, PromptFile, leave_out
from slime.kit.readers.prompt_source import parse_sources
from slime.kit.readers.reader import BadRow, Reader
from slime.kit.readers.rows import Columns, PromptRow
from slime.kit.readers.tokenize import PLAIN, PromptFormat

if TYPE_CHECKING:
    from slime.config import RunConfig


@dataclass(frozen=True)
class FeedOptions:
    """How the files are read."""

    columns: Columns
    form: PromptFormat = PLAIN
    #: None: file order
    shuffle_seed: int | None = None
    streaming: bool = False
    workers: int = 0
    #: number of unusable rows to leave out; None: the first one raises
    max_bad_rows: int | None = None
    #: leave out prompts that are too long, instead of raising
    drop_overlong: bool = False
    #: most tokens a prompt may have; None: no limit
    max_tokens: int | None = None

    @classmethod
    def of(cls, config: RunConfig, tools: Sequence[Mapping[str, Any]] = ()) -> FeedOptions:
        """The options of a run whose prompts show the `tools` of its generator (`Context.prompt_tools`)."""
        data = config.data
        return cls(
            columns=Columns(data.input_key, data.label_key, data.metadata_key, data.tool_key),
            form=PromptFormat.of(data).showing(tools),
            shuffle_seed=data.rollout_seed if data.rollout_shuffle else None,
            streaming=data.streaming_data,
            workers=data.num_data_workers,
            max_bad_rows=data.max_bad_rows if data.bad_rows == "skip" else None,
            drop_overlong=data.overlong_prompts == "drop",
            max_tokens=longest_training_prompt(config),
        )


class Stream:
    """Reads rows in one order. Its state is an epoch and a position, whether workers perform the jobs or not."""

    def __init__(
        self,
        name: str,
        order: Order,
        performer: Work | FeedWorkers,
        readers: Sequence[Reader],
        options: FeedOptions,
    ) -> None:
        """Initialize.

        Args:
            name: The files, for messages.
            order: The order of rows.
            performer: Performs the jobs.
            readers: All files of the run.
            options: Which rows may be left out.
        """
        self._name, self._order, self._performer = name, order, performer
        self._readers, self._options = readers, options
        #: rows left out since the run began
        self.bad_rows = self.overlong = 0
        self.epoch = 0
        self._job = self._offset = 0
        self._bad_in_epoch = 0
        self._given_in_epoch = False
        self._rows: list[LoadedRow] | None = None
        self._loaded: Iterator[list[LoadedRow]] | None = None

    def next(self) -> PromptRow:
        """The next usable row. Raises `DataError` for an unusable one that may not be left out."""
        while True:
            if self._rows is None:
                self._rows = self._read()
            if self._offset == len(self._rows):
                self._advance()
                continue
            loaded = self._rows[self._offset]
            self._offset += 1
            if isinstance(loaded.row, BadRow):
                self._leave_out(loaded, loaded.row)
                continue
            self._given_in_epoch = True
            if self._options.streaming:  # lines are only counted for an error
                loaded.row.where = self._readers[loaded.file].where(loaded.position, exact=False)
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
        self._rows = self._loaded = None

    def _read(self) -> list[LoadedRow]:
        """The rows of the current job."""
        if self._job >= self._order.jobs(self.epoch):
            return []  # the saved position was right after the last row of an epoch
        if self._loaded is None:
            self._loaded = self._load_from(self.epoch, self._job)
        try:
            return next(self._loaded)
        except BaseException:
            self._loaded = None  # a retry must get this job, not the next one
            raise

    def _load_from(self, epoch: int, job: int) -> Iterator[list[LoadedRow]]:
        """Yield the rows of this job and all later ones; later jobs are submitted in advance."""
        submitted: deque[AwaitedRows] = deque()
        while True:
            submitted.append(self._performer.submit(self._order.job(epoch, job)))
            epoch, job = (epoch, job + 1) if job + 1 < self._order.jobs(epoch) else (epoch + 1, 0)
            if len(submitted) > self._performer.ahead:
                wait_for_rows = submitted.popleft()
                yield wait_for_rows()

    def _advance(self) -> None:
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

    def _leave_out(self, loaded: LoadedRow, row: BadRow) -> None:
        if row.overlong:
            if not self._options.drop_overlong:
                raise DataError(f"{self._readers[loaded.file].where(loaded.position)}{row.reason}")
            self.overlong += 1
            return
        self.bad_rows += 1
        self._bad_in_epoch += 1
        limit, log = self._options.max_bad_rows, self.bad_rows <= LOGGED
        leave_out(self._readers[loaded.file], loaded.position, row, self._bad_in_epoch, limit, log=log)


class PromptFeed:
    """The rows of a run's files, one after the other, tokenized if there is a tokenizer.

    Files without weights form one set of rows, in the order given or shuffled together. Files with weights take turns,
    each with its own order and epochs: of n rows, a file with share w has given w * n, to within one row. The order
    does not depend on `options.workers`.
    """

    def __init__(self, files: Sequence[str], options: FeedOptions, tokenizer: Any = None) -> None:
        """Open the files, and check their rows unless they are streamed.

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
        #: the files as sequences of rows; empty for a stream
        self.files: list[PromptFile] = []
        readers: list[Reader] = []
        with ExitStack() as opened:
            for source in sources:
                if options.streaming:
                    reader = open_reader(source, options.columns, by_block=True)
                else:
                    file = PromptFile(source, **asdict(options.columns), max_bad_rows=options.max_bad_rows)
                    self.files.append(file)
                    reader = file.reader
                opened.callback(reader.close)
                readers.append(reader)
            if options.workers and tokenizer is not None:
                tokenizer = lightest(tokenizer, options.form)
            work = Work(readers, tokenizer, options.form, options.max_tokens, locate=not options.streaming)
            #: performs the jobs, in this process or in workers
            self.performer: Work | FeedWorkers = work
            if options.workers:
                self.performer = FeedWorkers(options.workers, work)
                opened.callback(self.performer.close)
            self._opened = opened.pop_all()
        weights = [source.weight for source in sources if source.weight is not None]
        parts = [range(n, n + 1) for n in range(len(weights))] or [range(len(sources))]
        self._streams = []
        for number, part in enumerate(parts):
            seed = None
            if options.shuffle_seed is not None:
                seed = f"{options.shuffle_seed}/{number}" if number else f"{options.shuffle_seed}"
            order: Order
            if options.streaming:
                order = BlockOrder(readers, part, seed)
            else:
                positions = [file.positions for file in self.files]
                order = RowOrder(positions, part, seed, workers=options.workers > 0)
            name = ", ".join(str(sources[n]) for n in part)
            self._streams.append(Stream(name, order, self.performer, readers, options))
        #: the exact proportions of the weights, as integers
        self._shares = [int(weight * lcm(*(one.denominator for one in weights))) for weight in weights] or [1]
        self._credits = [0] * len(self._streams)

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
        bad_rows = sum(file.bad_rows for file in self.files) + sum(stream.bad_rows for stream in self._streams)
        metrics = {
            "data/epoch": float(min(stream.epoch for stream in self._streams)),
            "data/bad_rows": float(bad_rows),
            "data/overlong_prompts": float(sum(stream.overlong for stream in self._streams)),
        }
        if len(self._streams) > 1:
            metrics |= {f"data/epoch/{n}": float(stream.epoch) for n, stream in enumerate(self._streams)}
        return metrics

    def close(self) -> None:
        """End the workers and close the files."""
        self._opened.close()


class PromptDataset(PromptFeed):
    """The dataset that a custom data source reads.

    Rows come in file order, or in an order that depends on the seed and the epoch alone.
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
        """Open and check the files.

        Args:
            path: One file or several, as `--prompt-data` takes them.
            input_key: Key of the prompt.
            label_key: Key of the label; None if rows have no label.
            metadata_key: Key of the metadata.
            shuffle_seed: None: file order.
            options: Replaces all of the options above.
            tokenizer: If given, rows have tokens.

        Raises:
            DataError: A file is missing, unreadable, empty, or has too many unusable rows.
        """
        self.paths = [str(path)] if isinstance(path, str | Path) else list(path)
        options = options or FeedOptions(Columns(input_key, label_key, metadata_key), shuffle_seed=shuffle_seed)
        super().__init__(self.paths, options, tokenizer)
        self._streamed = options.streaming
        self._latest: dict[int, list[PromptRow]] = {}

    def __len__(self) -> int:
        self._require_numbers()
        return sum(len(file) for file in self.files)

    def __getitem__(self, number: int) -> PromptRow:
        """Row `number` of the files. Does not move the position of `rows`."""
        self._require_numbers()
        for file in self.files:
            if number < len(file):
                return file[number]
            number -= len(file)
        raise IndexError(f"{', '.join(self.paths)}: no row {number}")

    def rows(self, n: int) -> list[PromptRow]:
        """The next `n` rows; the next epoch follows the last row."""
        rows = [self.next() for _ in range(n)]
        self._latest = {}
        for row in rows:
            self._latest.setdefault(id(row.prompt), []).append(row)
        return rows

    def sample(self, n: int) -> list[str | list[dict[str, Any]]]:
        """The prompts of the next `n` rows."""
        return [row.prompt for row in self.rows(n)]

    def row_of(self, prompt: object) -> PromptRow | None:
        """The row whose prompt is this object, if `rows` returned it last; None for any other object.

        Raises:
            DataError: Rows with different labels or metadata share the object, as Python does with very short strings.
        """
        rows = self._latest.get(id(prompt), [])
        for row in rows[1:]:
            if (row.label, row.metadata) != (rows[0].label, rows[0].metadata):
                raise DataError(
                    f"{rows[0].where} and {row.where} have the same prompt {prompt!r} with different labels or"
                    " metadata; set both on the samples that get_samples returns"
                )
        return rows[0] if rows else None

    def _require_numbers(self) -> None:
        if self._streamed:
            raise DataError("a stream has no numbered rows: --streaming-data reads them in its own order")
