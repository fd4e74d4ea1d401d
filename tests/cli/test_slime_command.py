"""`slime` without a subcommand, and the helps."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Slime, split

from slime import __version__
from slime.cli.main import main
from slime.config.flag_table import flags_of
from slime.config.run_config import SECTIONS


def test_help_lists_the_commands(slime: Slime) -> None:
    ended = slime("--help")
    assert ended.code == 0
    assert "train" in ended.out
    assert "plugins" in ended.out


def test_no_command_prints_the_help_and_fails(slime: Slime) -> None:
    ended = slime()
    assert ended.code == 2
    assert ended.out.startswith("usage: slime COMMAND")


def test_version(slime: Slime) -> None:
    assert slime("--version").out == f"slime {__version__}\n"


def test_an_unknown_command_is_refused_with_the_nearest(slime: Slime) -> None:
    ended = slime("trian")
    assert ended.code == 2
    assert ended.err.startswith("slime: error: unknown command 'trian'. Did you mean train?")


def test_the_help_of_training_shows_every_option_with_its_text(slime: Slime) -> None:
    out = " ".join(slime("train", "--help").out.split())
    for section, options in SECTIONS.items():
        assert f"[{section}]" in out
        flags = {flag.key: flag for flag in flags_of(section) if flag.alias_of is None}
        assert set(flags) == set(options.model_fields)
        for flag in flags.values():
            assert flag.spelled in out
            assert flag.help and flag.help in out
    assert "(also --rm-type)" in out
    assert "--help-megatron" in out
    assert "--help-sglang" in out


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("--help-megatron", ["--tensor-model-parallel-size", "--recompute-activations", "--num-experts", "--swiglu"]),
        ("--help-sglang", ["--sglang-mem-fraction-static", "--sglang-tp-size", "--sglang-disable-cuda-graph"]),
    ],
)
def test_the_engines_options_are_listed(slime: Slime, word: str, flags: list[str]) -> None:
    out = slime("train", word).out
    assert all(flag in out for flag in flags)
    assert max(map(len, out.splitlines())) <= 200


#: a command that leaves a thread behind, and says which of its clean-ups Python still does
LEAVING = """
import atexit, sys, threading, time
from slime.cli import main

class TornDown:
    def __del__(self, write=sys.__stdout__.write):
        write("torn down below the thread\\n")

def run(words):
    global kept
    kept = TornDown()
    atexit.register(print, "cleaned up")
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start() if {lasts} else None
    print("ran")
    threading.Timer(0.2, print, ("waited for",)).start()
    return 3

main.COMMANDS["leave"] = (__name__, "")
sys.argv[1:] = ["leave"]
main.command()
"""


@pytest.mark.parametrize("lasts", [True, False])
def test_a_thread_that_is_left_does_not_see_python_end(lasts: bool) -> None:
    script = LEAVING.format(lasts=lasts)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 3, done.stderr
    expected = ["ran", "waited for", "cleaned up"]
    assert done.stdout.splitlines() == (expected if lasts else [*expected, "torn down below the thread"])


def test_warnings_are_marked_as_warnings(slime: Slime, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_words: list[str]) -> int:
        logging.getLogger("slime.registry").warning("the checkpoint was made with %s", "another version")
        return 0

    monkeypatch.setattr("slime.cli.plugins.run", run)
    assert slime("plugins").err == "slime: warning: the checkpoint was made with another version\n"
    assert logging.getLogger("slime").handlers == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["--help", "--version", "train --help-sglang", "plugins", "score --help", "train --dry-run"]
)
def test_a_reader_that_leaves_ends_a_command_without_a_word(base_words: list[str], tmp_path: Path, words: str) -> None:
    """As `slime plugins | head -1`: the exit code is that of a command which SIGPIPE ended."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "slime.cli.main", *split(words), *(base_words if "--dry-run" in words else ())]
    with os.fdopen(writer, "wb") as output:
        ended = subprocess.run(command, cwd=tmp_path, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_command_without_standard_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; os.close(1)\nimport sys; sys.stdout = None\n"]
    command[-1] += "from slime.cli.main import command; command(['plugins'])"
    ended = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_another_pipe_that_breaks_is_not_taken_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("slime.cli.main._run", broken)
    with pytest.raises(BrokenPipeError), open(os.devnull, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        monkeypatch.setattr("sys.stderr", output)
        main([])
