"""Data workers: they end with their parent, give the same rows, and their failures are reported."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.prompt_files import Letters, draw, feed, numbered, write_rows
from tests.support.tiny_models import write_tiny_tokenizer

from slime.errors import DataError
from slime.kit.readers.feed import order
from slime.kit.readers.feed.feed_workers import FeedWorkers
from slime.kit.readers.feed.work import BlocksJob, Work
from slime.kit.readers.light_tokenizer import LightTokenizer, lightest
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_source import parse_source
from slime.kit.readers.rows import Columns
from slime.kit.readers.tokenize import PromptFormat, prompt_text, tokenize_prompt
from slime.testing import make_tokenizer

TEMPLATED = PromptFormat(apply_chat_template=True)


class Stuck(Letters):
    """Dies at one text, hangs at another and raises at a third."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if text == "q600":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "q700":
            time.sleep(600)
        if text == "q800":
            raise ValueError("no such text")
        return super().encode(text, add_special_tokens=add_special_tokens)


def gone(pid: int, within_s: float = 60) -> bool:
    """Whether a process ends in time; a zombie has ended."""
    return eventually(lambda: not _runs(pid), within_s)


def eventually(true: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_the_error_for_a_dead_worker_names_the_rows_it_was_reading(
    tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "FOR_WORKERS", 1)  # several jobs
    path = write_rows(tmp_path, "jsonl", numbered(650))
    lines = r"650 rows from \S+:1 to \S+:650" if streaming else r"138 rows from \S+p\.jsonl:513 to \S+p\.jsonl:650"
    message = rf"its worker process was killed by SIGKILL. It read .*{lines}"
    with (
        closing(feed(path, tokenizer=Stuck(), workers=2, streaming=streaming)) as source,
        pytest.raises(DataError, match=message),
    ):
        draw(source, 650)


def test_the_error_for_a_worker_that_raises_names_the_rows_it_was_reading(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", numbered(10, 795))
    message = r"ValueError: no such text. It read 10 rows from \S+:1 to \S+:10"
    with closing(feed(path, tokenizer=Stuck(), workers=1)) as source, pytest.raises(DataError, match=message):
        source.next()


@pytest.mark.slow
def test_a_worker_that_hangs_raises_an_error_after_the_deadline(tmp_path: Path) -> None:
    reader = open_reader(parse_source(str(write_rows(tmp_path, "jsonl", numbered(9, 695)))), Columns("prompt", "label"))
    workers = FeedWorkers(1, Work([reader], Stuck(), PromptFormat(False), None), deadline_s=3)
    workers._pool._startup_timeout_s = 240.0  # importing takes a busy machine longer than the deadline
    with closing(workers), pytest.raises(DataError, match=r"no answer within 3 s. It read 9 rows from \S+:1 to \S+:9"):
        workers.submit(BlocksJob(((0, 0),)))()


def test_workers_end_with_close(tmp_path: Path) -> None:
    source = feed(write_rows(tmp_path, "jsonl", numbered(10)), workers=2)
    source.next()
    assert isinstance(source.performer, FeedWorkers)
    pids = source.performer.pids
    source.close()
    assert all(gone(pid) for pid in pids)


def test_a_program_that_ends_without_closing_its_source_ends_quietly(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", numbered(10))
    program = "import sys; from tests.support.prompt_files import feed; feed(sys.argv[1], workers=2).next()"
    command = [sys.executable, "-c", program, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=240)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", numbered(5000))
    program = """
        import sys, time
        from tests.support.prompt_files import feed
        source = feed(sys.argv[1], workers=2)
        source.next()
        while len(source.performer.pids) < 2:
            time.sleep(0.01)
        print(*source.performer.pids, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(_runs(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
def test_output_printed_in_a_worker_is_ignored(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", numbered(3))
    with closing(feed(path, tokenizer=Loud(), workers=1)) as source:
        assert [row.prompt for row in draw(source, 3)] == ["q0", "q1", "q2"]


class Loud(Letters):
    """Prints on every call."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        print("working on it", flush=True)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def through_pickle(tokenizer: Any) -> Any:
    return pickle.loads(pickle.dumps(tokenizer))


def test_workers_get_a_light_tokenizer_if_it_gives_the_same_tokens(tokenizer: Any) -> None:
    light = through_pickle(lightest(tokenizer, TEMPLATED))
    assert isinstance(light, LightTokenizer)
    for prompt in ("1+1=", [{"role": "user", "content": "é <eos>\n"}]):
        ours, theirs = (tokenize_prompt(one, prompt, apply_chat_template=True) for one in (light, tokenizer))
        assert ours == theirs


@pytest.mark.parametrize("how", ["", "(false, 2)", "(indent=2)", "(sort_keys=true)", "(true)"])
def test_the_light_tokenizer_renders_tools_as_transformers_does(how: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson" + how + " }}{{ messages[0].content }}"
    light = through_pickle(lightest(tokenizer, TEMPLATED))
    assert isinstance(light, LightTokenizer)
    row: dict[str, Any] = {"prompt": "q", "tools": [{"b": "é<", "a": [1]}], "form": TEMPLATED}
    assert prompt_text(light, **row) == prompt_text(tokenizer, **row)


def test_a_tokenizer_without_a_light_version_is_sent_as_it_is() -> None:
    tokenizer = Letters()
    assert lightest(tokenizer, TEMPLATED) is tokenizer


def test_a_tokenizer_that_cannot_be_pickled_raises_an_error() -> None:
    broken = Letters()
    broken.lock = open("/dev/null")  # noqa: SIM115
    with pytest.raises(DataError, match="cannot be sent to data workers: TypeError"):
        FeedWorkers(1, Work([], broken, TEMPLATED, None))


@pytest.mark.row("D2")
def test_workers_give_the_tokens_of_transformers(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", numbered(300))
    how: dict[str, Any] = {"tokenizer": tokenizer, "form": TEMPLATED}
    with closing(feed(path, workers=1, **how)) as there, closing(feed(path, **how)) as here:
        rows = draw(there, 300)
        assert rows == draw(here, 300)
        assert rows[7].tokens == tokenize_prompt(tokenizer, "q7", apply_chat_template=True)
