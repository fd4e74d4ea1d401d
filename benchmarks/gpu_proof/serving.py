"""Parts of the proof with an engine: weight sync, tokens per second alone and in the loop, and whole runs."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import string
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_proof.bench import Bench
from benchmarks.gpu_proof.training import READY_S, engine, start_rank
from tests.support.engines import running
from tests.support.tiny_models import make_tiny_model
from tests.train.harness import make_config

from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineControl
from slime.plugin import SamplingParams
from slime.weights.models import Models
from slime.weights.transports import create_transport

ROOT = Path(__file__).resolve().parents[2]
_QWEN = {"initializer_range": 0.02, "max_position_embeddings": 32768, "vocab_size": 151936}
#: the shapes of Qwen2.5-0.5B and Qwen2.5-1.5B
_SHAPES = {
    "0.5B": _QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24},
    "1.5B": _QWEN
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28},
}
_TIMED_SENDS = 3
_TRAIN = (sys.executable, "-c", "import sys; from slime.cli.main import main; sys.exit(main())", "train")


def model(bench: Bench, shape: str = "0.5B") -> Path:
    """A folder with random weights of a shape, made by the first part that needs it."""
    folder = bench.folder / f"model-{shape}"
    if not folder.is_dir():
        new = bench.folder / f"model-{time.monotonic_ns()}"
        make_tiny_model(new, bench.family or "qwen2", seed=0, tied=True, **({} if bench.small else _SHAPES[shape]))
        new.rename(folder)
    return folder


def sync(bench: Bench, transport: str) -> None:
    """Seconds from the trainer's weights to an engine that holds others, and whether it then holds the same."""
    folder = model(bench)
    other_gpu = bench.on_gpu and transport == "distributed"
    server = engine(bench, folder, dtype="bfloat16", gpu=1 if other_gpu else 0, compared=True)
    options = {"update_weight_transport": transport, "check_weight_update_equal": True}
    config = make_config(folder, device=bench.device, megatron={"bf16": True}, **options)
    with running(server, ready_s=READY_S):
        rank = start_rank(config)
        with torch.no_grad():
            for chunk in rank.policy.chunks:
                for parameter in chunk.parameters():
                    parameter.data.add_(0.01)  # so that an engine that missed the update is found out
        sender = create_transport(
            config.sync,
            [EngineControl(server.url)],
            model=Models.installed(config).read(folder),
            hf_folder=folder,
            scratch=bench.folder,
            on_gpu=bench.on_gpu,
        )
        # Checksums of all tensors take longer than sending them, so only the last sync is checked.
        check, sender.check = sender.check, None
        assert check is not None
        before = checksums(server.control)
        size = sum(tensor.nbytes for _, tensor in rank.named_hf_weights())
        seconds = []
        for number in range(1 + _TIMED_SENDS):
            began = time.perf_counter()
            sender.send(rank.named_hf_weights(), version=str(number))
            seconds.append(time.perf_counter() - began)
        sender.send(check.observe(rank.named_hf_weights()), version="checked")
        check.compare(server.url, server.control.weights_checksum())  # raises if one differs from the trainer's
        after = checksums(server.control)
        sender.close()
        rank.close()
    first, usual = seconds[0], statistics.median(seconds[1:])
    through = {"tensor": "CUDA IPC", "distributed": "NCCL"} if bench.on_gpu else {"tensor": "shared memory"}
    bench.row(
        transport=f"{transport} ({through.get(transport, 'gloo')})",
        MB=f"{size / 1e6:,.2f}",
        first_sync_s=f"{first:.3f}",
        later_syncs_s=f"{usual:.3f}",
        **{"GB/s": f"{size / usual / 1e9:.3f}"},
        checksums=f"{len(after)} equal, {sum(before[name] != after[name] for name in after)} changed",
    )


def checksums(control: EngineControl) -> dict[str, Any]:
    """Checksums of the weights of an engine with one rank, by name."""
    (rank,) = control.weights_checksum()["ranks"]
    return dict(rank["checksums"])


