"""The quickstart: builds a model and data from scratch, then runs a supervised warm start and reinforcement learning.

    make quickstart        (or: python examples/quickstart/run.py)

Every `slime train` command is printed before it runs, so you can run it yourself. Flags of `slime train` that follow
go to both runs: `python examples/quickstart/run.py --num-rollout 3` only shows that everything works.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from make_data import make_data
from make_model import make_model
from slime_run import ROOT, curve, train

from slime.config.run_config import nvidia_devices
from slime.observe.memory import PeakMemory
from slime.observe.sizes import gibibytes

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/quickstart")


def engine_flags(gpus: int) -> list[str]:
    """Where engines run, on a machine with so many GPUs: on one GPU, engine and trainer take turns.

    Without a GPU, on two cores, two engines of one thread each answer in half of the time that one of two takes.
    """
    return {0: ["--rollout-num-gpus", "2"], 1: ["--colocate"]}.get(gpus, [])


def main(flags: Sequence[str] = ()) -> int:
    """Run all steps, with these flags of `slime train`.

    The last line is `quickstart: held-out accuracy A -> B, S s, M GiB`.
    """
    started = time.monotonic()
    memory = PeakMemory().start()
    print("1. a model and a tokenizer from scratch, and arithmetic questions", flush=True)
    parameters = make_model(ROOT / WORK / "model")
    rows = make_data(ROOT / WORK / "data")
    # They are of the model that was here before; a new run does not write among another run's checkpoints.
    shutil.rmtree(ROOT / WORK / "checkpoints", ignore_errors=True)
    print(f"   {WORK}/model: {parameters:,} parameters, random")
    for name, count in rows.items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print("\n2. warm start: supervised fine-tuning on a teacher who forgets the carry seven times in ten", flush=True)
    train(HERE / "warm_start.toml", "quickstart-warm-start", flags)
    print("\n3. reinforcement learning: answers are sampled and scored, and good ones become more likely", flush=True)
    run_dir = train(HERE / "grpo.toml", "quickstart-grpo", [*engine_flags(nvidia_devices()), *flags])
    accuracy = curve(run_dir, "eval/held_out")
    print(f"\nrun folder: {run_dir.relative_to(ROOT)}   (curves: report.html; tensorboard --logdir outputs/)")
    seconds, peak = time.monotonic() - started, gibibytes(memory.stop())
    print(f"quickstart: held-out accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}, {seconds:.0f} s, {peak}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
