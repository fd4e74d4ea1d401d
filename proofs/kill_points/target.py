"""A small deterministic run, what it does at a moment, and its death."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from tests.integration.conftest import launch, output_of, processes_marked
from tests.support.tiny_models import make_tiny_model

from slime.observe.metrics import read_metrics

HERE = Path(__file__).parent
#: rollouts of a run; checkpoints, of which one is kept, and evaluations come at intervals that divide differently
ROLLOUTS, SAVE, EVALUATE = 8, 2, 3
START, GENERATE, TRAIN, SYNC = "start-up", "generation", "training", "weight sync"
EVALUATION, WRITING, DELETING = "evaluation", "checkpoint written", "old one deleted"
_TITLES = {"train": TRAIN, "sync_weights": SYNC}


def prepare(folder: Path) -> None:
    """Write the model and the prompts that all runs share."""
    make_tiny_model(folder / "model", "qwen3", seed=0)
    for name, count in {"prompts": 64, "held": 3}.items():
        rows = (
            json.dumps({"prompt": f"{'q' if name == 'prompts' else 'h'}{i:03d}", "label": "a"}) for i in range(count)
        )
        (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))


class Target:
    """A `slime train` that may be killed and continued, in a folder of its own."""

    def __init__(self, work: Path, flags: Sequence[str]) -> None:
        """Describe it; `work` is made, beside what `prepare` wrote."""
        work.mkdir()
        self.work, self._flags = work, list(flags)
        self.run_dir = work / "outputs" / "run"
        self.checkpoints = self.run_dir / "checkpoints"
        self.log = work / "output.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._began = 0
        self._pids: list[int] = []
        self._rank: int | None = None

    def start(self) -> None:
        """Start the run, or continue it if it has a folder."""
        if (self.run_dir / "config.toml").is_file():
            command = ["train", "--resume", str(self.run_dir)]
        else:
            files = {"--hf-checkpoint": "model", "--prompt-data": "prompts.jsonl"}
            command = ["train", "--run-name", "run", *self._flags]
            command += [word for flag, name in files.items() for word in (flag, str(self.work.parent / name))]
            command += ["--eval-prompt-data", "held", str(self.work.parent / "held.jsonl")]
        self._rank, self._pids = None, []
        (self.work / "evaluating").unlink(missing_ok=True)
        self._began = self.log.stat().st_size if self.log.exists() else 0
        path = os.pathsep.join(filter(None, (str(HERE / "site"), os.environ.get("PYTHONPATH"))))
        self._process, self._mark = launch(command, self.work, self.log, PYTHONPATH=path)

    def output(self) -> str:
        """What it has printed since it was started last."""
        with self.log.open("rb") as file:
            file.seek(self._began)
            return file.read().decode(errors="replace")

    @property
    def ended(self) -> bool:
        """Whether the process has ended by itself."""
        return self._process is None or self._process.poll() is not None

    def wait(self, timeout_s: float = 600.0) -> None:
        """Wait until it has finished. Raises `RuntimeError` if it fails."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        if code != 0:
            raise RuntimeError(f"exit code {code}:\n{self.output()[-6000:]}")

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 600.0, *, every_s: float = 0.002) -> bool:
        """Wait until `condition` holds; whether it did before the run ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.ended or time.monotonic() > deadline:
                return False
            time.sleep(every_s)
        return True

    def steps(self) -> int:
        """How many rollouts have been trained on, those of the runs before included."""
        try:
            rows = read_metrics(self.run_dir)
        except OSError:
            return 0
        return max((row["step"] + 1 for row in rows if "time/step" in row), default=0)

    def saved(self) -> int:
        """The number of the newest complete checkpoint; 0 if there is none."""
        return max((int(path.name[8:]) for path in self.checkpoints.glob("rollout_*")), default=0)

    @property
    def is_ready(self) -> bool:
        """Whether its processes have started."""
        return "ready after" in self.output()

    def locate(self) -> None:
        """Find its processes, so that they can be killed at once, and asked what they do."""
        alive = processes_marked(self._mark)
        log = str((self.run_dir / "logs" / "trainer-0.log").resolve())
        self._rank = next((one.pid for one in alive if output_of(one) == log), None)
        self._pids = [one.pid for one in alive]

    def phases(self) -> list[str]:
        """What it does at this moment: several things, if it saves in the background or is asynchronous."""
        if self._rank is None:
            return [START]
        return [*self.on_disk(), *([EVALUATION] if self.evaluates() else []), *self._computes()] or [GENERATE]

    def on_disk(self) -> list[str]:
        """Whether a checkpoint is being written or deleted, as its folder shows."""
        found = []
        with suppress(OSError):
            names, newest = os.listdir(self.checkpoints), self.saved()
            for name in names:
                if match := re.fullmatch(r"\.rollout_(\d+)\.partial", name):
                    found.append(WRITING if int(match[1]) > newest else DELETING)
        return sorted(set(found))

    def evaluates(self) -> bool:
        """Whether the reward scores an evaluation."""
        return (self.work / "evaluating").exists()

    def _computes(self) -> list[str]:
        with suppress(OSError, psutil.Error):
            title = Path(f"/proc/{self._rank}/cmdline").read_text(encoding="utf-8").strip(" \0")
            return [phase for method, phase in _TITLES.items() if title.endswith(f"trainer.{method}")]
        return []

    def kill(self) -> list[str]:
        """SIGKILL all of its processes at once; what it did."""
        assert self._process is not None
        doing = self.phases()
        for pid in (self._process.pid, *self._pids):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        while alive := processes_marked(self._mark):
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)
        self._process.wait()
        return doing
