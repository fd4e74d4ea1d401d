"""Peak memory and speed of `slime convert`: memory should grow with the largest tensor, not with the model.

    python benchmarks/bench_convert.py [--layers 4 16] [--hidden 2048] [--checkpoint DIR] [--folder /tmp]

Model folders with random fp8 weights are written, converted and deleted; with --checkpoint, that checkpoint of --save
is converted too. Memory is the peak of the resident set of the process, less that of converting a tiny model, which is
what the imports need.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

BLOCK = 128
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """One conversion."""

    peak: int
    seconds: float
    written: int


def write_model(folder: Path, *, layers: int, hidden: int) -> None:
    """A Llama with random fp8 weights, one file a layer."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    index: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file)
        index.update(dict.fromkeys(tensors, file))

    for layer in range(layers):
        held = {
            f"model.layers.{layer}.{one}_layernorm.weight": torch.ones(hidden) for one in ("input", "post_attention")
        }
        square = {f"self_attn.{one}_proj": (hidden, hidden) for one in "qkvo"}
        wide = {"mlp.gate_proj": (4 * hidden, hidden), "mlp.up_proj": (4 * hidden, hidden)}
        for name, (rows, columns) in {**square, **wide, "mlp.down_proj": (hidden, 4 * hidden)}.items():
            weight = f"model.layers.{layer}.{name}.weight"
            held[weight] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            held[f"{weight}_scale_inv"] = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) + 0.5
        write(f"layer-{layer}.safetensors", held)
    write(
        "rest.safetensors",
        {"model.embed_tokens.weight": torch.randn(8192, hidden).bfloat16(), "model.norm.weight": torch.ones(hidden)},
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def convert(source: Path, folder: Path) -> Measured:
    """Convert in a process of its own."""
    # Not `getrusage`: the kernel counts this process's memory, from before the exec, as the child's too.
    code = (
        "import sys; from slime.cli.main import main; code = main(sys.argv[1:])\n"
        "[peak] = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')]\n"
        "print(peak); sys.exit(code)"
    )
    words = [sys.executable, "-c", code, "convert", str(source), str(folder)]
    began = time.perf_counter()
    ended = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=3600, check=False
    )
    seconds = time.perf_counter() - began
    if ended.returncode:
        raise SystemExit(ended.stderr)
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Measured(int(ended.stdout.splitlines()[-1]) * 1024, seconds, written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--checkpoint", type=Path, default=None)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        write_model(Path(place, "tiny"), layers=1, hidden=128)
        base = convert(Path(place, "tiny"), Path(place, "tiny-out"))
        print(f"imports: {base.peak / MIB:.0f} MiB, {base.seconds:.1f} s")
        largest = 4 * options.hidden**2 * 2
        for layers in options.layers:
            source, target = Path(place, f"fp8-{layers}"), Path(place, f"bf16-{layers}")
            write_model(source, layers=layers, hidden=options.hidden)
            found = convert(source, target)
            print(
                f"{layers} layers, {found.written / MIB:.0f} MiB written, largest tensor {largest / MIB:.0f} MiB:"
                f" {(found.peak - base.peak) / MIB:.0f} MiB above the imports, {found.seconds - base.seconds:.1f} s"
            )
        if options.checkpoint is not None:
            found = convert(options.checkpoint, Path(place, "checkpoint"))
            above = (found.peak - base.peak) / MIB
            print(f"checkpoint, {found.written / MIB:.0f} MiB written: {above:.0f} MiB above, {found.seconds:.1f} s")


if __name__ == "__main__":
    main()
