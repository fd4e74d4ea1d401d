"""The memory that a dry run predicts against the memory of real ranks and engines on a CPU, by part.

    python benchmarks/bench_predicted_memory.py [--tokens 8192] [--only dense mixture]

Each shape is a real trainer rank in processes of its own, which trains on one sample, and a real engine:

- weights, gradients, optimizer: bytes of the rank's tensors after a step
- activations: bytes of the tensors that autograd keeps for the backward pass, each storage once, at most at one time
- logits: peak of resident memory between the last layer's forward and backward pass, above the memory at that time
- whole step: peak of resident memory in a step above that before it: activations, logits or gradients of activations,
  and whatever else
- total: weights + gradients + optimizer + whole step
- KV cache: what the engine's log says that it allocated

Activations are counted, since resident memory cannot tell them from temporaries and from what the allocator keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
RESPONSE = 1024
_SIZES = {
    "hidden_size": 320,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 4096,
}
_EXPERTS = {"moe_intermediate_size": 256, "num_hidden_layers": 4}
_AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: name -> family, sizes, Megatron's options, part of the tokens
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "dense": ("qwen3", {"head_dim": 40}, {}, 1),
    "dense, bfloat16": ("qwen3", {"head_dim": 40}, {"bf16": True}, 0.5),
    "dense, recomputed": ("qwen3", {"head_dim": 40}, _AGAIN, 1),
    "mixture": ("qwen3_moe", {"head_dim": 40, **_EXPERTS}, {}, 1),
    # Its attention keeps all scores on a CPU, which grow with the square of the tokens.
    "latent": ("deepseek_v3", {"num_key_value_heads": 8, "num_nextn_predict_layers": 0, **_EXPERTS}, {}, 0.25),
}


def measure(folder: Path, megatron: dict[str, Any], tokens: int, *, saved: bool) -> dict[str, dict[str, float]]:
    """In a new process: measured and predicted bytes of a rank; `saved` counts activations in place of a whole step."""
    from bench_logits_memory import Peak
    from tests.support.families import read_architecture
    from tests.support.saved_tensors import SavedTensors
    from tests.train.harness import RankLauncher, make_batch, make_config

    from slime.engine.ports import LOOPBACK, free_port
    from slime_planner.pipeline_stages import stage_of_layers
    from slime_planner.predicted_activations import activation_memory, largest_micro_batch
    from slime_planner.predicted_memory import logits_memory, rank_memory

    prompt = tokens - RESPONSE
    config = make_config(
        folder,
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        micro_batch_size=1,
        rollout_max_prompt_len=prompt,
        rollout_max_response_len=RESPONSE,
        # A sum inside the matrix product marks parameters, which the counting of saved tensors would hide.
        megatron={**megatron, **({"gradient_accumulation_fusion": False} if saved else {})},
    )
    model = read_architecture(folder)
    batch = make_batch(samples=1, vocab=4096, prompt=(prompt, prompt), response=(RESPONSE, RESPONSE), masked=False)
    rank = RankLauncher(0, 1, free_port(LOOPBACK)).start(config)
    weights = [weight for chunk in rank.policy.chunks for weight in chunk.parameters()]
    rank.train(make_batch(samples=1, vocab=4096, masked=False))  # what the first step of a process allocates
    found: dict[str, float] = {}
    if saved:
        batch.loss_masks[0][:-1] = 0  # what is kept of logits is another part
        with SavedTensors(weights) as kept:
            rank.train(batch)
        found["activations"] = kept.peak
    else:
        peak = Peak()
        peak.watch_logits()
        rank.train(batch)
        found |= {"logits": peak.logits, "whole step": peak.added}
        states = optimizer_states(rank.policy.optimizer)
        parts = {"weights": weights, "gradients": [weight.main_grad for weight in weights], "optimizer": states}
        found |= {name: sum(one.numel() * one.element_size() for one in tensors) for name, tensors in parts.items()}
        found["total"] = found["whole step"] + sum(found[name] for name in parts)
    rank.close()

    [one] = rank_memory(config, model)
    stages = stage_of_layers(config, int(model.transformer["num_layers"]))
    [activations] = activation_memory(config, model, stages, largest_micro_batch(config))
    logits = logits_memory(config, model)
    predicted = {
        "weights": one.weights,
        "gradients": one.gradients,
        "optimizer": one.optimizer,
        "activations": activations.kept + activations.again,
        "logits": logits,
        "whole step": activations.peak(logits),
        "total": one.total + activations.peak(logits),
    }
    return {name: {"measured": value, "predicted": predicted[name]} for name, value in found.items()}


def optimizer_states(optimizer: Any) -> list[Any]:
    """The tensors of Adam: moments, and the float32 weights where the model's have half precision."""
    import torch

    found: dict[int, Any] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for weight, state in part.optimizer.state.items():
            found |= {id(value): value for value in state.values() if torch.is_tensor(value) and value.ndim}
            if optimizer.config.bf16:
                found[id(weight)] = weight
    return list(found.values())