def engine_alone(bench: Bench) -> None:
    """Tokens per second of one engine with many prompts at once: SGLang alone, and through slime's client."""
    shape = Shape.of(bench)
    whole = ["--preferred-sampling-params", json.dumps({"ignore_eos": True})]  # as in the colocated loop
    server = engine(replace(bench, sglang=[*bench.sglang, *whole]), model(bench), dtype="bfloat16")
    draw = random.Random(0)
    prompts = [[draw.randrange(4, 100) for _ in range(shape.prompt)] for _ in range(shape.prompts)]
    wanted = [prompt for prompt in prompts for _ in range(shape.siblings)]

    def alone() -> int:
        sampling = {"max_new_tokens": shape.response}
        body = json.dumps({"input_ids": wanted, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            return sum(one["meta_info"]["completion_tokens"] for one in json.load(answer))

    async def through_client() -> int:
        sampling = SamplingParams(max_new_tokens=shape.response)
        async with HttpPolicyClient(server.url, timeout_s=READY_S, concurrency=len(wanted)) as client:
            answers = await asyncio.gather(*(client.generate(tokens, sampling) for tokens in wanted))
        return sum(len(answer.tokens) for answer in answers)

    with running(server, ready_s=READY_S):
        alone()
        speed, tokens = _tokens_per_s(alone)
        with_client, _ = _tokens_per_s(lambda: asyncio.run(through_client()))
    loop = bench.folder / "colocated"  # of the part before, if it succeeded
    steps = _steps(loop) if loop.is_dir() else []
    in_loop = [f"{statistics.median(row['rollout/tokens_per_s'] for row in steps):,.0f}"] if steps else []
    bench.row(
        prompts_at_once=str(len(wanted)),
        prompt_tokens=str(shape.prompt),
        generated_tokens=f"{tokens:,}",
        tokens_per_s=f"{speed:,.0f}",
        **{"through slime's client": f"{with_client:,.0f}"},
        in_the_loop=in_loop[0] if in_loop else "not measured",
    )


def _tokens_per_s(generate: Callable[[], int]) -> tuple[float, int]:
    """The median of some calls, and the tokens of the last."""
    speeds = []
    for _ in range(_TIMED_SENDS):
        began = time.perf_counter()
        tokens = generate()
        speeds.append(tokens / (time.perf_counter() - began))
    return statistics.median(speeds), tokens


@dataclass(frozen=True)
class Shape:
    """How much is generated at once."""

    prompts: int
    siblings: int
    prompt: int
    response: int

    @classmethod
    def of(cls, bench: Bench) -> Shape:
        """The same for the engine alone and in the colocated loop."""
        return cls(2, 4, 16, 16) if bench.small else cls(32, 8, 128, 256)


def colocated(bench: Bench) -> None:
    """The loop on one GPU, which engine and trainer use in turn."""
    _colocated(bench, bench.folder / "colocated", model(bench), Shape.of(bench), rollouts=4, tokens_per_gpu=16384)


def long_responses(bench: Bench) -> None:
    """The same with a larger model and long responses."""
    shape = Shape(2, 2, 16, 64) if bench.small else Shape(4, 8, 128, 8192)
    # One sample of 8,320 tokens at a time: logits and activations of two would not fit beside the optimizer's state.
    _colocated(bench, bench.folder / "long", model(bench, "1.5B"), shape, rollouts=2, tokens_per_gpu=9216)


def _colocated(bench: Bench, work: Path, folder: Path, shape: Shape, *, rollouts: int, tokens_per_gpu: int) -> None:
    work.mkdir()
    draw = random.Random(0)
    letters = string.ascii_letters + string.digits  # one token each
    lines = (
        {"prompt": "".join(draw.choices(letters, k=shape.prompt)), "label": "0"}
        for _ in range(rollouts * shape.prompts)
    )
    (work / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    sizes = {"num-rollout": rollouts, "rollout-batch-size": shape.prompts, "n-samples-per-prompt": shape.siblings}
    sizes |= {"global-batch-size": shape.prompts * shape.siblings, "rollout-max-response-len": shape.response}
    sizes |= {"max-tokens-per-gpu": tokens_per_gpu}
    command = [*_TRAIN, "--device", bench.device, "--colocate", "--bf16", "--check-weight-update-equal"]
    command += [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    command += ["--hf-checkpoint", str(folder), "--prompt-data", str(work / "prompts.jsonl"), "--lr", "1e-6"]
    command += ["--advantage-estimator", "grpo", "--reward", "exact_match"]
    command += ["--sglang-preferred-sampling-params", json.dumps({"ignore_eos": True}), "--output-dir", str(work)]
    command += ["--sglang-dtype", "bfloat16", "--sglang-max-running-requests", "256"]
    if not bench.small:
        command += ["--sglang-mem-fraction-static", "0.5"]
    command += _prefixed(bench.sglang)
    subprocess.run(command, cwd=ROOT, check=True)
    steps = _steps(work)

    def usual(name: str) -> float:
        return statistics.median(row[name] for row in steps)

    seconds = {"generate": "wait_rollout", "train": "train", "sync": "sync_weights", "turns": "colocate"}
    memory = {"generating": "memory/held_generating", "training": "memory/held_training"}
    bench.row(
        rollouts=str(len(steps)),
        tokens_per_s=f"{usual('rollout/tokens_per_s'):,.0f}",
        step_s=f"{usual('time/step'):.2f}",
        **{f"{title}_s": f"{usual(f'time/{name}'):.2f}" for title, name in seconds.items()},
        **{f"GiB_{title}": f"{usual(name) / 2**30:.2f}" for title, name in memory.items()},
        largest_gap=f"{max(row['train/logprob_gap_max'] for row in steps):.1e}",
    )


def quickstart(bench: Bench) -> None:
    """The runs of `make quickstart`, in a folder of their own."""
    home, work = ROOT / "examples" / "quickstart", bench.folder / "quickstart"
    for script, target in (("make_model.py", "model"), ("make_data.py", "data")):
        made = work / "outputs" / "quickstart" / target
        subprocess.run([sys.executable, str(home / script), str(made)], cwd=ROOT, check=True)
    device = ["--device", bench.device, "--output-dir"]
    warm_start = [*_TRAIN, str(home / "warm_start.toml"), *device, "warm-start"]
    subprocess.run(warm_start, cwd=work, check=True)
    turns = ["--colocate"] if bench.on_gpu and torch.cuda.device_count() == 1 else []
    fewer = ["--num-rollout", "4"] if bench.small else []
    flags = [*device, "grpo", *turns, *fewer, *_prefixed(bench.sglang)]
    subprocess.run([*_TRAIN, str(home / "grpo.toml"), *flags], cwd=work, check=True)
    steps = _steps(work / "grpo")
    accuracy = [row["eval/held_out"] for row in _metrics(work / "grpo") if "eval/held_out" in row]
    bench.row(
        rollouts=str(len(steps)),
        tokens_per_s=f"{statistics.median(row['rollout/tokens_per_s'] for row in steps):,.0f}",
        step_s=f"{statistics.median(row['time/step'] for row in steps):.2f}",
        accuracy=" to ".join(f"{value:.2f}" for value in (accuracy[0], accuracy[-1])),
    )


def _prefixed(flags: Sequence[str]) -> list[str]:
    """SGLang's flags as `slime train` takes them."""
    return [flag.replace("--", "--sglang-", 1) if flag.startswith("--") else flag for flag in flags]


def _steps(output: Path) -> list[dict[str, Any]]:
    """The metrics of the steps after the first, of the only run in a folder."""
    return [row for row in _metrics(output) if "time/step" in row][1:]


def _metrics(output: Path) -> list[dict[str, Any]]:
    """The metrics of the only run in a folder."""
    (metrics,) = output.rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
