"""tool-calculator: a model that would rather guess learns to use the calculator.

    python examples/tool-calculator/run.py [SEED]

Model and questions from scratch, a supervised warm start, then reinforcement learning with the calculator in the loop.
Every `slime train` command is printed before it runs.  Exit code 1 when the reward did not rise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from make_data import make_data
from make_model import make_model
from slime_run import ROOT, curve, seeds, show, train, verdict

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/tool-calculator")
#: what the mean reward has to gain
RISE = 0.3


def main(seed: int) -> int:
    """Run all steps; the last line is `tool-calculator: reward A -> B, held-out accuracy C -> D, S s`."""
    started = time.monotonic()
    print("1. a model and a tokenizer from scratch, and products that are too hard for it", flush=True)
    print(f"   {WORK}/model: {make_model(ROOT / WORK / 'model', seed=seed):,} parameters, random")
    for name, count in make_data(ROOT / WORK / "data", seed=seed).items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print("\n2. warm start: supervised fine-tuning on a teacher who would rather guess", flush=True)
    train(HERE / "warm_start.toml", "tool-calculator-warm-start", seeds(seed))
    print("\n3. reinforcement learning: whoever uses the calculator well is right more often", flush=True)
    run_dir = train(HERE / "grpo.toml", "tool-calculator-grpo", seeds(seed))
    show(run_dir, reward="rollout/reward_mean", calls="rollout/tools/calculator/calls")
    accuracy = curve(run_dir, "eval/held_out")
    more = f"held-out accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}, "
    return verdict("tool-calculator", run_dir, rise=RISE, started=started, more=more)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
