"""The parts of `make gpu-proof` run on a CPU with tiny shapes, and what fails becomes a row of its table."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from benchmarks.gpu_proof import pieces
from benchmarks.gpu_proof.__main__ import (
    BASE,
    ENGINES,
    PARTS,
    ROOT,
    Done,
    Part,
    Proof,
    describe_checkout,
    import_paths,
    unpacked,
)
from benchmarks.gpu_proof.cards import MemoryWatch, gpu_bytes, read_cards

PEAK_TFLOPS = 0.1


def proof(tmp_path: Path, *, device: str = "cpu", seconds: float = 300.0) -> Proof:
    options = argparse.Namespace(
        wheels=None, device=device, small=True, peak_tflops=None, limit_s=seconds, sglang="", family=None, argv=[]
    )
    options.out = tmp_path / "proof.md"
    return Proof(tmp_path, options, time.monotonic() + seconds)


def machine(gpus: str, *missing: str) -> dict[str, str]:
    names = ["Python", "driver", *ENGINES.values(), *BASE.values()]
    return {"GPUs": gpus} | {name: "not installed" if name in missing else "1.0" for name in names}


def tables(text: str) -> list[list[dict[str, str]]]:
    """The rows of each table."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines())
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1900)
def test_parts_measure_real_numbers_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "proof.md"
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--device", "cpu", "--small", "--out", str(out)]
    command += ["--peak-tflops", str(PEAK_TFLOPS), "--only", "three-way, float32", "training", "sync", "colocated"]
    command += ["engine", "quickstart", "long", "--limit-s", "1800", "--family", "qwen3"]
    command += ["--sglang=--schedule-policy fcfs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts, agreement, syncs, [shared], [alone], steps, [whole], [long] = tables(out.read_text(encoding="utf-8"))
    assert [row["result"] for row in parts] == [
        *["ok"] * 7, "skipped: needs transformer_engine", *["ok"] * 3,
    ]  # fmt: skip

    assert [row["trainer's layers"] for row in agreement] == ["torch", "fused", "te"]
    for row in agreement[:2]:
        for pair in ("trainer and transformers", "engine and transformers", "engine and trainer"):
            assert 0 < float(row[pair]) < 1e-4
    assert agreement[2]["trainer and transformers"].startswith("not measured: te needs a GPU")

    assert [(row["layers"], row["trained by"]) for row in steps] == [
        ("2 of 24", "torch"), ("2 of 24", "fused"), ("2 of 28", "fused"),
    ]  # fmt: skip
    for row, passes in zip(steps, (3, 3, 4), strict=True):
        computed = float(row["TFLOP/s"])
        assert computed > 0
        assert float(row["MFU, %"]) == pytest.approx(300 / passes * computed / PEAK_TFLOPS, abs=0.06)
        # multiplications with weights alone, which are most of it; the embedding is no multiplication
        weights = float(row["parameters"].split()[0]) * 1e6 - (112 * 512 if row["shape"].startswith("7B") else 0)
        dense = 2 * passes * weights * 256 / float(row["s per step"]) / 1e12
        assert 0.9 < computed / dense < 1.4
        assert 0.1 < float(row["peak GiB"]) < 8

    assert [row["transport"] for row in syncs] == ["tensor (shared memory)", "distributed (gloo)"]
    for row in syncs:
        equal, changed = map(int, re.findall(r"\d+", row["checksums"]))
        assert equal == changed > 20
        assert float(row["MB"]) > 0.1
        assert 0 < float(row["later syncs s"]) < 60

    assert (alone["prompts at once"], alone["generated tokens"]) == ("8", "128")
    assert alone["in the loop"] == shared["tokens per s"]
    assert float(alone["tokens per s"].replace(",", "")) > 0
    for loop in (shared, long):
        assert 0 < float(loop["generate s"]) < float(loop["step s"])
        assert 0 < float(loop["sync s"]) < float(loop["step s"])
        assert 0 < float(loop["largest gap"]) < 0.1  # of bfloat16
    before, after = map(float, whole["accuracy"].split(" to "))
    assert before < after

    found = {card.part: card for card in read_cards(tmp_path / "proof-cards")}
    assert [*found] != [] and {*found} == {row["part"] for row in parts if row["result"] == "ok"}
    for card in found.values():
        assert (card.result, card.gpus) == ("passed", 0)
        assert "small shapes" in card.device and "--family qwen3" in card.command
        assert card.versions["torch"] == importlib.metadata.version("torch")
        assert card.peak_memory_gib > 0
    assert found["quickstart"].numbers == [whole]


def test_a_part_that_fails_is_a_row_with_the_end_of_its_error(tmp_path: Path) -> None:
    failing = Part("engine", "engine alone", "bench:json")
    text, failed = proof(tmp_path).table(machine("none"), [failing])
    [[row]] = tables(text)
    assert failed
    assert row["result"].startswith("failed (code 1)")
    assert "TypeError: 'module' object is not callable" in row["result"]
    kept = tmp_path / "proof-logs" / "engine-alone" / "engine-alone.log"  # the whole of it
    assert "Traceback" in kept.read_text(encoding="utf-8")


def test_logs_of_what_a_failed_part_started_are_kept_and_those_of_the_proof_before_are_not(tmp_path: Path) -> None:
    (tmp_path / "proof-logs" / "engine-alone").mkdir(parents=True)
    for log in (tmp_path / "engine-1.log", tmp_path / "colocated" / "a-run" / "logs" / "engine-0.log"):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("the kernel does not fit")
    again = proof(tmp_path)
    again.table(
        machine("none"), [Part("colocated", "colocated loop", "bench:json"), Part("engine", "next", "bench:json")]
    )
    kept = {path.relative_to(tmp_path / "proof-logs").as_posix() for path in (tmp_path / "proof-logs").rglob("*.log")}
    assert kept == {f"colocated-loop/{name}.log" for name in ("colocated-loop", "engine-1", "engine-0")} | {
        "next/next.log"
    }


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    hanging = Part("quickstart", "hangs", "serving:quickstart", share_s=1)  # the imports alone take longer
    began = time.monotonic()
    following = Part("engine", "next", "bench:json", share_s=99)
    text, failed = proof(tmp_path, seconds=100.0).table(machine("none"), [hanging, following])
    [rows] = tables(text)
    assert failed
    assert rows[0]["result"].startswith("no answer within 1 s")
    assert rows[1]["result"].startswith("failed (code 1)")
    assert time.monotonic() - began < 99
    cards = {card.part: card for card in read_cards(tmp_path / "proof-cards")}
    assert cards["hangs"].result == rows[0]["result"] and cards["next"].result == rows[1]["result"]


def test_parts_share_ten_minutes_and_take_what_others_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}

    def record(_: Proof, part: Part, limit_s: float) -> Done:
        limits[part.name] = round(limit_s)
        return Done("ok", [], 0.0, 0.0)

    monkeypatch.setattr(Proof, "run", record)
    parts = [Part("sync", name, "bench:json", share_s=share) for name, share in (("a", 10), ("b", 20), ("c", 30))]
    absent = Part("sync", "two GPUs", "bench:json", share_s=500, gpus=2)
    _, failed = proof(tmp_path, device="cuda", seconds=600).table(machine("1 x NVIDIA H200"), [absent, *parts])
    assert not failed
    # Nothing is kept for what cannot run. Each part here ends at once, so that the next gets its share too.
    assert limits == {"a": 100, "b": 300, "c": 600}
    assert sum(part.share_s for part in PARTS if part.gpus == 1) <= 600


