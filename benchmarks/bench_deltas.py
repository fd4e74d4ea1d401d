"""How much of bfloat16 weights an optimizer step changes, how small a delta of it is, and what packing takes.

    python benchmarks/bench_deltas.py [--mib 32] [--std 0.02] [--lr 1e-6 1e-5]

The weights are normal numbers, and each moves by a normal number of at most `--lr`, as Adam moves them. They are packed
and applied as `--disk-delta` does, by one thread. CPU seconds are counted, which a busy machine lengthens too.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

import numpy as np
import torch

from slime.weights.deltas import Bytes, checksum, pack, unpack


def bytes_of(weights: torch.Tensor) -> Bytes:
    """The weights in bfloat16."""
    data: Bytes = weights.bfloat16().view(torch.uint8).numpy()
    return data


def main() -> None:
    """Print a line for each learning rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--std", type=float, default=0.02)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = args.std * torch.randn(args.mib * 2**19)
    for rate in args.lr:
        after = before + rate * torch.randn(before.numel()).clamp(-1, 1)
        old, new = bytes_of(before), bytes_of(after)
        times = [time.process_time()]
        changed = np.count_nonzero(old.view("u2") != new.view("u2")) / before.numel()
        packed = pack(old, new, 2)
        checksum(new)
        times.append(time.process_time())
        assert np.array_equal(unpack(old, packed, 2), new)
        checksum(new)
        times.append(time.process_time())
        packing, applying = (new.size / (end - begin) / 1e9 for begin, end in pairwise(times))
        print(
            f"lr {rate:g}: {100 * changed:.1f} % of the numbers changed; {len(packed) / (changed * new.size):.2f} bytes"
            f" of the delta for each of theirs; a thread compares and packs {packing:.2f} GB/s, applies {applying:.2f}"
        )


if __name__ == "__main__":
    main()
