"""Training steps, colocation's turns and compiled kernels, on a stand-in for a GPU.

    python -m proofs.no_gpu [PART ...]

It needs the packages for GPUs and gcc, and neither GPU nor driver. The exit status is 1 if a part fails, waits for the
device where it need not, computes a matrix product in another precision than the model's, or holds another amount of
memory than predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from proofs.no_gpu.cases import ATTENTION, CASES, TURNS, TURNS_MIB
from proofs.no_gpu.standin import build, run_module

#: of H100 and B200
CAPABILITIES = (90, 100)
#: where the host may wait: before a step, between it and the update, after it; and for the loads of experts. Not
#: attributed is one wait of a first pipeline stage's backward pass.
WAITS = {
    "slime/train/step.py": ("_weighted", "_on_device"),
    "slime/train/model.py": ("sum_over_ranks", "forward"),
    "slime/train/token_record.py": ("_marks", "collect", "<dictcomp>"),
    "slime/train/reference.py": ("_exchange",),
    "slime/train/routing.py": ("take_load", "<listcomp>"),
    "slime/train/experts.py": ("forward",),
    "elsewhere": ("",),
    "megatron/core/optimizer/clip_grads.py": ("get_grad_norm_fp32",),
    "megatron/core/transformer/moe/token_dispatcher.py": ("_maybe_dtoh_and_synchronize",),
}
#: whose products are in float32 on purpose
ROUTER = "megatron/core/transformer/moe/moe_utils.py"
#: parts by which what is held, and what is held at most, may differ from the prediction
HELD, PEAK = 0.02, 0.08


def problems(found: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a part."""
    if "error" in found:
        yield found["error"]
    elif found["part"] in ATTENTION:
        return
    elif found["part"] == TURNS:
        if not found["equal"]:
            yield "the trainer has not what it had before"
        if found["of_trainer_while_generating"] > found["allowed_bytes"]:
            yield f"{found['of_trainer_while_generating']:,} bytes of the trainer stay while engines generate"
        if found["sent_bytes"] != found["parameters_bytes"]:
            yield f"{found['sent_bytes']:,} bytes were sent of {found['parameters_bytes']:,}"
    else:
        for place, count in found["waits"].items():
            file, _, function = place.partition(":")
            if function.rpartition(" ")[2] not in WAITS.get(file, ()):
                yield f"waits for the device at {place}, {count} times"
        yield from (f"{count} x {product}" for product, count in found["products"].items() if ROUTER not in product)
        for what, most in (("held", HELD), ("peak", PEAK)):
            off = found[f"expected_{what}"] / found[what] - 1
            if abs(off) > most:
                yield f"{what} is {found[what]:,} bytes, and the prediction is {off:+.0%} off"


def line(found: Mapping[str, Any]) -> str:
    """A part as a row of the table."""
    if "kernels" in found:
        counts = ", ".join(f"{count} {name}" for name, count in found["kernels"].items())
        return f"{found['part']:32}compiled for {found['target']}: {counts}"
    if "peak" not in found:
        return f"{found['part']:32}"
    numbers = "".join(f"{found[name] / 2**30:9.2f}" for name in ("held", "expected_held", "peak", "expected_peak"))
    return (
        f"{found['part']:32}{numbers}{found['expected_peak'] / found['peak'] - 1:+8.1%}{sum(found['waits'].values()):7}"
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m proofs.no_gpu", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join([*CASES, TURNS, *ATTENTION])}; default: all"
    )
    names = parser.parse_args().parts or [*CASES, TURNS, *ATTENTION]
    steps, compiled = (
        [name for name in names if name in CASES and ("fused" in name) is fused] for fused in (False, True)
    )
    attention = [name for name in names if name in ATTENTION]
    runs: list[tuple[str, list[str], dict[str, int]]] = [
        ("parts", steps, {}),
        ("parts", [TURNS] if TURNS in names else [], {"mib": TURNS_MIB}),
        *(
            (module, parts, {"capability": capability})
            for module, parts in (("parts", compiled), ("kernels", attention))
            for capability in CAPABILITIES
        ),
    ]
    wrong = 0
    print(f"{'GiB':32}     held predicted  peak predicted    off  waits")
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for module, parts, device in runs:
            for text in run_module(library, f"proofs.no_gpu.{module}", parts, **device).splitlines() if parts else ():
                found = json.loads(text)
                print(line(found), flush=True)
                for problem in problems(found):
                    wrong += 1
                    print(f"    {problem}", flush=True)
        for capability in CAPABILITIES if compiled else ():
            kernels = [*Path(folder).glob(f"triton-{capability}/**/*.cubin")]
            print(f"{len(kernels)} kernels compiled for sm_{capability}")
            wrong += not kernels
    print(f"{wrong} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
