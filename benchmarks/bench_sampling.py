"""CPU time of sampling one token for each of 64 requests on one thread, by seeds and without.

python benchmarks/bench_sampling.py [--vocabularies 640 32768 152064]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from slime_cpu.sglang_sampling import murmur_hash32, sample_by_seed

REQUESTS = 64
REPEATS = 5


def with_noise(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """SGLang's `multinomial_with_seed`: noise for every entry, and the largest sum."""
    hashed = murmur_hash32(seeds, positions, torch.arange(log_probs.shape[1]))
    noise = hashed.double() / (2**32 - 1)
    noise.log_().clamp_(min=torch.finfo(noise.dtype).min, max=-(2.0**-32)).neg_().log_().neg_()
    return noise.add_(log_probs.double()).argmax(1, keepdim=True)


def without_seeds(log_probs: Tensor, *_: Tensor) -> Tensor:
    """What engines without seeds do."""
    return torch.multinomial(torch.softmax(log_probs, -1), 1)


def milliseconds(sample: Callable[..., Tensor], *arguments: Tensor) -> float:
    """The smallest CPU time of a call."""
    times = []
    for _ in range(REPEATS):
        before = time.process_time()
        sample(*arguments)
        times.append(time.process_time() - before)
    return 1e3 * min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[640, 32768, 152064])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'vocabulary':>10}{'SGLang':>12}{'slime':>12}{'no seeds':>12}   CPU ms")
    for size in options.vocabularies:
        log_probs = torch.log_softmax(3 * torch.randn(REQUESTS, size), -1)
        arguments = log_probs, torch.arange(REQUESTS), torch.arange(REQUESTS)
        times = [milliseconds(sample, *arguments) for sample in (with_noise, sample_by_seed, without_seeds)]
        print(f"{size:>10}" + "".join(f"{one:>12.2f}" for one in times), flush=True)


if __name__ == "__main__":
    main()
