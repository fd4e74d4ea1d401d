"""What runs on the stand-in, one part after the other.

    python -m proofs.no_gpu.parts PART ...     (started by `proofs.no_gpu`, in the environment of the stand-in)

PART is a case of `proofs.no_gpu.cases`, or `turns`. A line of JSON for each: what was found, or the error.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from proofs.no_gpu.cases import TURNS
from proofs.no_gpu.step import step
from proofs.no_gpu.turns import turns
from slime.train import parallel


def main(names: list[str]) -> None:
    """Run the parts."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # has no stand-in
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"part": name, **found_by(name, Path(folder))}), flush=True)
        parallel.stop(failed=True)
        gc.collect()
        torch.cuda.empty_cache()


def found_by(name: str, folder: Path) -> dict[str, Any]:
    """What a part found, or its error."""
    try:
        return turns(folder) if name == TURNS else step(name, folder)
    except Exception as error:  # noqa: BLE001 - whatever is wrong is what this program looks for
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        at = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(frames))
        return {"error": f"{type(error).__name__}: {error} ({at})"}


if __name__ == "__main__":
    main(sys.argv[1:])