def measure_engine(folder: Path) -> dict[str, dict[str, float]]:
    """In a new process: the KV cache that an engine's log states, and the predicted one."""
    from tests.support.families import read_architecture
    from tests.train.harness import make_config

    from slime.engine.server import EngineServer, EngineSpec
    from slime_planner.predicted_cache import cache_token_bytes, cache_tokens

    log = folder.parent / "engine.log"
    server = EngineServer(EngineSpec(model_path=str(folder), device="cpu", log_path=log))
    try:
        server.start()
        server.wait_ready(180.0)
    finally:
        server.stop()
    lines = [line for line in log.read_text().splitlines() if "KV Cache is allocated" in line or "KV size" in line]
    sizes = re.findall(r"\b(?:KV|K|V) size: ([\d.]+) GB", lines[0] if lines else "")
    assert sizes, f"{log} does not say what was allocated"
    config = make_config(folder)
    tokens = cache_tokens(config)
    assert tokens is not None
    predicted = tokens * cache_token_bytes(config, read_architecture(folder))
    return {"KV cache": {"measured": sum(map(float, sizes)) * 2**30, "predicted": predicted}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the sample; some shapes get a part of them")
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.child:
        folder, name, what = args.child
        megatron = SHAPES[name][2]
        found = (
            measure_engine(Path(folder))
            if what == "engine"
            else measure(Path(folder), megatron, args.tokens, saved=what == "saved")
        )
        print(json.dumps(found))
        return
    from tests.support.tiny_models import make_tiny_model

    print(f"{'shape':<20} {'part':<12} {'predicted, MiB':>14} {'measured, MiB':>14} {'ratio':>6}")
    for name in args.only:
        family, sizes, _, part = SHAPES[name]
        tokens = round(args.tokens * part)
        with tempfile.TemporaryDirectory() as temporary:
            folder = make_tiny_model(
                Path(temporary) / "model", family, seed=0, **_SIZES | sizes | {"max_position_embeddings": tokens + 8}
            )
            for what in ("step", "saved", "engine"):
                if what == "engine" and "," in name:
                    continue  # the same model as "dense"
                words = [sys.executable, "-W", "ignore", __file__, "--child", str(folder), name, what]
                words += ["--tokens", str(tokens)]
                # Every tensor of a micro-batch goes back to the kernel when it is freed, so that resident memory is
                # what is in use.
                environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB // 4)}
                done = subprocess.run(
                    words, env=environment, capture_output=True, text=True, timeout=1800, cwd=ROOT, check=False
                )
                assert done.returncode == 0, done.stderr
                for part_name, one in json.loads(done.stdout.splitlines()[-1]).items():
                    measured, predicted = one["measured"], one["predicted"]
                    print(
                        f"{name:<20} {part_name:<12} {predicted / MIB:>14.1f} {measured / MIB:>14.1f}"
                        f" {predicted / measured:>6.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
