"""Prompts read and tokenized per second, and memory use for a file larger than memory.

    python benchmarks/bench_data.py [--rows 200000] [--workers 0 1 2] [--big-gb 5] [--folder /tmp]

The tokenizer is a byte-level BPE, trained on the sources of the standard library. Prompts have about 30, 120 and 2,000
characters. The big file is written to the folder, read with --streaming-data, checked as in `slime train --dry-run`,
and deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.kit.readers import FeedOptions, PromptFeed
from slime.kit.readers.feed.feed_workers import FeedWorkers
from slime.kit.readers.rows import Columns
from slime.kit.readers.tokenize import PromptFormat

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 16_384


class FastTokenizer:
    """A trained tokenizer with the methods that slime uses."""

    chat_template = TEMPLATE
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012 - never changed

    def __init__(self, backend: Any) -> None:
        self.backend_tokenizer = backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        turns = "".join(f"<|im_start|>{one['role']}\n{one['content'].strip()}<|im_end|>\n" for one in messages)
        return turns + "<|im_start|>assistant\n"


def corpus() -> list[str]:
    """Lines from the sources of the standard library."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    return [line.strip() for path in files for line in path.read_text(errors="replace").splitlines() if line.strip()]


def trained(lines: list[str]) -> FastTokenizer:
    """A byte-level BPE, trained on these lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(lines, trainer)
    return FastTokenizer(backend)


def questions(lines: list[str], rows: int, characters: int) -> Iterator[dict[str, Any]]:
    """Rows with prompts of about `characters` characters."""
    rng = random.Random(0)
    for number in range(rows):
        text = f"Question {number}:"
        while len(text) < characters:
            text += " " + rng.choice(lines)
        yield {"prompt": text[:characters], "label": str(number), "metadata": {"source": "made up"}}


def write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=16_384)
    return path


def options(*, workers: int, streaming: bool, chat: bool) -> FeedOptions:
    return FeedOptions(
        Columns("prompt", "label"),
        PromptFormat(apply_chat_template=chat),
        shuffle_seed=0,
        streaming=streaming,
        workers=workers,
        max_tokens=8192,
    )


@dataclass(frozen=True)
class Speed:
    """The speed of reading prompts."""

    per_second: float
    first_s: float  #: seconds to the first prompt
    own_us: float  #: CPU time per prompt in the reading process
    worker_us: float  #: CPU time per prompt in all workers together


def cpu_seconds(pid: int | str) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def speed(path: Path, rows: int, tokenizer: FastTokenizer, how: FeedOptions) -> Speed:
    """Measure reading nine tenths of the rows, after the first tenth."""
    began = time.perf_counter()
    feed = PromptFeed([str(path)], how, tokenizer)
    try:
        feed.next()
        first = time.perf_counter() - began
        for _ in range(min(rows // 10, 10_000)):
            feed.next()
        pids = feed.performer.pids if isinstance(feed.performer, FeedWorkers) else []
        measured = rows - rows // 10
        began, own, others = time.perf_counter(), time.process_time(), sum(map(cpu_seconds, pids))
        for _ in range(measured):
            feed.next()
        seconds = time.perf_counter() - began
        return Speed(
            measured / seconds,
            first,
            (time.process_time() - own) / measured * 1e6,
            (sum(map(cpu_seconds, pids)) - others) / measured * 1e6,
        )
    finally:
        feed.close()


@contextmanager
def big_file(folder: Path, lines: list[str], gigabytes: float) -> Iterator[Path]:
    """Repeat rows until the file is large enough."""
    piece = "".join(json.dumps(row) + "\n" for row in questions(lines, 40_000, 200)).encode()
    path = folder / "big.jsonl"
    try:
        with path.open("wb") as file:
            for _ in range(int(gigabytes * 1e9 / len(piece)) + 1):
                file.write(piece)
        yield path
    finally:
        path.unlink(missing_ok=True)


def peak_mib(pid: int | str) -> float:
    """Peak resident memory of a process so far, without mapped files."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(status["VmHWM"].split()[0]) / 1024


