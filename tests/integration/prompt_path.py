"""The core files that run in one training step, traced in a real run.

python -m tests.integration.prompt_path        rewrites the list in docs/architecture.md
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "slime"
PAGE = ROOT / "docs" / "architecture.md"
#: files that do not act on a prompt: they observe or supervise the run, name its errors, or stand in for a GPU; and
#: `kit/processes/`, which carries samples to rewards without looking at them
WATCHERS = (
    "observe/",
    "cli/",
    "platform.py",
    "errors/",
    "registry/load.py",  # in a step, it calls observers
    "kit/processes/",
    "rollout/stall.py",
    "run/token_log.py",
    "run/checkpoint/retention.py",  # in a step, it notes the metrics
    "train/token_record.py",
    "engine/process.py",
    "engine/server.py",
    "engine/router.py",
    "run/engines.py",
    "run/preemption.py",
    "run/ray_session.py",
    "run/supervise/",
)
BEGIN, END = "<!-- traced: begin -->", "<!-- traced: end -->"

#: Python imports a module of this name when it starts. In every process of the run it notes the core files whose
#: functions are called, with the time: a new line for a file that was silent for a hundredth of a second.
TRACER = """
import os, sys, threading, time

core, folder = os.environ["TRACE_CORE"] + os.sep, os.environ["TRACE_FOLDER"]
out = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
last = {}

def profile(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    name = code.co_filename
    if not name.startswith(core):
        return
    now = time.monotonic()
    key = code.co_qualname if code.co_qualname == "Run.start_step" else name[len(core):]
    if now - last.get(key, 0.0) > 0.01:
        last[key] = now
        os.write(out, f"{now} {key}\\n".encode())

command = " ".join(sys.orig_argv)
if "/ray/" not in command or "worker" in command:  # Ray's own services run no slime code, and would start too slowly
    threading.setprofile(profile)
    sys.setprofile(profile)
"""


def install_tracer(folder: Path) -> dict[str, str]:
    """Write the tracer into `folder`; returns the environment that a run needs to load it."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(TRACER, encoding="utf-8")
    notes = folder / "notes"
    notes.mkdir()
    return {"PYTHONPATH": str(site), "TRACE_CORE": str(CORE), "TRACE_FOLDER": str(notes)}


def files_of_step(folder: Path) -> list[str]:
    """The core files that ran in the second step of a traced run, in any process, sorted."""
    lines = [line.split(" ", 1) for path in (folder / "notes").iterdir() for line in path.read_text().splitlines()]
    starts = sorted(float(time) for time, name in lines if name == "Run.start_step")
    step = {name for time, name in lines if starts[1] <= float(time) < starts[2] and name.endswith(".py")}
    return sorted(name for name in step if not name.startswith(WATCHERS))


def listed() -> list[str]:
    """The files that the page lists."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^- `core/slime/(\S+\.py)`", text[text.index(BEGIN) : text.index(END)], flags=re.MULTILINE)


def write(files: list[str]) -> None:
    """Write the list to the page, each file with the first line of its docstring."""
    rows = "\n".join(f"- `core/slime/{name}`: {summary(CORE / name)}" for name in files)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index(BEGIN)] + f"{BEGIN}\n{rows}\n" + text[text.index(END) :], encoding="utf-8")


def summary(path: Path) -> str:
    """The first sentence of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split("\n\n")[0].split())


def main() -> int:
    """Trace a run and rewrite the page."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/t"]
        command += ["tests/integration/test_prompt_path.py::test_a_step_runs_few_files"]
        subprocess.run(command, cwd=ROOT, check=True)
        [traced] = Path(folder).rglob("notes")
        write(files_of_step(traced.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
