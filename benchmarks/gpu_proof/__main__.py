"""`make gpu-proof`: shows on this machine what the tests cannot show without a GPU, and writes a table of it.

    python -m benchmarks.gpu_proof [--wheels DIR | --bundle DIR] [--device cpu --small] [--only PART ...]

Each part runs in its own process with a time limit: one that fails or hangs is a row of the table, and the others still
run. Each leaves a card: the command, versions, numbers and peak memory. Nothing is downloaded. Packages come from this
Python, from a folder of wheels, or from the pieces of `make gpu-bundle`; parts whose packages are missing are skipped,
and the table says so.

This file needs only Python itself, so that it can report that everything else is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof import cards, pieces

ROOT = Path(__file__).resolve().parents[2]
#: seconds for everything
TOTAL_S = 600.0
#: seconds that a part gets to end by itself once its time is over
_GRACE_S = 10.0
_MISSING = "not installed"
#: import name -> distribution, of the packages whose versions the table names
ENGINES = {
    "torch": "torch",
    "transformers": "transformers",
    "megatron": "megatron-core",
    "transformer_engine": "transformer-engine",
    "sglang": "sglang",
    "sglang_router": "sglang-router",
    "ray": "ray",
}
#: what slime itself imports in every part
_BASE_NAMES = (
    *["aiohttp", "importlib_metadata", "jinja2", "numpy", "orjson", "packaging", "pluggy"],
    *["psutil", "pydantic", "rich", "safetensors", "tokenizers", "tomli_w"],
)
BASE = {name: name.replace("_", "-") for name in _BASE_NAMES}
_TRAINER = (*BASE, "torch", "transformers", "megatron")


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        group: Parts of one group share a table; `--only` chooses groups.
        function: `module:function` in this folder, called with a `Bench` and `settings`.
        share_s: Its share of the whole time, relative to the other parts' shares. It may also use the time that earlier
            parts did not need, but none of the time reserved for later parts.
        needs: Packages without which it cannot run.
        gpus: GPUs it needs, on a machine with any.
    """

    group: str
    name: str
    function: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    share_s: float = 60.0
    needs: Sequence[str] = ()
    gpus: int = 1


_STEP = "training:training_step"
_TE = (*_TRAINER, "transformer_engine")
_LOOP = (*_TRAINER, "sglang", "sglang_router", "ray")
PARTS = (
    Part("three-way", "three-way, float32", "training:three_way", {"dtype": "float32"}, 50, _TRAINER),
    Part("three-way", "three-way, bfloat16", "training:three_way", {"dtype": "bfloat16"}, 50, _TRAINER),
    # NCCL refuses two ranks on one GPU; a handle of CUDA IPC can be opened only by a process that sees the same GPU.
    Part("sync", "sync, tensor", "serving:sync", {"transport": "tensor"}, 45, (*_TRAINER, "sglang")),
    Part("sync", "sync, distributed", "serving:sync", {"transport": "distributed"}, 40, (*_TRAINER, "sglang"), gpus=2),
    Part("colocated", "colocated loop", "serving:colocated", {}, 70, _LOOP),
    Part("engine", "engine alone", "serving:engine_alone", {}, 40, (*BASE, "torch", "transformers", "sglang")),
    Part("training", "training step, 0.5B, torch", _STEP, {"shape": "0.5B", "layers": "torch"}, 30, _TRAINER),
    Part("training", "training step, 0.5B, fused", _STEP, {"shape": "0.5B", "layers": "fused"}, 70, _TRAINER),
    Part("training", "training step, 0.5B, te", _STEP, {"shape": "0.5B", "layers": "te"}, 20, _TE),
    Part("training", "training step, 7B, fused", _STEP, {"shape": "7B", "layers": "fused"}, 80, _TRAINER),
    Part("quickstart", "quickstart", "serving:quickstart", {}, 50, _LOOP),
    Part("long", "1.5B, 8k responses", "serving:long_responses", {}, 95, _LOOP),
)
CAPTIONS = {
    "three-way": "Largest difference of the log-probs of 8 answers, in nats, of a random model of 3 layers.",
    "sync": "Weights from the trainer to one engine, median of three after the first; checksums of all tensors compared"
    " afterwards.",
    "colocated": "`slime train --colocate` on one GPU with the shape of Qwen2.5-0.5B and the lengths of the engine"
    " alone: medians of the rollouts after the first. Memory is what trainer and engine hold in the turn of each.",
    "engine": "Tokens per second of one engine; several answers have the same prompt. SGLang alone, with one request"
    " for all; through slime's client; and in the colocated loop.",
    "training": "One training step (forward, backward, Adam) in bfloat16 with random weights. MFU counts three forward"
    " passes of a model without recomputation; TFLOP/s also counts the forward pass that full recomputation adds.",
    "quickstart": "The two runs of `make quickstart`; on one GPU engine and trainer take turns. Medians of the rollouts"
    " after the first.",
    "long": "As the colocated loop, with the shape of Qwen2.5-1.5B and responses of 8,192 tokens.",
}


