"""Prompt files: every fault is found on opening, and reported with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.errors import DataError
from slime.kit.readers import PromptFile


def write(path: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def check(path: Path, **keys: Any) -> int:
    file = PromptFile(path, **{"input_key": "prompt", "label_key": "label", **keys})
    file.close()
    return len(file)


def open_file(path: Path, **keys: Any) -> PromptFile:
    return PromptFile(path, **{"input_key": "prompt", "label_key": "label", **keys})


def test_rows_are_counted_without_empty_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": "1"}, "", {"prompt": "b", "label": "2"}, "  ")
    assert check(path) == 2


def test_rows_are_read_on_demand_in_any_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"é{i}", "label": i, "metadata": {"n": i}} for i in range(5)]
    file = open_file(write(tmp_path / "p.jsonl", *rows[:2], "", *rows[2:]))
    assert [file[i].prompt for i in (4, 0, 2)] == ["é4", "é0", "é2"]
    assert file[2].where == f"{tmp_path}/p.jsonl:4"
    assert file[3].metadata == {"n": 3}
    assert [row.label for row in file] == ["0", "1", "2", "3", "4"]


def test_chat_prompts_stay_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    assert open_file(write(tmp_path / "p.jsonl", {"prompt": chat, "label": "x"}))[0].prompt == chat


def test_label_key_none_reads_no_label(tmp_path: Path) -> None:
    file = open_file(write(tmp_path / "p.jsonl", {"prompt": "a"}), label_key=None)
    assert file[0].label is None


def test_keys_can_be_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"question": "a", "answer": 2.5, "extra": {"k": 1}})
    row = open_file(path, input_key="question", label_key="answer", metadata_key="extra")[0]
    assert (row.prompt, row.label, row.metadata) == ("a", "2.5", {"k": 1})


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "label": "b"}\n')
    assert open_file(path)[0].prompt == "a"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        check(tmp_path / "nowhere.jsonl")


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder without files, expected a file of prompts or a data set"):
        check(tmp_path)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": "b"})
    with pytest.raises(DataError, match="inside cannot be read: Not a directory"):
        check(path / "inside")


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match="has no rows"):
        check(path)


GOOD = {"prompt": "a", "label": "b"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"prompt": "a", "label": ', r"p\.jsonl:2 is not valid JSON: .* at column \d+: \{"),
        ("[1, 2]", r"p\.jsonl:2 is a list, expected an object"),
        (
            '{"promt": "a", "label": "b"}',
            r":2 has no key 'prompt' \(--input-key\).*'promt', 'label'.*Did you mean promt\?",
        ),
        ('{"prompt": "a"}', r":2 has no key 'label' \(--label-key\)"),
        ('{"prompt": 7, "label": "b"}', r":2: 'prompt' is a number, expected a string or a list of chat messages"),
        ('{"prompt": "", "label": "b"}', r":2: 'prompt' is an empty string"),
        ('{"prompt": [], "label": "b"}', r":2: 'prompt' is an empty list"),
        ('{"prompt": ["hi"], "label": "b"}', r":2: 'prompt'\[0\] is a string, expected a message"),
        ('{"prompt": [{"role": "user"}], "label": "b"}', r"'prompt'\[0\] has the keys \['role'\], expected 'role'"),
        ('{"prompt": "a", "label": null}', r":2: 'label' is null, expected a string or a number"),
        ('{"prompt": "a", "label": true}', r":2: 'label' is a boolean"),
        ('{"prompt": "a", "label": "b", "metadata": [1]}', r":2: 'metadata' is a list, expected an object"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check(write(tmp_path / "p.jsonl", GOOD, bad, GOOD))


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": "b"}\n\x80\xff\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2 is not UTF-8"):
        check(path)


def test_data_errors_end_the_command_with_code_2() -> None:
    assert DataError("x").exit_code == 2
