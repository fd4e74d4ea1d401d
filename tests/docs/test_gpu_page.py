"""docs/gpu.md: its files and commands work as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiny_models import make_tiny_model

from slime.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w.-]+\.(?:py|toml))`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"^```(?:bash)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
SLIME = sorted({line.removesuffix(" --dry-run") for line in COMMANDS if re.match(r"slime (train|eval) ", line)})
#: what `datasets` has of GSM8K
ROWS = [{"question": f"{n} pens for $1,000 each?", "answer": f"{n} x 1,000\n#### {n},000"} for n in (1, 2)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, the data that its program makes, and small models."""
    folder = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    stub = folder / "stub" / "datasets.py"
    stub.parent.mkdir()
    stub.write_text(f"def load_dataset(name, part, split):\n    return {ROWS!r}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(stub.parent)}
    subprocess.run([sys.executable, "gsm8k.py"], cwd=folder, env=environment, check=True)
    model = make_tiny_model(folder / "models" / "Qwen2.5-1.5B-Instruct", "qwen2", seed=0, max_position_embeddings=32768)
    shutil.copytree(model, folder / "models" / "gsm8k-trained")
    return folder


def test_the_page_has_the_commands_of_both_machines() -> None:
    assert {*FILES} == {"gsm8k.py", "gsm8k.toml"}
    assert [line.split()[1] for line in SLIME] == ["eval", "train", "train"]


@pytest.mark.parametrize("command", SLIME)
def test_its_commands_pass_the_dry_run_of_a_machine_with_those_gpus(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    gpus = 1 if "--colocate" in command or " eval " in command else 8
    for module in ("preflight_machine", "preflight_engine"):
        monkeypatch.setattr(f"slime.cli.{module}.nvidia_devices", lambda: gpus)
    assert main([*shlex.split(command)[1:], "--device", "cuda", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    if " train " in command:  # the plan of an evaluation names no devices
        assert re.search(rf"^devices +{gpus} GPUs? of this machine", printed, re.MULTILINE)
    assert "gsm8k-test.jsonl: 2 rows" in printed
    labels = [json.loads(line)["label"] for line in (place / "gsm8k-train.jsonl").read_text().splitlines()]
    assert labels == ["1000", "2000"]


def test_every_make_target_and_file_that_it_names_exists() -> None:
    targets = {line.split()[1] for line in COMMANDS if line.startswith("make ")}
    targets |= set(re.findall(r"\bmake ([a-z][a-z-]+)", " ".join(COMMANDS)))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets >= {"install", "quickstart", "gpu-proof", "gpu-bundle"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for file in ("Dockerfile", "apptainer.def", "compose.yaml"):
        assert f"`{file}`" in PAGE and (ROOT / file).is_file()


def test_it_promises_nothing_that_no_card_shows() -> None:
    assert "None of it has been run on a GPU yet" in PAGE.split("## 1.")[0]
    expected = PAGE.split("## 8. What to expect")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in expected.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) == 6
    assert sum("*not measured*" in row for row in rows) == 5  # the last is no number of a GPU