@pytest.mark.parametrize(
    ("found", "seconds", "reason"),
    [
        (machine("2 x NVIDIA H200", "sglang", "ray"), 60.0, "skipped: needs sglang, ray"),
        (machine("1 x NVIDIA H200"), 60.0, "skipped: needs 2 GPUs, this machine has 1"),
        (machine("2 x NVIDIA H200"), 0.0, "skipped: the 0 s for everything were over"),
    ],
)
def test_what_cannot_run_is_a_row_with_the_reason(
    tmp_path: Path, found: dict[str, str], seconds: float, reason: str
) -> None:
    part = Part("sync", "sync", "serving:sync", needs=("torch", "sglang", "ray"), gpus=2)
    text, failed = proof(tmp_path, device="cuda", seconds=seconds).table(found, [part])
    [[row]] = tables(text)
    assert (row["result"], failed) == (reason, False)


def test_a_checkout_that_is_not_installed_has_its_plugins(tmp_path: Path) -> None:
    paths = describe_checkout(tmp_path)
    [found] = importlib.metadata.distributions(name="slime-rl", path=[str(tmp_path)])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plugins = {point.name: point.value for point in found.entry_points if point.group == "slime"}
    assert plugins == project["entry-points"]["slime"]
    assert all(any((Path(folder) / module).is_dir() for folder in paths) for module in plugins.values())