def main() -> int:
    """The command line; 0 if no part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_proof", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheels", type=Path, help="folder of wheels to use besides the packages of this Python")
    source.add_argument("--bundle", type=Path, help="folder of pieces, which hold such wheels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    names = [*CAPTIONS, *(part.name for part in PARTS)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help="; ".join(names))
    parser.add_argument("--peak-tflops", type=float, help="of this GPU in dense bfloat16, if its name is not known")
    parser.add_argument(
        "--sglang", default="", metavar="'FLAGS'", help="for all engines: --sglang='--disable-cuda-graph'"
    )
    parser.add_argument("--family", choices=("llama", "qwen2", "qwen3"), help="of the models of all engines")
    parser.add_argument("--limit-s", type=float, default=TOTAL_S, help="seconds for everything (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_proof.md", help="where the table goes")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.argv = sys.argv[1:]
    if options.part is not None:
        return run_here(json.loads(options.part.read_text(encoding="utf-8")))
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu needs --small: the real shapes would take hours")
    deadline = time.monotonic() + options.limit_s
    if options.bundle is not None:
        options.wheels = unpacked(options.bundle, options.out.with_name("gpu_bundle-unpacked"))
    with tempfile.TemporaryDirectory(prefix="slime-gpu-proof-") as folder:
        proof = Proof(Path(folder), options, deadline)
        found = proof.machine()
        text, failed = proof.table(found, [part for part in PARTS if {part.group, part.name} & set(options.only)])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten to {options.out}")
    return 1 if failed else 0


def run_here(task: dict[str, Any]) -> int:
    """In the process of a part: call its function."""
    module, function = task.pop("function").split(":")
    settings = task.pop("settings")
    bench = importlib.import_module("benchmarks.gpu_proof.bench").Bench(**task)
    getattr(importlib.import_module(f"benchmarks.gpu_proof.{module}"), function)(bench, **settings)
    return 0


@dataclass(frozen=True)
class Done:
    """How a part ended: its outcome, the rows it wrote until then, its time, and the most memory in use meanwhile."""

    outcome: str
    rows: list[dict[str, str]]
    seconds: float
    peak_gib: float


class Proof:
    """Runs parts and collects their rows."""

    def __init__(self, work: Path, options: argparse.Namespace, deadline: float) -> None:
        self._work, self._options, self._deadline = work, options, deadline
        #: logs of parts that failed
        self._kept: Path = options.out.with_name(f"{options.out.stem}-logs")
        self._cards: Path = options.out.with_name(f"{options.out.stem}-cards")
        for earlier in (self._kept, self._cards):
            shutil.rmtree(earlier, ignore_errors=True)
        self._command = shlex.join(["python", "-m", "benchmarks.gpu_proof", *options.argv])
        self._commit = cards.commit()
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_paths(work / "site", options.wheels))}

    def machine(self) -> dict[str, str]:
        """Versions, GPUs and driver, as a process with the packages of the parts finds them."""
        looked = self.run(Part("machine", "versions", "__main__:describe_machine"), 90.0)
        outcome, rows = looked.outcome, looked.rows
        if outcome != "ok":
            raise SystemExit(f"the packages of this machine could not be listed: {outcome}")
        found = {row["what"]: row["found"] for row in rows}
        if self._options.device == "cuda" and found["GPUs"] == "none":
            raise SystemExit(
                f"torch ({found['torch']}) sees no GPU on this machine. Install a CUDA build of torch and a driver, or"
                " try the parts with --device cpu --small."
            )
        return found

    def table(self, found: Mapping[str, str], parts: Sequence[Part]) -> tuple[str, bool]:
        """Run the parts. The text of the table, and whether a part failed."""
        tables: dict[str, list[dict[str, str]]] = {}
        outcomes = []
        skipped = {part.name: reason for part in parts if (reason := self._skip(part, found))}
        waiting = [part for part in parts if part.name not in skipped]
        second = max(0.0, self._deadline - time.monotonic()) / (sum(part.share_s for part in waiting) or 1.0)
        for part in parts:
            if part.name in skipped:
                outcomes.append({"part": part.name, "result": skipped[part.name]})
                continue
            print(f"{part.name} ...", flush=True)
            waiting.remove(part)
            left = self._deadline - time.monotonic() - second * sum(other.share_s for other in waiting)
            if left <= 0:
                result = f"skipped: the {self._options.limit_s:g} s for everything were over"
                outcomes.append({"part": part.name, "result": result})
                continue
            done = self.run(part, left)
            sizes = {"seconds": f"{done.seconds:.0f}", "peak GiB": f"{done.peak_gib:.2f}"}
            outcomes.append({"part": part.name, "result": done.outcome, **sizes})
            tables.setdefault(part.group, []).extend(done.rows)
            self._card(part, done, found).write(self._cards)
        where = self._where(found)
        versions = ", ".join(f"{name} {found[name]}" for name in ("Python", "driver", *ENGINES.values()))
        lines = [f"## {time.strftime('%Y-%m-%d')}, {where}", "", f"{versions}.", ""]
        missing = sorted(name for name, version in found.items() if version == _MISSING)
        if missing:
            lines += [f"Not installed here: {', '.join(missing)}.", ""]
        lines += [f"`{self._command}`, commit {self._commit}", "", *as_table(outcomes)]
        for group, rows in tables.items():
            if rows:
                lines += ["", CAPTIONS[group], "", *as_table(rows)]
        failed = any(row["result"].startswith(("failed", "no answer")) for row in outcomes)
        return "\n".join(lines) + "\n", failed

    def _skip(self, part: Part, found: Mapping[str, str]) -> str:
        """Why a part cannot run here; empty if it can."""
        missing = [name for name in part.needs if found[(ENGINES | BASE)[name]] == _MISSING]
        gpus = int(found["GPUs"].split()[0]) if found["GPUs"] != "none" else 0
        if missing:
            return f"skipped: needs {', '.join(missing)}"
        if self._options.device == "cuda" and gpus < part.gpus:
            return f"skipped: needs {part.gpus} GPUs, this machine has {gpus}"
        return ""

    def _where(self, found: Mapping[str, str]) -> str:
        return found["GPUs"] if self._options.device == "cuda" else f"{os.cpu_count()} CPU cores, small shapes"

    def _card(self, part: Part, done: Done, found: Mapping[str, str]) -> cards.Card:
        on_gpu = self._options.device == "cuda"
        return cards.Card(
            part=part.name,
            result=cards.PASSED if done.outcome == "ok" else done.outcome,
            command=self._command,
            commit=self._commit,
            date=time.strftime("%Y-%m-%d"),
            device=self._where(found),
            gpus=int(found["GPUs"].split()[0]) if on_gpu else 0,
            driver=found["driver"],
            versions={name: found[name] for name in ("Python", *ENGINES.values())},
            seconds=round(done.seconds, 1),
            peak_memory_gib=done.peak_gib,
            numbers=done.rows,
        )

    def run(self, part: Part, limit_s: float) -> Done:
        """Run one part in its own process."""
        name = part.name.replace(" ", "-").replace(",", "")
        task, rows, log = (self._work / f"{name}.{end}" for end in ("json", "rows", "log"))
        options = {"device": self._options.device, "small": self._options.small, "work": str(self._work)}
        options |= {"peak_tflops": self._options.peak_tflops, "rows": str(rows), "settings": dict(part.settings)}
        options |= {"sglang": shlex.split(self._options.sglang), "family": self._options.family}
        task.write_text(json.dumps({**options, "function": part.function}), encoding="utf-8")
        began = time.monotonic()
        with log.open("wb") as output, cards.MemoryWatch(on_gpu=self._options.device == "cuda") as memory:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_proof", "--part", str(task)],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                outcome = "ok" if code == 0 else f"failed (code {code}): {last_lines(log)}"
            except subprocess.TimeoutExpired:
                outcome = f"no answer within {limit_s:.0f} s: {last_lines(log)}"
            finally:
                end_group(process)
        others = [*self._work.glob("engine-*.log"), *self._work.glob("*/*/logs/*.log")]
        if outcome != "ok":  # the end of the log, in the table, is rarely enough
            self._keep([log, *others], part)
        for other in others:
            other.unlink()
        found = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
        return Done(outcome, [json.loads(line) for line in found], time.monotonic() - began, memory.peak_gib)

    def _keep(self, logs: Sequence[Path], part: Part) -> None:
        """Copy the logs of a part that failed, and of what it started, to a folder beside the table."""
        kept = self._kept / part.name.replace(" ", "-").replace(",", "")
        kept.mkdir(parents=True)
        for log in logs:
            shutil.copyfile(log, kept / log.name)
        print(f"{part.name} did not succeed; its logs are in {kept}", flush=True)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part and what it started: politely, so that GPUs and shared memory are freed in order, then by force."""
    for sign, seconds in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def unpacked(bundle: Path, target: Path) -> Path | None:
    """The folder of the wheels in a bundle; None if it holds none, as this machine has everything."""
    try:
        manifest = pieces.unpack(bundle, target)
    except pieces.BundleError as error:
        raise SystemExit(f"cannot unpack {bundle}:\n{error}") from None
    print(f"{len(manifest.pieces)} pieces are whole", flush=True)
    named = {file.name for file in manifest.files}
    wheels = target / "wheels"
    for path in wheels.glob("*.whl"):  # of a bundle before
        if f"wheels/{path.name}" not in named:
            path.unlink()
    return wheels if any(wheels.glob("*.whl")) else None


