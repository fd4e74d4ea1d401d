"""A small real run to inject a fault into, and its processes by their roles."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from tests.integration.conftest import launch, processes_marked
from tests.support.distributions import make_distribution
from tests.support.tiny_models import make_tiny_model

#: an estimator and files of functions that misbehave once they are called the third time, after a note of the moment
SOURCES = Path(__file__).with_name("components.py")
PLUGIN = """
import slime.plugin as sp

slime_api = 1

@sp.hookimpl
def slime_register_estimators():
    return [sp.EstimatorSpec(name="faulty", factory="slime_faults_impl:Faulty", summary="misbehaves on demand")]
"""


@dataclass(frozen=True)
class Bench:
    """What all runs share: a model, prompts, components that misbehave."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Write it all to `folder`."""
        make_tiny_model(folder / "model", "qwen3", seed=0)
        prompts = "".join(json.dumps({"prompt": f"q{i:03d}", "label": "a"}) + "\n" for i in range(64))
        (folder / "prompts.jsonl").write_text(prompts)
        source = SOURCES.read_text(encoding="utf-8")
        (folder / "components.py").write_text(source)
        site = folder / "site"
        site.mkdir()
        modules = {"slime_faults": PLUGIN, "slime_faults_impl": source}
        make_distribution(site, "slime-faults", "1.0", {"faults": "slime_faults"}, modules)
        return cls(folder)

    def start(
        self, work: Path, flags: Sequence[str], environment: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> Target:
        """Start a run in the new folder `work`; `prefix` is a command that runs it."""
        work.mkdir(parents=True)
        command = ["train", "--run-name", "run"]
        command += ["--hf-checkpoint", str(self.folder / "model"), "--prompt-data", str(self.folder / "prompts.jsonl")]
        command += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
        command += ["--sglang-max-total-tokens", "16384", "--lr", "1e-3", "--entropy-coef", "0.1"]
        command += ["--no-use-fault-tolerance"]  # how it is found and named, not how it is mended
        for flag, default in {
            "--advantage-estimator": "grpo",
            "--num-rollout": "100000",
            "--actor-num-gpus-per-node": "2",
        }.items():
            command += [] if flag in flags else [flag, default]
        if "--custom-rm-path" not in flags:
            command += ["--custom-rm-path", f"{self.folder / 'components.py'}:reward_func"]
        variables = {"FAULT_NOTE": str(work / "moment"), "PYTHONPATH": str(self.folder / "site"), **environment}
        log = work / "output.log"
        words = [*command, *(flag.replace("BENCH", str(self.folder)) for flag in flags)]
        process, mark = launch(words, work, log, prefix=prefix, **variables)
        return Target(work, process, mark, log)


@dataclass
class Target:
    """One `slime train` with a fault to come."""

    work: Path
    process: subprocess.Popen[bytes]
    mark: str
    log: Path
    #: when a signal was sent last; on a busy machine this process may get no further for a while
    signalled_at: float | None = None

    @property
    def logs(self) -> Path:
        """Folder of the logs of its processes."""
        return self.work / "outputs" / "run" / "logs"

    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 240.0) -> None:
        """Wait until `condition` holds; the run must not end before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {what}:\n{self.output()}")
            time.sleep(0.05)

    def wait_for_step(self, number: int = 2) -> None:
        """Wait until that many steps are done."""
        self.wait_until(lambda: re.search(rf"\b{number}/\d", self.output()), f"step {number}")

    def moment(self) -> Path:
        """The file that a component touches when it begins to misbehave."""
        return self.work / "moment"

    # --- its processes ---------------------------------------------------------------------------

    def pid(self, role: str) -> int:
        """The process of a role: "trainer-0", "rollout", "engine-0", "scheduler", "router", "raylet", ..."""
        found = [process for process in processes_marked(self.mark) if self._has_role(process, role)]
        if not found:
            raise RuntimeError(f"no process {role}:\n{self.output()}")
        return min(found, key=psutil.Process.create_time).pid

    def _has_role(self, process: psutil.Process, role: str) -> bool:
        try:
            command = process.cmdline()
            if role in ("raylet", "gcs_server"):
                return bool(process.name() == role)
            if role in ("scheduler", "detokenizer"):
                return bool(command) and command[0].startswith(f"sglang::{role}")
            if role == "router":
                return "slime.engine.launch" in command and "router" in command
            written = Path(os.readlink(f"/proc/{process.pid}/fd/1")).name
            leads = os.getpgid(process.pid) == process.pid
            return written == f"{role}.log" and (leads or role.startswith(("trainer", "rollout")))
        except (psutil.Error, OSError):
            return False

    def signal(self, role: str, signum: int) -> None:
        """Send a signal to the process of a role."""
        pid = self.pid(role)
        self.signalled_at = time.time()
        os.kill(pid, signum)

    def interrupt(self) -> None:
        """Ctrl-C: as a terminal, to the whole foreground group."""
        self.signalled_at = time.time()
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> list[str]:
        """Wait a little for all processes to end; kill those that are left, and return their command lines."""
        deadline = time.monotonic() + 60  # on a busy machine; the processes are to end by themselves
        while (found := processes_marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        left = []
        for process in found:
            try:
                left.append(" ".join(process.cmdline())[:120])
                process.kill()
            except psutil.Error:
                continue
        return left