def test_layers_and_peaks_of_known_gpus() -> None:
    from benchmarks.gpu_proof.training import SHAPES, layers_that_fit, peak_tflops

    assert [peak_tflops(name) for name in ("NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA H20", "Unknown")] == [
        989.0, 756.0, 148.0, None,
    ]  # fmt: skip
    assert layers_that_fit(SHAPES["0.5B"], 80 * 2**30) == 24
    assert 1 <= layers_that_fit(SHAPES["7B"], 80 * 2**30) < layers_that_fit(SHAPES["7B"], 140 * 2**30) < 28
    with pytest.raises(MemoryError, match=r"one layer needs .* GiB, and 8 GiB of GPU memory are free"):
        layers_that_fit(SHAPES["7B"], 8 * 2**30)


def test_wheels_of_a_bundle_are_installed_once_and_before_other_packages(tmp_path: Path) -> None:
    wheel = tmp_path / "sprocket-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sprocket.py", "TEETH = 12\n")
        archive.writestr("sprocket-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sprocket\nVersion: 1.0\n")
        archive.writestr(
            "sprocket-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("sprocket-1.0.dist-info/RECORD", "")
    pieces.cut({f"wheels/{wheel.name}": wheel}, tmp_path / "bundle", limit=100, about={"commit": "abc"})
    wheels = unpacked(tmp_path / "bundle", tmp_path / "unpacked")
    assert wheels is not None
    paths = import_paths(tmp_path / "site", wheels)
    words = [sys.executable, "-c", "import sprocket; print(sprocket.TEETH)"]
    done = subprocess.run(words, env={"PYTHONPATH": paths[0]}, capture_output=True, text=True, check=True)
    assert done.stdout == "12\n"
    installed = Path(paths[0], "sprocket.py").stat().st_mtime_ns
    assert import_paths(tmp_path / "again", wheels)[0] == paths[0]
    assert Path(paths[0], "sprocket.py").stat().st_mtime_ns == installed

    (tmp_path / "bundle" / "piece-0001").unlink()
    with pytest.raises(SystemExit, match="piece-0001 is missing"):
        unpacked(tmp_path / "bundle", tmp_path / "unpacked")


def test_a_machine_that_has_everything_gets_a_bundle_without_wheels(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("source")
    pieces.cut({"text": tmp_path / "text"}, tmp_path / "bundle", limit=100, about={})
    (tmp_path / "unpacked" / "wheels").mkdir(parents=True)
    (tmp_path / "unpacked" / "wheels" / "old-1.0-py3-none-any.whl").write_text("of a bundle before")
    assert unpacked(tmp_path / "bundle", tmp_path / "unpacked") is None


def test_memory_is_that_of_the_gpu_that_has_the_most_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '1024\\n40960\\n[N/A]\\n'\n")
    tool.chmod(0o755)
    assert gpu_bytes() == 0
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with MemoryWatch(on_gpu=True) as memory:
        time.sleep(0.1)
    assert memory.peak_gib == 40.0
