"""Peak memory of a training step by the lengths of prompt and response, for three ways to run the output layer.

    python benchmarks/bench_logits_memory.py [--prompts 1024 4096 16384] [--responses 4096 16384] [--vocabulary 32768]

- all rows: logits of every token, prompts included, from which those of the response are taken
- response: logits of the response's rows, all at once, as slime did before it had chunks
- trained: what slime does: logits of trained rows, at most `CHUNK_ELEMENTS` at a time, forward and backward

Each measurement is one step of a real trainer rank in a process of its own, on one sample, in float32: the peak of the
step's resident memory above that before it, as the kernel counts it. "layers" is the same with a single trained token:
the part that is not logits. "logits" is the peak of "trained" between the end of the last layer's forward pass and the
beginning of its backward pass, above the memory at that time, and "predicted" what a dry run says of it. With --trained
below 1, tools wrote the first part of the response.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("all rows", "response", "trained", "layers")
MIB = 2**20


def resident(field: str) -> int:
    """Bytes of this process, now (`VmRSS`) or at its peak (`VmHWM`)."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class Peak:
    """The peak of this process, of a whole step and of its logits alone."""

    def __init__(self) -> None:
        self.highest = self.logits = 0
        self._before = self._start()
        self.highest = 0  # what was before does not count

    def _start(self) -> int:
        """Let the peak begin anew; the memory now."""
        self.highest = max(self.highest, resident("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")
        return resident("VmRSS")

    def watch_logits(self) -> None:
        """Measure from what a rank's model returns until its gradient is there."""
        from slime.train import output_layer

        log_probs_of = output_layer.PolicyModel.log_probs

        def log_probs(model: Any, hidden: Any, *rest: Any, **options: Any) -> tuple[Any, ...]:
            before = self._start()

            def done(_: Any) -> None:
                self.logits = resident("VmHWM") - before

            hidden.register_hook(done)
            return log_probs_of(model, hidden, *rest, **options)

        output_layer.PolicyModel.log_probs = log_probs  # type: ignore[method-assign]  # replaced by one that calls and watches it

    @property
    def added(self) -> int:
        """The whole step's."""
        return max(self.highest, resident("VmHWM")) - self._before


def use_way(way: str) -> None:
    """Have this process run the output layer that way."""
    import torch

    from slime.train import output_layer

    if way in ("all rows", "response"):
        output_layer.CHUNK_ELEMENTS = 1 << 62
    if way == "all rows":
        chosen_rows = output_layer.PolicyModel.log_probs

        def log_probs(model: Any, hidden: Any, rows: Any, targets: Any, **options: Any) -> tuple[Any, ...]:
            every = targets.new_zeros(len(hidden)).index_put((rows,), targets)
            found = chosen_rows(model, hidden, torch.arange(len(hidden)), every, **options)
            return tuple(one[rows] for one in found)

        output_layer.PolicyModel.log_probs = log_probs  # type: ignore[method-assign]  # replaced by the way that is measured


def measure(folder: Path, way: str, prompt: int, response: int, trained: float, vocabulary: int) -> dict[str, float]:
    """In a new process: bytes that one step adds, its loss, its CPU seconds, and predicted bytes of logits."""
    from tests.support.families import read_architecture
    from tests.train.harness import RankLauncher, make_batch, make_config

    from slime.engine.ports import LOOPBACK, free_port
    from slime_planner.predicted_memory import logits_memory

    use_way(way)
    config = make_config(
        folder,
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        threads_per_rank=1,
        micro_batch_size=1,
        rollout_max_response_len=response,
        entropy_coef=0.1,
        megatron={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    )
    rank = RankLauncher(0, 1, free_port(LOOPBACK)).start(config)
    lengths = {"prompt": (prompt, prompt), "response": (response, response)}
    batch = make_batch(samples=1, vocab=vocabulary, masked=False, **lengths)
    kept = 1 if way == "layers" else round(response * trained)
    batch.loss_masks[0][: response - kept] = 0
    rank.train(make_batch(samples=1, vocab=vocabulary, masked=False))  # what the first step of a process allocates
    peak, start = Peak(), time.process_time()
    peak.watch_logits()
    metrics = rank.train(batch)
    found = {"added": peak.added, "logits": peak.logits, "cpu": time.process_time() - start, "loss": metrics["loss"]}
    found["predicted"] = logits_memory(config, read_architecture(folder))
    rank.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--responses", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--trained", type=float, default=1.0, help="trained share of a response")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.child:
        folder, way, prompt, response = args.child
        found = measure(Path(folder), way, int(prompt), int(response), args.trained, args.vocabulary)
        print(json.dumps(found))
        return
    from tests.support.tiny_models import make_tiny_model

    shortest = args.responses[0]
    lengths = [(prompt, shortest) for prompt in args.prompts]
    lengths += [(args.prompts[0], response) for response in args.responses[1:]]
    print(f"vocabulary {args.vocabulary:,}, hidden 64, one layer, {args.trained:.0%} of the response trained\n")
    print(
        f"{'prompt':>7} {'response':>9} "
        + " ".join(f"{way + ', MiB':>14} {'CPU s':>6}" for way in WAYS)
        + f" {'logits, MiB':>12} {'predicted':>10}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        context = max(prompt + response for prompt, response in lengths)
        sizes = {"vocab_size": args.vocabulary, "num_hidden_layers": 1, "max_position_embeddings": context}
        make_tiny_model(folder, "qwen3", seed=0, tied=True, **sizes)
        for prompt, response in lengths:
            row, losses, logits = f"{prompt:>7} {response:>9} ", set(), ""
            for way in WAYS:
                words = [sys.executable, __file__, "--child", str(folder), way, str(prompt), str(response)]
                words += ["--vocabulary", str(args.vocabulary), "--trained", str(args.trained)]
                done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=1800, cwd=ROOT)
                found = json.loads(done.stdout.splitlines()[-1])
                row += f"{found['added'] / MIB:>14.0f} {found['cpu']:>6.1f} "
                if way == "trained":
                    logits = f"{found['logits'] / MIB:>12.0f} {found['predicted'] / MIB:>10.0f}"
                if way != "layers":
                    losses.add(round(found["loss"], 4))
            print(row + logits, flush=True)
            assert len(losses) == 1, f"the ways have losses {losses}; expected the same"


if __name__ == "__main__":
    main()
