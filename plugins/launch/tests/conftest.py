"""A run file, and stand-ins of the clusters' tools, which note how they are called."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RUN = """\
[checkpoint]
hf-checkpoint = "/data/model"
save-interval = 5
[data]
prompt-data = "/data/prompts.jsonl"
[rollout]
num-rollout = 10
rollout-batch-size = 8
[reward]
name = "exact_match"
[estimator]
name = "grpo"
[run]
run-name = "first"
output-dir = "{output}"
[cluster]
actor-num-gpus-per-node = 8
rollout-num-gpus = 8
rollout-num-gpus-per-engine = 8
[megatron]
lr = 1e-6
"""
#: a stand-in: notes its words, what it reads and a variable, then prints and ends as it was told to for its first words
_STAND_IN = """\
#!{python}
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
read = "" if sys.stdin is None or not any("-" == word[-1:] for word in sys.argv) else sys.stdin.read()
call = {{"words": sys.argv[1:], "stdin": read, "token": "RAY_AUTH_TOKEN" in os.environ}}
with open(here / "{name}.calls", "a") as file:
    file.write(json.dumps(call) + "\\n")
answers = json.loads((here / "{name}.answers").read_text())
said = " ".join(sys.argv[1:])
code, out = next((answer for start, answer in answers.items() if said.startswith(start)), (0, ""))
print(out, file=sys.stderr if code else sys.stdout)
sys.exit(code)
"""


@dataclass
class StandIn:
    """A program in place of a cluster's tool."""

    folder: Path
    name: str

    def calls(self) -> list[dict[str, Any]]:
        """How it was called: the words, what it read, and whether it had the token of Ray."""
        path = self.folder / f"{self.name}.calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def words(self) -> list[str]:
        """The words of each call, in one line."""
        return [" ".join(call["words"]) for call in self.calls()]


StandIns = Callable[[str, Mapping[str, tuple[int, str]]], StandIn]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Puts a stand-in for a tool on PATH: how it answers to calls that start with given words."""
    import os
    import sys

    folder = tmp_path / "stand-ins"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, answers: Mapping[str, tuple[int, str]]) -> StandIn:
        program = folder / name
        program.write_text(_STAND_IN.format(python=sys.executable, name=name))
        program.chmod(0o755)
        (folder / f"{name}.answers").write_text(json.dumps(answers))
        return StandIn(folder, name)

    return put


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file in the current folder, whose outputs are in the volume /data."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(output="/data/outputs"))
    return path


@pytest.fixture
def own_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file in the current folder, whose outputs are in this one too."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(output=tmp_path / "outputs"))
    return path