def draw_big(path: str, definition: str, workers: int, rows: int) -> None:
    """In a separate process: memory while rows are read from a stream."""
    from tokenizers import Tokenizer

    tokenizer = FastTokenizer(Tokenizer.from_file(definition))
    before = peak_mib("self")
    began = time.perf_counter()
    feed = PromptFeed([path], options(workers=workers, streaming=True, chat=False), tokenizer)
    feed.next()
    first = time.perf_counter() - began
    peaks = []
    for _ in range(2):
        for _ in range(rows // 2):
            feed.next()
        own = [peak_mib(pid) for pid in feed.performer.pids] if isinstance(feed.performer, FeedWorkers) else []
        peaks.append((peak_mib("self"), max(own, default=0.0)))
    print(json.dumps({"first": first, "before": before, "half": peaks[0], "end": peaks[1]}))
    feed.close()


def measure_big(folder: Path, lines: list[str], definition: Path, args: argparse.Namespace) -> None:
    with big_file(folder, lines, args.big_gb) as path:
        size = path.stat().st_size / 1e9
        print(f"\nA file of {size:.1f} GB with --streaming-data, {args.big_rows:,} prompts drawn, shuffled\n")
        print("| workers | s to the first | MiB before | MiB after half | MiB at the end | MiB per worker |")
        print("| --- | --- | --- | --- | --- | --- |")
        for workers in args.workers:
            command = [sys.executable, __file__, "--draw-big", str(path), str(definition), str(workers)]
            done = subprocess.run(
                [*command, str(args.big_rows)], capture_output=True, text=True, timeout=1800, check=True
            )
            row = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {workers} | {row['first']:.2f} | {row['before']:.0f} | {row['half'][0]:.0f} | {row['end'][0]:.0f}"
                f" | {row['end'][1]:.0f} |"
            )
        from tokenizers import Tokenizer

        from slime.cli.preflight_data import PromptSet, look
        from slime.kit.readers.prompt_source import parse_source

        began = time.perf_counter()
        facts = look(
            parse_source(str(path)),
            PromptSet("training", [str(path)], Columns("prompt", "label")),
            FastTokenizer(Tokenizer.from_file(str(definition))),
            limit=8192,
        )
        print(f"\nCheck as in a dry run: {time.perf_counter() - began:.2f} s ({facts})")


def measure_speed(folder: Path, lines: list[str], tokenizer: FastTokenizer, args: argparse.Namespace) -> None:
    print(f"{args.rows:,} rows, byte-level BPE of {VOCABULARY:,} tokens\n")
    print(
        "| file | prompt | template | read | workers | prompts/s | CPU µs per prompt, this process | all workers"
        " | s to the first |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for characters, rows in ((30, args.rows), (120, args.rows), (2_000, args.rows // 10)):
        jsonl = write_jsonl(folder / f"{characters}.jsonl", questions(lines, rows, characters))
        parquet = write_parquet(folder / f"{characters}.parquet", questions(lines, rows, characters))
        sample = [row["prompt"] for row in questions(lines, 200, characters)]
        tokens = sum(map(len, (tokenizer.encode(text, add_special_tokens=False) for text in sample))) / 200
        for path, chat, streaming in (
            (jsonl, False, False),
            (jsonl, True, False),
            (jsonl, False, True),
            (parquet, False, True),
            (parquet, False, False),
        ):
            for workers in args.workers:
                how = options(workers=workers, streaming=streaming, chat=chat)
                found = speed(path, rows, tokenizer, how)
                way, kind = "streamed" if streaming else "whole", path.suffix[1:]
                print(
                    f"| {kind} | {tokens:.0f} tokens | {'chat' if chat else 'none'} | {way} | {workers} |"
                    f" {found.per_second:,.0f} | {found.own_us:.1f} | {found.worker_us:.1f} |"
                    f" {found.first_s:.2f} |",
                    flush=True,
                )


def main() -> None:
    if sys.argv[1:2] == ["--draw-big"]:
        draw_big(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="0: no table of speeds")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--big-gb", type=float, default=5.0, help="0: no big file")
    parser.add_argument("--big-rows", type=int, default=400_000)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        lines = corpus()
        tokenizer = trained(lines)
        definition = folder / "tokenizer.json"
        tokenizer.backend_tokenizer.save(str(definition))
        if args.rows:
            measure_speed(folder, lines, tokenizer, args)
        if args.big_gb:
            measure_big(folder, lines, definition, args)


if __name__ == "__main__":
    main()
