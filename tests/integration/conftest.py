"""Complete runs of `slime train` in a child process, with real engines and a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model

from slime.engine.server import EngineServer

MARK = "SLIME_TEST_RUN"
#: process titles of the helpers of Ray's node service
RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


def processes_marked(mark: str) -> list[psutil.Process]:
    """Every living process that inherited the mark of one run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def output_of(process: psutil.Process) -> str:
    """The file that a process prints to; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""


def command_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def launch(
    words: Sequence[str], folder: Path, log: Path, *, prefix: Sequence[str] = (), mark: str = "", **variables: str
) -> tuple[subprocess.Popen[bytes], str]:
    """Start `slime WORDS` in `folder`, as the leader of a session, and append what it prints to `log`.

    Args:
        words: The words of the command line.
        folder: Where it runs.
        log: What it prints to.
        prefix: A command that runs it.
        mark: Of the process and all that it starts; default: a new one.
        variables: Of its environment, besides those of this process.

    Returns:
        The process, and its mark.
    """
    mark = mark or uuid.uuid4().hex
    with log.open("ab") as out:
        process = subprocess.Popen(
            # A shell that started the tests in the background made them, and all that they start, ignore SIGINT.
            ["env", "--default-signal=INT", *prefix, str(Path(sys.executable).with_name("slime")), *words],
            cwd=folder,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, mark


def kill_marked(mark: str) -> None:
    """Kill what is left of one run."""
    for process in processes_marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.kill()


@dataclass
class SlimeRun:
    """One `slime train` child process."""

    root: Path
    process: subprocess.Popen[bytes]
    mark: str
    log: Path
    name: str
    output: str = field(default="", init=False)

    @property
    def run_dir(self) -> Path:
        return self.root / "outputs" / self.name

    def wait(self, timeout_s: float = 240.0) -> int:
        """Wait for the exit code; `output` is then complete."""
        code = self.process.wait(timeout_s)
        self.output = self.log.read_text(encoding="utf-8", errors="replace")
        return code

    def wait_for_output(self, pattern: str, timeout_s: float = 240.0) -> None:
        """Wait until the run has printed something that matches `pattern`."""
        self.wait_until(
            lambda: re.search(pattern, self.log.read_text(encoding="utf-8", errors="replace")), timeout_s, repr(pattern)
        )

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 240.0, what: str = "condition") -> None:
        """Wait until `condition` is true; fail if the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s:g} s:\n{self.log.read_text()}"
            time.sleep(0.1)

    def left_over(self, within_s: float = 60.0) -> list[str]:
        """Command lines of the run's processes that are still alive after `within_s` seconds.

        They are many on a busy machine: what matters is that all of them end, by themselves. The agents of a Ray
        whose driver was killed are not counted: they try for a minute to report that to the GCS that has died too.
        """
        deadline = time.monotonic() + within_s
        while (found := self._counted()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _counted(self) -> list[str]:
        commands = [" ".join(command_of(process))[:200].strip() for process in processes_marked(self.mark)]
        killed = self.process.poll() == -signal.SIGKILL
        return [command for command in commands if not (killed and command in RAY_AGENTS)]

    def steps(self, first: int = 0) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl that describe training steps, from `first` on.

        A resumed run begins its curve with the steps of the run that it continues.
        """
        return [row for row in self.rows() if "time/step" in row and row["step"] >= first]

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl, those of evaluations too. A line that the run is still writing does not count."""
        text = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def prompts(self, rollout: int) -> list[str]:
        """The prompts of one rollout, one per sample, in order."""
        path = self.run_dir / "rollouts" / f"{rollout:06d}.jsonl"
        return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with labels."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i:03d}", "label": "a"}) + "\n" for i in range(64)))
    return path


@pytest.fixture(scope="session")
def engine(model: Path, fork_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """An engine for tests that send it their own weights first."""
    server = cpu_engine(model, tmp_path_factory.mktemp("engine"), fork_server=fork_server)
    with running(server):
        yield server


@contextlib.contextmanager
def started_runs() -> Iterator[list[SlimeRun]]:
    """A list for runs, whose processes are killed at the end."""
    started: list[SlimeRun] = []
    try:
        yield started
    finally:
        for run in started:
            kill_marked(run.mark)


@contextlib.contextmanager
def starting(root: Path, model: Path, data: Path) -> Iterator[Callable[..., SlimeRun]]:
    """Starts `slime train` in a folder with the flags of a small run plus those given; kills what is left at the end.

    With `bare` the given flags are all there are.
    """

    def start(*flags: str, name: str = "run", reward: bool = True, bare: bool = False) -> SlimeRun:
        log, command = root / f"{name}.log", ["train"]
        if not bare:
            command += ["--run-name", name, "--hf-checkpoint", str(model), "--prompt-data", str(data)]
            command += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
            command += ["--sglang-max-total-tokens", "16384", "--lr", "1e-3"]
        if reward and not bare:
            # A random model gets no reward; only the entropy bonus changes its weights.
            command += ["--advantage-estimator", "grpo", "--reward", "exact_match", "--entropy-coef", "0.1"]
        log.unlink(missing_ok=True)
        process, mark = launch([*command, *flags], root, log)
        run = SlimeRun(root, process, mark, log, name)
        started.append(run)
        return run

    with started_runs() as started:
        yield start


@pytest.fixture
def slime_train(tmp_path: Path, model: Path, data: Path) -> Iterator[Callable[..., SlimeRun]]:
    """Starts `slime train` in the test's folder; see `starting`."""
    with starting(tmp_path, model, data) as start:
        yield start
