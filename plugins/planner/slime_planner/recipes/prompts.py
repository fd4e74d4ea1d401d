"""Prompt files that recipes name: where they are for slime, and how many prompts they have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_FILES = (".jsonl", ".json", ".parquet")


def place_of(recipe: Path, value: str) -> str:
    """The prompts of `value` for `--prompt-data`: files as they are, a name of the Hub as `hf://NAME`."""
    if (
        "://" in value
        or value.endswith(_FILES)
        or value.startswith(("/", "~", "."))
        or (recipe.parent / value).exists()
    ):
        return value
    return f"hf://{value}"


def count_prompts(recipe: Path, values: Sequence[str]) -> int | None:
    """The rows of local files; None if one of them is not here or is no JSONL or Parquet."""
    total = 0
    for value in values:
        path = recipe.parent / Path(value).expanduser()
        path = path if path.is_file() else Path(value).expanduser()
        if not path.is_file():
            return None
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                total += sum(1 for line in file if line.strip())
        elif path.suffix == ".parquet":
            total += _rows_of_parquet(path)
        else:
            return None
    return total or None


def _rows_of_parquet(path: Path) -> int:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        return int(parquet.read_metadata(path).num_rows)
    except (OSError, arrow.ArrowException):
        return 0
