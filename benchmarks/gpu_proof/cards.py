"""A card for each part that ran: what was called, where, with which versions, and what came out.

Cards of GPUs that are checked in, in the folder `cards` beside this file, fill the column of GPUs in docs/support.md.
This file needs only Python itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.gpu_proof.pieces import MANIFEST

ROOT = Path(__file__).resolve().parents[2]
CARDS = Path(__file__).with_name("cards")
PASSED = "passed"
_SAMPLE_S = 0.5


@dataclass(frozen=True)
class Card:
    """One part on one machine.

    Attributes:
        part: Its name.
        result: `passed`, or the error.
        command: What was called.
        commit: Of slime; with `+` if files differed from it.
        date: As 2026-11-28.
        device: Such as `1 x NVIDIA H200`.
        gpus: How many; 0 for a run on a CPU, whose card says nothing of GPUs.
        driver: Version of NVIDIA's driver.
        versions: Package -> version.
        seconds: How long the part took, with its start.
        peak_memory_gib: The most that was in use of one GPU; on a CPU, of the host's memory beyond what was before.
        numbers: Rows of the part's table.
    """

    part: str
    result: str
    command: str
    commit: str
    date: str
    device: str
    gpus: int
    driver: str
    versions: Mapping[str, str]
    seconds: float
    peak_memory_gib: float
    numbers: Sequence[Mapping[str, str]] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Write the card into a folder; returns the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.date}-{_plain(self.device)}-{_plain(self.part)}.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path


def read_cards(folder: Path = CARDS) -> list[Card]:
    """The cards in a folder, oldest first."""
    found = [Card(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda card: card.date)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def commit() -> str:
    """The commit of this checkout, or of the bundle that it was unpacked from."""
    words = ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        manifest = ROOT.parent / MANIFEST
        if not manifest.is_file():
            return "unknown"
        return str(json.loads(manifest.read_text(encoding="utf-8"))["about"]["commit"])


class MemoryWatch:
    """The most memory in use while a part runs, as the driver sees it (without a GPU: as the kernel does)."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._before = 0 if on_gpu else _host_bytes()
        self._peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def peak_gib(self) -> float:
        """The largest so far."""
        return round(self._peak / 2**30, 2)

    def _watch(self) -> None:
        while True:
            now = gpu_bytes() if self._on_gpu else _host_bytes() - self._before
            self._peak = max(self._peak, now)
            if self._over.wait(_SAMPLE_S):
                return


def gpu_bytes() -> int:
    """Memory in use of the GPU that has the most in use; 0 if the driver's tool does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return max((int(line) * 2**20 for line in answer.split() if line.isdigit()), default=0)


def _host_bytes() -> int:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    sizes = {name: int(kib) * 2**10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return sizes["MemTotal"] - sizes["MemAvailable"]