def install(wheels: Path) -> Path:
    """The folder beside the wheels in which they are installed. It is kept, since that takes minutes.

    Raises:
        SystemExit: There are none.
    """
    site, files = wheels.with_name(f"{wheels.name}-installed"), sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(f"--wheels {wheels}: there is no file *.whl in this folder.")
    listed, done = "\n".join(f"{file} {Path(file).stat().st_size}" for file in files), site / "installed-wheels.txt"
    if not done.is_file() or done.read_text(encoding="utf-8") != listed:
        shutil.rmtree(site, ignore_errors=True)
        print(f"installing {len(files)} wheels into {site}", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--target", str(site), *files], check=True)
        done.write_text(listed, encoding="utf-8")
    return site


def import_paths(site: Path, wheels: Path | None) -> list[str]:
    """What PYTHONPATH must have for the parts: installed wheels, this checkout, and what was there before.

    Args:
        site: Folder to make, for what describes this checkout if slime is not installed.
        wheels: Folder of wheels, which go before the packages of this Python.
    """
    site.mkdir()
    paths = [] if wheels is None else [str(install(wheels))]
    paths += [str(ROOT)]
    if not any(importlib.metadata.distributions(name="slime-rl")):
        paths += [str(site), *describe_checkout(site)]
    return [*paths, *filter(None, [os.environ.get("PYTHONPATH")])]


def describe_checkout(site: Path) -> list[str]:
    """Make slime usable where it is not installed: its metadata, by which plugins are found, and folders to import."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = described["project"]
    folder = site / f"slime_rl-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: slime-rl\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    text = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items()]
    (folder / "entry_points.txt").write_text("\n".join(text))
    return [str(ROOT / one) for one in described["tool"]["hatch"]["build"]["dev-mode-dirs"]]


def describe_machine(bench: Any) -> None:
    """The part that only looks: versions, GPUs and driver."""
    found = {"Python": platform.python_version(), "GPUs": "none"}
    for name, distribution in (ENGINES | BASE).items():
        found[distribution] = _MISSING
        if importlib.util.find_spec(name) is not None:
            versions = [one.version for one in importlib.metadata.distributions(name=distribution)]
            found[distribution] = versions[0] if versions else "of unknown version"
    if found["torch"] != _MISSING:
        cuda = importlib.import_module("torch").cuda
        if cuda.is_available():
            found["GPUs"] = f"{cuda.device_count()} x {cuda.get_device_name(0)}"
    found["driver"] = "none"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
        found["driver"] = (answer.stdout.split() or ["unknown"])[0]
    for what, value in found.items():
        bench.row(what=what, found=value)


def last_lines(log: Path, count: int = 4, width: int = 400) -> str:
    """The end of a log on one line, for a cell of a table."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-count:])[-width:] or "it printed nothing"


def as_table(rows: Sequence[Mapping[str, str]]) -> Iterable[str]:
    """A table in Markdown with the columns of all rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for row in rows:
        yield f"| {' | '.join(row.get(name, '').replace('|', '/') for name in columns)} |"


if __name__ == "__main__":
    sys.exit(main())
