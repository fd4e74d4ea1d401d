"""Seconds to give an engine on this machine new weights, by each transport, against a copy of the same bytes in memory.

    python benchmarks/bench_weight_sync.py [--only 1M 10M 100M] [--transports tensor distributed disk] [--syncs 9]

A real SGLang server on the CPU gets tensors of a random float32 model; nothing else uses it. A copy is one of the same
tensors to tensors of this process that exist already, with as many threads. Syncs and copies take turns; medians are
shown, and what is left of a sync without its tensors ("calls": pause, begin, end, flush, resume) is the time to send
one small tensor.

    python benchmarks/bench_weight_sync.py --stages [--only 1M 10M 100M] [--transports ... delta] [--syncs 9]

Two pipeline stages of Megatron shards (two ranks) send the same models: rank 0 alone, and each stage its own tensors.
Both ways take turns. By `delta`, 2 % of the numbers change before each sync, and the first of all, which is a whole
version, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]


def median_ms(calls: int, *doing: Callable[[], None]) -> list[float]:
    """Milliseconds of each of several calls, which take turns; the first of each is left out."""
    taken: list[list[float]] = [[] for _ in doing]
    for _ in range(calls + 1):
        for one, times in zip(doing, taken, strict=True):
            started = time.perf_counter()
            one()
            times.append(1000 * (time.perf_counter() - started))
    return [statistics.median(times[1:]) for times in taken]


def measure(folder: Path, transports: list[str], syncs: int, threads: int) -> None:
    """Print the rows of the model in `folder`."""
    from safetensors.torch import load_file
    from tests.support.engines import cpu_engine, running
    from tests.support.families import read_architecture

    from slime.config.weight_options import SyncOptions
    from slime.weights.transports import create_transport

    weights = load_file(folder / "model.safetensors")
    size = sum(tensor.nbytes for tensor in weights.values())
    name, least = min(weights.items(), key=lambda one: one[1].nbytes)
    copies = {key: torch.zeros_like(tensor) for key, tensor in weights.items()}
    engine = cpu_engine(folder, folder, threads=threads)

    def copy() -> None:
        for key, tensor in weights.items():
            copies[key].copy_(tensor)

    with running(engine):
        for kind in transports:
            transport = create_transport(
                SyncOptions.model_validate({"update_weight_transport": kind}),
                [engine.control],
                model=read_architecture(folder),
                hf_folder=folder,
                scratch=folder,
                on_gpu=False,
            )

            def send(tensors: dict[str, Tensor], transport: object = transport) -> None:
                transport.send(iter(tensors.items()), version="1")  # type: ignore[attr-defined]

            row = [f"{size / 2**20:.1f}", str(len(weights)), kind]
            if kind == "disk":  # a folder is always that of a whole model
                sync, copied = median_ms(syncs, lambda: send(weights), copy)
                calls = ""
            else:
                sync, copied, least_ms = median_ms(syncs, lambda: send(weights), copy, lambda: send({name: least}))
                calls = f"{least_ms:.1f}"
            transport.close()
            row += [f"{sync:.1f}", f"{copied:.1f}", f"{sync / copied:.1f}", calls]
            print(f"| {' | '.join(row)} |", flush=True)


def measure_stages(folder: Path, kind: str, syncs: int, threads: int) -> None:
    """Print the row of the model in `folder` that two pipeline stages send by a transport."""
    from tests.support.engines import cpu_engine, running
    from tests.support.families import read_architecture
    from tests.weights.megatron_ranks import build, run_ranks

    from slime.config.weight_options import SyncOptions
    from slime.weights.local_copy import LocalCopy
    from slime.weights.shards import drain, named_hf_tensors
    from slime.weights.transports import create_transport
    from slime.weights.transports.stages import Turns

    engine = cpu_engine(folder, folder, threads=threads)
    model = read_architecture(folder)

    def rank(index: int) -> tuple[int, list[float]]:
        models, turns = build(folder, pp=2), Turns.of_pipeline()
        delta = kind == "delta"
        options = SyncOptions.model_validate(
            {"update_weight_transport": "disk" if delta else kind, "disk_delta": delta}
        )
        one, several = (
            create_transport(
                options,
                [engine.control],
                model=model,
                hf_folder=folder,
                scratch=folder / way,
                on_gpu=False,
                turns=of_transport,
                receive=lambda _, versions, version, __: LocalCopy(versions / "copy").bring_to(versions, version),
            )
            for way, of_transport in (("one", None), ("stages", turns))
        )

        def sync(by_stage: bool) -> None:
            for weight in (weight for chunk in models for weight in chunk.parameters() if delta):
                weight.data.view(-1)[::50] += 1e-3
            torch.distributed.barrier()
            named = named_hf_tensors(models, model, by_stage=by_stage)
            if by_stage:
                with turns.sync():
                    several.send(named, version="1")
            elif index == 0:
                one.send(named, version="1")
            else:
                drain(named)

        taken = median_ms(syncs, lambda: sync(False), lambda: sync(True))
        for transport in (one, several):
            transport.close()
        torch.distributed.barrier()
        return sum(tensor.nbytes for chunk in models for tensor in chunk.parameters()), taken

    with running(engine):
        (first, (alone, each)), (second, _) = run_ranks(rank, 2)
    row = [f"{first / 2**20:.1f} + {second / 2**20:.1f}", kind, f"{alone:.1f}", f"{each:.1f}", f"{alone / each:.2f}"]
    print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Print the table."""
    from bench_training import SHAPES
    from tests.support.tiny_models import make_tiny_model

    large = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12}
    shapes = {"1M": SHAPES["1M"][1], "10M": SHAPES["10M"][1], "100M": large}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(shapes), default=list(shapes))
    parser.add_argument("--transports", nargs="+", default=["tensor", "distributed", "disk"])
    parser.add_argument("--stages", action="store_true", help="two pipeline stages instead of the transports")
    parser.add_argument("--syncs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of the engine, and of this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heads = ["MiB", "tensors", "transport", "sync ms", "copy ms", "sync / copy", "calls ms"]
    if options.stages:
        heads = ["MiB of each stage", "transport", "one sender ms", "each stage ms", "times faster"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for shape in options.only:
        with tempfile.TemporaryDirectory(prefix="bench-weight-sync-") as made:
            folder = Path(made)
            sizes = {"head_dim": 64, "num_key_value_heads": shapes[shape]["num_attention_heads"] // 2}
            make_tiny_model(folder, "qwen3", seed=0, tied=True, vocab_size=1024, **shapes[shape], **sizes)
            if options.stages:
                for kind in options.transports:
                    measure_stages(folder, kind, options.syncs, options.threads)
            else:
                measure(folder, options.transports, options.syncs, options.threads)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
