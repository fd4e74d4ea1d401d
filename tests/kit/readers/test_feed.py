"""The order of prompts depends on seed and epoch alone, and a saved position continues it, with or without workers."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.prompt_files import FORMATS, Letters, draw, feed, numbered, prompts, write_rows

from slime.errors import CheckpointError, DataError
from slime.kit.readers import json_lines
from slime.kit.readers.feed import order
from slime.kit.readers.feed.work import LoadedRow
from slime.kit.readers.reader import BadRow
from slime.kit.readers.rows import Columns, PromptRow
from slime.kit.readers.tokenize import PromptFormat


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks, windows and jobs so small that a few rows fill many of them."""
    monkeypatch.setattr(json_lines, "BLOCK", 64)
    monkeypatch.setattr(order, "WINDOW", 3)
    monkeypatch.setattr(order, "CHUNK", 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of 40 and 25 rows in every format; in each, row 3 is bad and the last row too long."""
    made = tmp_path_factory.mktemp("files")
    for name, first, rows in (("a", 0, 40), ("b", 100, 25)):
        content: list[Any] = numbered(rows, first)
        content[3] = {"prompt": "", "label": "3", "metadata": {"row": 3}}
        content[-1] = {"prompt": "x" * 99, "label": "x", "metadata": {"row": 0}}
        for kind in FORMATS:
            write_rows(made, kind, content, name=name, group=10)
    return made


def paths(folder: Path, kind: str) -> tuple[Path, Path]:
    ending = {"jsonl": ".jsonl", "gz": ".jsonl.gz", "parquet": ".parquet", "folder": ""}[kind]
    return folder / f"a{ending}", folder / f"b{ending}"


TOLERANT: dict[str, Any] = {"max_bad_rows": 9, "drop_overlong": True, "max_tokens": 50}
USABLE_A = [f"q{n}" for n in range(39) if n != 3]
USABLE_B = [f"q{n}" for n in range(100, 124) if n != 103]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("streaming", [False, True])
def test_several_files_are_one_set_in_every_format(folder: Path, kind: str, streaming: bool) -> None:
    with closing(feed(*paths(folder, kind), streaming=streaming, **TOLERANT)) as source:
        epoch = prompts(draw(source, 61))
        assert epoch == USABLE_A + USABLE_B
        assert prompts(draw(source, 2)) == ["q0", "q1"]
        assert source.metrics() == {"data/epoch": 1.0, "data/bad_rows": 2.0, "data/overlong_prompts": 2.0}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_shuffled_epoch_has_every_row_once_in_another_order(folder: Path, kind: str, streaming: bool) -> None:
    files = paths(folder, kind)
    with closing(feed(*files, streaming=streaming, shuffle_seed=5, **TOLERANT)) as source:
        epochs = [prompts(draw(source, 61)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(USABLE_A + USABLE_B) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    with closing(feed(*files, streaming=streaming, shuffle_seed=6, **TOLERANT)) as other:
        assert prompts(draw(other, 61)) not in epochs


def test_a_shuffled_stream_mixes_rows_of_several_blocks(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", [{"prompt": f"{n} " + "x" * 900, "label": ""} for n in range(2000)])
    with closing(feed(path, streaming=True, shuffle_seed=0)) as source:
        first = [int(prompt.split()[0]) for prompt in prompts(draw(source, 200))]
    # 2 MB are 28 blocks of 71 rows; 16 of them are shuffled together.
    assert len({number // 72 for number in first}) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle_seed", [None, 4])
def test_large_row_groups_are_streamed_in_parts(tmp_path: Path, shuffle_seed: int | None, workers: int) -> None:
    path = write_rows(tmp_path, "parquet", numbered(3000), group=2500)
    options: dict[str, Any] = {"streaming": True, "shuffle_seed": shuffle_seed, "workers": workers}
    with closing(feed(path, **options)) as source, closing(feed(path, streaming=True)) as in_order:
        first = prompts(draw(source, 1300))
        state = json.loads(json.dumps(source.state_dict()))
        rest = prompts(draw(source, 1700))
        expected = prompts(draw(in_order, 3000))
    assert sorted(first + rest) == sorted(expected)
    assert (first + rest == expected) == (shuffle_seed is None)
    with closing(feed(path, **options)) as resumed:
        resumed.load_state_dict(state)
        assert prompts(draw(resumed, 1700)) == rest


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("streaming", [False, True])
def test_every_draw_keeps_the_weights_exactly(folder: Path, streaming: bool) -> None:
    a, b = paths(folder, "jsonl")
    with closing(feed(f"{a}=0.7", f"{b}=0.3", streaming=streaming, shuffle_seed=1, **TOLERANT)) as source:
        of_b = [int(prompt[1:]) >= 100 for prompt in prompts(draw(source, 400))]
    for n in range(1, 401):
        assert abs(sum(of_b[:n]) - 0.3 * n) < 1
    assert sum(of_b) == 120


@pytest.mark.usefixtures("small_pieces")
def test_each_file_of_a_mixture_has_its_own_epochs(folder: Path) -> None:
    a, b = paths(folder, "jsonl")
    with closing(feed(f"{a}=1", f"{b}=1", **TOLERANT)) as source:
        drawn = prompts(draw(source, 2 * 50))
        assert drawn[0::2] == [*USABLE_A, *USABLE_A][:50] and drawn[1::2] == (3 * USABLE_B)[:50]
        assert source.metrics()["data/epoch/0"] == 1 and source.metrics()["data/epoch/1"] == 2


def test_every_file_of_many_stays_within_one_prompt_of_its_share(tmp_path: Path) -> None:
    weights = [
        300,
        1,
        1,
        3,
        40,
        3,
        300,
        40,
        3,
    ]  # always choosing the file that is owed most would leave one 1.4 prompts behind
    files = [write_rows(tmp_path, "jsonl", numbered(1, n), name=f"f{n}") for n in range(len(weights))]
    with closing(feed(*(f"{file}={weight}" for file, weight in zip(files, weights, strict=True)))) as source:
        given = Counter[int]()
        for n, prompt in enumerate(prompts(draw(source, 2 * sum(weights))), start=1):
            given[int(prompt[1:])] += 1
            assert all(abs(given[k] - n * weight / sum(weights)) < 1 for k, weight in enumerate(weights))


@pytest.mark.usefixtures("small_pieces")
def test_after_a_failed_read_the_same_rows_can_be_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(feed(paths(folder, "jsonl")[0], **TOLERANT)) as source:
        monkeypatch.setattr(source.performer, "ahead", 2)
        first, later = prompts(draw(source, 7)), []
        with monkeypatch.context() as broken:
            broken.setattr(json_lines.JsonLines, "rows_at", lambda *_: (_ for _ in ()).throw(DataError("gone")))
            with pytest.raises(DataError, match="gone"):
                later = prompts(draw(source, 7))
        later += prompts(draw(source, 7))
        assert first + later == USABLE_A[:14]


@given(weights=st.lists(st.integers(1, 20), min_size=2, max_size=4))
@settings(max_examples=30, deadline=None)
def test_weights_need_not_sum_to_one(weights: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("mixed")
    files = [write_rows(folder, "jsonl", numbered(2, 10 * n), name=f"f{n}") for n in range(len(weights))]
    with closing(feed(*(f"{file}={weight}" for file, weight in zip(files, weights, strict=True)))) as source:
        total = sum(weights)
        counts = Counter(int(prompt[1:]) // 10 for prompt in prompts(draw(source, 2 * total)))
    assert [counts[n] for n in range(len(weights))] == [2 * weight for weight in weights]


MODES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["jsonl", "gz", "parquet"]),
        "streaming": st.booleans(),
        "shuffle_seed": st.none() | st.integers(0, 3),
        "mixed": st.booleans(),
    }
)


@pytest.mark.slow
@given(mode=MODES, before=st.integers(0, 200), after=st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_a_restored_state_gives_the_same_next_rows(folder: Path, mode: dict[str, Any], before: int, after: int) -> None:
    mode = dict(mode)
    files: list[Any] = list(paths(folder, mode.pop("kind")))
    if mode.pop("mixed"):
        files = [f"{files[0]}=2", f"{files[1]}=1"]
    small = (json_lines.BLOCK, order.WINDOW, order.CHUNK)
    json_lines.BLOCK, order.WINDOW, order.CHUNK = 64, 3, 7
    try:
        with closing(feed(*files, **mode, **TOLERANT)) as source, closing(feed(*files, **mode, **TOLERANT)) as other:
            draw(source, before)
            state = json.loads(json.dumps(source.state_dict()))
            expected = draw(source, after)
            draw(other, 3)
            other.load_state_dict(state)
            assert draw(other, after) == expected
            assert other.state_dict() == source.state_dict()
            assert other.metrics() == source.metrics()
    finally:
        json_lines.BLOCK, order.WINDOW, order.CHUNK = small


def test_the_state_stays_small_after_many_draws(folder: Path) -> None:
    with closing(feed(*paths(folder, "jsonl"), streaming=True, shuffle_seed=1, **TOLERANT)) as source:
        draw(source, 500)
        assert len(json.dumps(source.state_dict())) < 300


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("kind", "streaming"), [("jsonl", False), ("gz", True), ("parquet", True), ("folder", False)])
def test_the_order_does_not_depend_on_the_workers(folder: Path, kind: str, streaming: bool, workers: int) -> None:
    a, b = paths(folder, kind)
    how: dict[str, Any] = {"streaming": streaming, "shuffle_seed": 3, **TOLERANT}
    with (
        closing(feed(f"{a}=2", f"{b}=1", **how)) as here,
        closing(feed(f"{a}=2", f"{b}=1", workers=workers, **how)) as there,
    ):
        assert draw(there, 70) == draw(here, 70)
        state = there.state_dict()
        assert state == here.state_dict()
        expected = draw(here, 80)
        draw(there, 11)
        there.load_state_dict(state)
        assert draw(there, 80) == expected
        assert there.metrics() == here.metrics()


# --- rows that are left out ------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_bad_row_raises_unless_it_may_be_left_out(folder: Path, streaming: bool) -> None:
    a, _ = paths(folder, "jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl:4: 'prompt' is an empty string"):
        draw(feed(a, streaming=streaming), 40)


@pytest.mark.parametrize("streaming", [False, True])
def test_too_many_bad_rows_raise_an_error_with_the_latest(tmp_path: Path, streaming: bool) -> None:
    path = write_rows(tmp_path, "jsonl", [*numbered(3), "{", *numbered(2), "[]", *numbered(2), "x", *numbered(5)])
    assert len(draw(feed(path, streaming=streaming, max_bad_rows=3), 12)) == 12
    with pytest.raises(DataError, match=r"3 rows cannot be used, and --max-bad-rows is 2. The latest: \S+p\.jsonl:10 "):
        draw(feed(path, streaming=streaming, max_bad_rows=2), 12)


def test_the_limit_of_bad_rows_applies_to_each_epoch(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", [*numbered(2), "{"])
    with closing(feed(path, streaming=True, max_bad_rows=1)) as source:
        assert prompts(draw(source, 9)) == ["q0", "q1"] * 4 + ["q0"]
        assert source.metrics()["data/bad_rows"] == 4


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_over_the_limit_raises_unless_it_may_be_dropped(folder: Path, streaming: bool) -> None:
    a, _ = paths(folder, "parquet")
    how: dict[str, Any] = {"streaming": streaming, "max_bad_rows": 1, "max_tokens": 50}
    with pytest.raises(
        DataError, match=r"a\.parquet: row 39: the prompt has 99 tokens, expected at most 50.*--overlong"
    ):
        draw(feed(a, **how), 40)
    source = feed(a, drop_overlong=True, **how)
    assert prompts(draw(source, 38)) == USABLE_A
    draw(source, 1)
    assert source.metrics()["data/overlong_prompts"] == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_data_without_a_usable_row_raises_instead_of_searching_forever(tmp_path: Path, streaming: bool) -> None:
    path = write_rows(tmp_path, "jsonl", numbered(5))
    with pytest.raises(DataError, match="has no usable row"):
        feed(path, streaming=streaming, drop_overlong=True, max_tokens=1).next()


# --- other data -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_position_in_another_file_is_refused(folder: Path, streaming: bool) -> None:
    a, b = paths(folder, "jsonl")
    state = feed(a, streaming=streaming, **TOLERANT).state_dict()
    unit = "blocks" if streaming else "rows"
    with pytest.raises(CheckpointError, match=rf"in a file of \d+ {unit}, but \S+b\.jsonl has \d+ {unit}"):
        feed(b, streaming=streaming, **TOLERANT).load_state_dict(state)
    with pytest.raises(CheckpointError, match="data that was read differently"):
        feed(a, streaming=not streaming, **TOLERANT).load_state_dict(state)
    with pytest.raises(CheckpointError, match="a mixture of 1 files, but this run mixes 2"):
        feed(f"{a}=1", f"{b}=1", streaming=streaming, **TOLERANT).load_state_dict(state)


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "tools": [{"name": "f"}]}, {"prompt": "ho"}]
    path = write_rows(tmp_path, "jsonl", rows)
    form = PromptFormat(apply_chat_template=True, template_kwargs={"mood": "calm"})
    source = feed(path, columns=Columns("prompt", None, tool_key="tools"), form=form)
    texts = ["".join(map(chr, row.tokens or ())) for row in draw(source, 2)]
    assert texts == ["[f]calm<hi>", "calm<ho>"]


def test_a_template_that_ignores_tools_is_refused(tmp_path: Path) -> None:
    class Deaf(Letters):
        chat_template = "{{ messages }}"

    path = write_rows(tmp_path, "jsonl", [{"prompt": "hi", "tools": [{"name": "f"}]}])
    source = feed(
        path,
        tokenizer=Deaf(),
        columns=Columns("prompt", None, tool_key="tools"),
        form=PromptFormat(apply_chat_template=True),
    )
    with pytest.raises(DataError, match=r"p\.jsonl:1: the row has tools, and the chat template .* does not use them"):
        source.next()


@pytest.mark.slow
def test_a_position_saved_with_workers_is_that_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get jobs of more rows, which no position depends on."""
    monkeypatch.setattr(order, "CHUNK", 3)
    paths_of = paths(folder, "jsonl")
    with closing(feed(*paths_of, shuffle_seed=5, **TOLERANT)) as alone:
        for drawn in (0, 5, 11, 12, 13, 70):
            with closing(feed(*paths_of, shuffle_seed=5, workers=1, **TOLERANT)) as helped:
                draw(helped, drawn)
                alone.load_state_dict(helped.state_dict())
                assert alone.state_dict() == helped.state_dict()
                assert draw(alone, 30) == draw(helped, 30)


def test_rows_come_back_from_a_worker_as_they_were() -> None:
    tools = [{"name": "t"}]
    rows = [
        LoadedRow(0, 10, PromptRow("a", "1", {"k": [1]}, "f:3", None, [1, 2, 3], "id")),
        LoadedRow(0, 20, BadRow("is bad", overlong=True)),
        LoadedRow(1, 2**40, PromptRow([{"role": "user", "content": "é"}], None, {"tools": tools}, "", tools, [])),
        LoadedRow(1, 0, BadRow("is worse")),
    ]
    assert pickle.loads(pickle.dumps(rows)) == rows
