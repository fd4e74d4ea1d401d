"""Peak memory of log-probs and entropy over a large vocabulary, forward and backward: in pieces, and all at once.

    python benchmarks/bench_logprob_memory.py [--tokens 8192] [--vocabulary 150000] [--plain-tokens 2048]

Each method runs in a separate process on bfloat16 logits and computes gradients of both results. "In pieces" is what
the trainer does (`slime.train.output_layer`), "plain" converts all logits to float32 and leaves the rest to torch. It
needs about 11 times the memory of the logits, so by default it runs on fewer tokens; memory is proportional to their
number.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

GIB = 2**30


def peak() -> int:
    """Peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """In a new process: the memory that one forward and backward pass needs in addition to the logits."""
    import torch

    from slime.train.output_layer import log_probs_and_entropy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16).normal_().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    # Do not count memory that the first call of each kernel allocates.
    warm = torch.zeros(2, 64, dtype=torch.bfloat16, requires_grad=True)
    sum(log_probs_and_entropy(warm, targets[:2] % 64, temperature=1.0, vocab_size=64)).sum().backward()
    before, start = peak(), time.perf_counter()
    if way == "pieces":
        log_probs, entropy = log_probs_and_entropy(logits, targets, temperature=1.0, vocab_size=vocabulary)
    else:
        log_p = logits.float().log_softmax(-1)
        log_probs = log_p.gather(-1, targets[:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    assert logits.grad is not None
    return {
        "seconds": time.perf_counter() - start,
        "logits": logits.numel() * 2 / GIB,
        "added": (peak() - before) / GIB,
        "check": float(log_probs.double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--plain-tokens", type=int, default=2048, help="tokens for the plain method; 0: skip it")
    parser.add_argument("--child", choices=["pieces", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.tokens, args.vocabulary)))
        return
    print(f"vocabulary {args.vocabulary}, bfloat16 logits, forward and backward, one thread\n")
    print(f"{'way':<8} {'tokens':>7} {'logits GiB':>11} {'added GiB':>10} {'x logits':>9} {'seconds':>8}")
    for way, tokens in (("pieces", args.tokens), ("plain", args.plain_tokens)):
        if not tokens:
            continue
        words = [
            sys.executable,
            __file__,
            "--child",
            way,
            "--tokens",
            str(tokens),
            "--vocabulary",
            str(args.vocabulary),
        ]
        answer = subprocess.run(words, check=True, capture_output=True, text=True, timeout=1800).stdout
        found = json.loads(answer.splitlines()[-1])
        logits, added, seconds = found["logits"], found["added"], found["seconds"]
        print(f"{way:<8} {tokens:>7} {logits:>11.2f} {added:>10.2f} {added / logits:>9.1f} {seconds:>8.1f}")
    print("\nThe gradient of the logits, 1.0 x logits, is part of the added memory.")


if __name__ == "__main__":
    main()
