"""What logging per-token columns costs a step of the quickstart.

    python benchmarks/bench_token_columns.py                     # CPU time of each part
    make quickstart                                              # the warm start, once
    python benchmarks/bench_token_columns.py runs [STEPS]        # whole steps; needs a quiet machine

Without arguments: one training rank with a model and a batch of the quickstart's size takes steps with
`--log-token-columns` none and budget in turn; then the file of the batch is written, as the rollout process does it
while the next step goes on. CPU times of the process are medians, so other work on the machine matters little.

`runs` starts the quickstart's reinforcement learning with none, budget and all, and prints medians over STEPS steps
(20) without the first `WARM_UP_STEPS`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from slime.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 3
MODES = ("none", "budget", "all")
PHASES = ("time/step", "time/train", "time/wait_rollout", "time/batch")
#: as in the quickstart: samples of a batch, of a prompt, and tokens of a response
SAMPLES, GROUP, RESPONSE = 256, 8, 6
MODEL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}


def cpu_ms(started: float) -> float:
    """CPU milliseconds of this process since `started`."""
    return 1000 * (time.process_time() - started)


def parts(steps: int = 30) -> int:
    """Print the CPU time of each part."""
    sys.path.insert(0, str(ROOT))
    from tests.support.tiny_models import make_tiny_model
    from tests.train.harness import Centred, RankLauncher, make_batch, make_config

    from slime.engine.ports import LOOPBACK, free_port
    from slime.observe.token_columns import pieces_of, write_token_columns
    from slime.testing.samples import make_group, make_tokenizer

    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = make_tiny_model(folder / "model", "qwen3", seed=0, **MODEL)
        config = make_config(model, use_kl_loss=True, kl_loss_coef=0.001)
        runs = {
            mode: config.model_copy(update={"run": config.run.model_copy(update={"log_token_columns": mode})})
            for mode in MODES[:2]
        }
        lengths = {"prompt": (6, 9), "response": (RESPONSE, RESPONSE)}
        batch = make_batch(samples=SAMPLES, group=GROUP, masked=False, rollout_log_probs=True, **lengths)
        rank = RankLauncher(0, 1, free_port(LOOPBACK)).start(config, Centred())
        logged = None
        for step in range(steps + WARM_UP_STEPS):
            for mode in MODES[:2] if step % 2 else MODES[1::-1]:
                rank.config = runs[mode]
                started = time.process_time()
                rank.train(batch)
                logged = rank.logged_tokens() or logged
                if step >= WARM_UP_STEPS:
                    found[mode].append(cpu_ms(started))
        rank.close()
        assert logged is not None
        groups = [make_group([1.0] * GROUP, index=n, response="1" * RESPONSE) for n in range(SAMPLES // GROUP)]
        pieces = pieces_of(make_tokenizer())
        for step in range(steps + WARM_UP_STEPS):
            started = time.process_time()
            path = write_token_columns(folder, step, groups, logged, pieces)
            if step >= WARM_UP_STEPS:
                found["file"].append(cpu_ms(started))
        size = path.stat().st_size
    medians = {name: statistics.median(values) for name, values in found.items()}
    pairs = statistics.median(more - less for more, less in zip(found["budget"], found["none"], strict=True))
    print(f"training step, nothing logged    {medians['none']:8.1f} ms of CPU")
    print(f"training step, logged            {medians['budget']:8.1f} ms of CPU ({pairs:+.1f} ms, median of pairs)")
    print(f"writing the file                 {medians['file']:8.1f} ms of CPU ({size / 1024:.0f} KiB)")
    return 0


def steps_of(mode: str, steps: int) -> list[dict[str, float]]:
    """The metrics of the steps of one run."""
    name = f"bench-token-columns-{mode}-{time.strftime('%H%M%S')}"
    flags = ["--log-token-columns", mode, "--num-rollout", str(steps), "--run-name", name, "--quiet"]
    flags += ["--skip-eval-before-train", "--eval-interval", "1000", "--save", f"outputs/{name}/checkpoints"]
    command = [str(Path(sys.executable).with_name("slime")), "train", "examples/quickstart/grpo.toml", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    return [row for row in read_metrics(ROOT / "outputs" / name) if "time/step" in row][WARM_UP_STEPS:]


def runs(steps: int = 20) -> int:
    """Print the medians of whole steps."""
    medians = {}
    for mode in MODES:
        rows = steps_of(mode, steps)
        medians[mode] = {key: 1000 * statistics.median(row[key] for row in rows) for key in PHASES}
    print("median ms".ljust(12) + "".join(f"{key.removeprefix('time/'):>14}" for key in PHASES) + f"{'of a step':>12}")
    for mode, row in medians.items():
        more = 100 * (row["time/step"] / medians["none"]["time/step"] - 1)
        print(mode.ljust(12) + "".join(f"{row[key]:>14.1f}" for key in PHASES) + f"{more:>+11.1f}%")
    return 0


if __name__ == "__main__":
    sys.exit(runs(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["runs"] else parts())
