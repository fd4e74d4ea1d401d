"""Prompt files of every format with the same rows, and a tokenizer that is quick to make."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.kit.readers import FeedOptions, PromptFeed, PromptRow
from slime.kit.readers.rows import Columns

FORMATS = ("jsonl", "gz", "parquet", "folder")
COLUMNS = Columns("prompt", "label")


class Letters:
    """A tokenizer with one id per character."""

    chat_template = "{{ messages }} {{ tools }}"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = (), mood: str = "", **_: Any
    ) -> str:
        names = "".join(f"[{tool['name']}]" for tool in tools)
        return names + mood + "".join(f"<{message['content']}>" for message in messages)


def numbered(rows: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows whose prompts are their numbers."""
    return [{"prompt": f"q{n}", "label": str(n), "metadata": {"row": n}} for n in range(first, first + rows)]


def write_rows(folder: Path, kind: str, rows: Sequence[Any], *, name: str = "p", group: int = 100) -> Path:
    """Write a file; JSONL `rows` may be lines of text. `group`: rows of a Parquet row group."""
    if kind in ("jsonl", "gz"):
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
        path = folder / f"{name}.jsonl{'.gz' if kind == 'gz' else ''}"
        path.write_bytes(gzip.compress(text) if kind == "gz" else text)
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
    else:
        import datasets

        path = folder / name
        datasets.Dataset.from_list(list(rows)).save_to_disk(path)
    return path


def feed(*files: Any, tokenizer: Any = None, columns: Columns = COLUMNS, **options: Any) -> PromptFeed:
    """A feed of these files."""
    return PromptFeed([str(file) for file in files], FeedOptions(columns, **options), tokenizer or Letters())


def draw(source: PromptFeed, n: int) -> list[PromptRow]:
    """The next `n` rows."""
    return [source.next() for _ in range(n)]


def prompts(rows: Sequence[PromptRow]) -> list[Any]:
    """The prompts of rows."""
    return [row.prompt for row in rows]
