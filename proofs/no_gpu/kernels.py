"""flash-attn-4's kernels, forward and backward, compiled for the stand-in as `slime_fused.attention` calls them.

    python -m proofs.no_gpu.kernels PART ...     (started by `proofs.no_gpu`, in the environment of the stand-in)

Its compiler wants no device if tensors are torch's fake ones; it then compiles what a call needs and starts nothing.
What it compiled, it leaves as object files in the folder of its cache. A line of JSON for each part, as of
`proofs.no_gpu.parts`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from proofs.no_gpu.cases import ATTENTION, published
from slime_fused import attention

#: what a call with gradients starts: the passes, and before and after the second what sums and rounds
PASSES = ("fwd", "bwd_pre", "bwd", "bwd_post")
#: of a full micro-batch, and of each of its sequences at most
TOKENS, LONGEST, SEQUENCES = 8192, 2048, 4


def main(names: list[str]) -> None:
    """Compile the parts."""
    for name in names:
        print(json.dumps({"part": name, **compiled(published(ATTENTION[name]))}), flush=True)


def compiled(model: Mapping[str, Any]) -> dict[str, Any]:
    """The objects of each pass that there are now, or what is wrong.

    Args:
        model: Its config.json.
    """
    heads, groups = model["num_attention_heads"], model["num_key_value_heads"]
    width = model.get("head_dim") or model["hidden_size"] // heads
    kernel = attention.kernel_for(torch.cuda.get_device_capability(), torch.bfloat16, width)
    if kernel is None or kernel is attention._varlen:
        return {"error": "flash-attn-4 does not serve"}
    try:
        with FakeTensorMode():
            query, key, value = (
                torch.empty(TOKENS, count, width, dtype=torch.bfloat16, device="cuda:0", requires_grad=True)
                for count in (heads, groups, groups)
            )
            ends = torch.empty(SEQUENCES + 1, dtype=torch.int32, device="cuda:0")
            result = kernel(query, key, value, ends, LONGEST, width**-0.5)
            torch.autograd.grad(result, [query, key, value], torch.empty_like(result))
    except Exception as error:  # noqa: BLE001 - whatever is wrong is what this program looks for
        return {"error": f"{type(error).__name__}: {error}"}
    folder, target = Path(os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"]), os.environ["CUTE_DSL_ARCH"]
    found = {name: [*folder.glob(f"*/{name}/*.o")] for name in PASSES}
    wrong = [name for name, objects in found.items() if not objects]
    wrong += [
        f"{path.parent.name} for {target}"
        for path in itertools.chain(*found.values())
        if target.encode() not in path.read_bytes()
    ]
    if wrong:
        return {"error": f"not compiled: {', '.join(wrong)}"}
    return {"target": target, "kernels": {name: len(objects) for name, objects in found.items()}}


if __name__ == "__main__":
    main(sys.argv[1:])
