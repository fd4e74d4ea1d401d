"""The prompts of a run: its files, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

from slime.data.dataset import PromptFile
from slime.data.feed.order import BlockOrder, Order, RowOrder
from slime.data.feed.stream import Stream
from slime.data.feed.work import Work
from slime.data.feed.workers import InProcess, Workers
from slime.data.prompt_source import PromptSource, parse_sources
from slime.data.readers.opening import open_reader
from slime.data.readers.reader import Reader
from slime.data.rows import Columns, PromptRow
from slime.data.tokenize import PLAIN, PromptFormat
from slime.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from slime.config.options import DataOptions


@dataclass(frozen=True)
class FeedOptions:
    """How the files are read."""

    columns: Columns
    form: PromptFormat = PLAIN
    #: None: as the rows stand
    shuffle_seed: int | None = None
    streaming: bool = False
    workers: int = 0
    bad_rows: Literal["stop", "skip"] = "stop"
    max_bad_rows: int = 0
    overlong: Literal["error", "drop"] = "error"
    #: tokens a prompt may have; None: any number
    max_tokens: int | None = None

    @classmethod
    def of(cls, data: DataOptions, max_tokens: int | None) -> FeedOptions:
        """As a run states it."""
        return cls(
            columns=columns_of(data),
            form=PromptFormat.of(data),
            shuffle_seed=data.rollout_seed if data.rollout_shuffle else None,
            streaming=data.streaming_data,
            workers=data.num_data_workers,
            bad_rows=data.bad_rows,
            max_bad_rows=data.max_bad_rows,
            overlong=data.overlong_prompts,
            max_tokens=max_tokens,
        )


def columns_of(data: DataOptions) -> Columns:
    """The keys that a run states."""
    return Columns(data.input_key, data.label_key, data.metadata_key, data.tool_key)


class PromptFeed:
    """Hands out rows, tokenised where there is a tokenizer.

    Files without weights are one set of rows, in the order in which they are named or shuffled together.  Files with
    weights are drawn from in turn, each in its own order and epochs: after n draws a file of share w has given w * n
    rows, to within one.  Nothing of that depends on `options.workers`.
    """

    def __init__(self, files: Sequence[str], options: FeedOptions, tokenizer: Any = None) -> None:
        """`files` as `--prompt-data` names them.  Raises `DataError` for what is wrong with them."""
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
        """The files as sequences of rows; none of a stream."""
        return self._prompt_files

    @property
    def performer(self) -> InProcess | Workers:
        """Who reads."""
        return self._performer

    def next(self) -> PromptRow:
        """The next usable row.  Raises `DataError`; see `Stream.next`."""
        # Every draw brings each stream its share, and the one that gives a row pays with the whole.  Of those that are
        # owed something it is the one that would soonest be owed a whole row: Pfair scheduling with the earliest
        # deadline first (Baruah et al. 1996), by which none is ever a row ahead or behind.
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
        """Where the next draw begins."""
        return {"streams": [stream.state_dict() for stream in self._streams], "credits": list(self._credits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw from there.  Raises `CheckpointError` where the place is in other files."""
        if len(state["streams"]) != len(self._streams):
            raise CheckpointError(
                f"the saved place is in a mixture of {len(state['streams'])} files, and {len(self._streams)} are mixed"
                " here. Resume with the files the run was started with."
            )
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
        self._credits = list(state["credits"])

    def metrics(self) -> dict[str, float]:
        """`data/...`: epochs begun, and rows left out since the run began."""
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
    """The weights' proportions, exactly."""
    common = lcm(*(weight.denominator for weight in weights))
    return [int(weight * common) for weight in weights]
