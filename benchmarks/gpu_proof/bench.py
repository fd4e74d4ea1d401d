"""What each part of the proof is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bench:
    """The machine that a part runs on, and where its rows go.

    Attributes:
        device: "cuda" or "cpu".
        small: Whether shapes are tiny, for a CPU.
        work: Folder that all parts of one proof share.
        rows: File of the part's rows.
        peak_tflops: What the user says that the GPU can do in dense bfloat16.
        sglang: Flags for every engine.
        family: Of the models of all engines; None: what each part uses.
    """

    device: str
    small: bool
    work: str
    rows: str
    peak_tflops: float | None = None
    sglang: Sequence[str] = ()
    family: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the parts run on a GPU."""
        return self.device == "cuda"

    @property
    def folder(self) -> Path:
        """`work` as a path."""
        return Path(self.work)

    def row(self, **cells: str) -> None:
        """Write a row at once, so that it stays if the part fails later; underscores of names become spaces."""
        with open(self.rows, "a", encoding="utf-8") as file:
            file.write(json.dumps({name.replace("_", " "): value for name, value in cells.items()}) + "\n")
