"""Hugging Face `datasets`: folders made by `save_to_disk`, folders of files, and names on the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from slime.errors import DataError, did_you_mean
from slime.kit.readers.keys import find, nested_fields
from slime.kit.readers.prompt_source import HUB
from slime.kit.readers.reader import BadRow, TableReader, unreadable
from slime.kit.readers.rows import Columns
from slime.kit.readers.table_values import has_short_floats, shortest, whole_beyond_floats

_CHOICES = ("config", "split")


class HuggingFaceRows(TableReader):
    """A `datasets.Dataset`, backed by Arrow files on disk."""

    def __init__(self, name: str, dataset: Any, columns: Columns) -> None:
        """Raises `DataError` if a column is missing."""
        schema = dataset.features.arrow_schema
        fields = nested_fields(schema)
        super().__init__(name, columns, len(dataset), fields)
        names = columns.of_table(fields, name)
        self._dataset = dataset.select_columns(names).with_format(None)
        #: the types of the columns in which floats must be shortened
        self._short = {one: kind for one in names if has_short_floats(kind := schema.field(one).type)}
        #: whether `datasets` read JSON, and made floats of the integers that it cannot hold
        self._of_json = dataset.info.builder_name == "json"

    def values_at(self, numbers: Sequence[int]) -> list[dict[str, Any] | BadRow]:
        """Rows as dictionaries."""
        try:
            columns: dict[str, list[Any]] = self._dataset[list(numbers)]
        except (ValueError, OverflowError) as error:
            if len(numbers) == 1:
                return [unreadable(error)]
            return [row for number in numbers for row in self.values_at([number])]
        for column, kind in self._short.items():
            columns[column] = [shortest(value, kind) for value in columns[column]]
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return [self._with_digits(row) if self._of_json else row for row in rows]

    def _with_digits(self, row: dict[str, Any]) -> dict[str, Any] | BadRow:
        keys = [key for key in (self.columns.label_key, self.columns.metadata_key) if key is not None]
        lost = next((lost for key in keys if (lost := whole_beyond_floats(find(row, key))) is not None), None)
        if lost is None:
            return row
        return BadRow(
            f": a number of more than 64 bits was read as {lost!r}: the library `datasets` does not keep its digits."
            " Name the JSON lines file instead of its folder"
        )


def open_hugging_face(name: str, path: str, columns: Columns) -> HuggingFaceRows:
    """Open `FOLDER[?split=S&config=C]` or `hf://NAME[?...]`.

    Raises:
        DataError: The folder holds no data set, the split does not exist or must be chosen, or the Hub cannot be
            reached.
    """
    location, _, query = path.partition("?")
    chosen = dict(parse_qsl(query, keep_blank_values=True))
    for key in chosen:
        if key not in _CHOICES:
            raise DataError(f"{name}: got {key!r} after the question mark, expected {' or '.join(_CHOICES)}")
    folder = None if location.startswith(HUB) else Path(location)
    try:
        loaded = _load(location, folder, chosen.get("config"))
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary around the library, whose errors come from many others
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if folder is None:
            raise DataError(
                f"{name} cannot be fetched from the Hugging Face Hub: {reason}. Without a network, download the data"
                " set elsewhere and name its folder"
            ) from None
        raise DataError(f"{name} is a folder without a readable data set: {reason}") from None
    return HuggingFaceRows(name, _split(name, loaded, chosen.get("split")), columns)


def _load(location: str, folder: Path | None, config: str | None) -> Any:
    import datasets

    if folder is not None and ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
        return datasets.load_from_disk(str(folder))
    if folder is not None and not any(one.is_file() for one in folder.rglob("*.*")):
        raise DataError(f"{location} is a folder without files, expected a file of prompts or a data set")
    return datasets.load_dataset(location.removeprefix(HUB), config)


def _split(name: str, loaded: Any, split: str | None) -> Any:
    if not isinstance(loaded, dict):
        if split is not None:
            raise DataError(f"{name} has no splits to choose from: drop ?split={split}")
        return loaded
    if split is None:
        split = next(iter(loaded)) if len(loaded) == 1 else "train"
    if split not in loaded:
        raise DataError(
            f"{name} has no split {split!r}. Its splits: {', '.join(loaded)}; choose one with"
            f" ?split=NAME.{did_you_mean(split, loaded)}"
        )
    return loaded[split]
