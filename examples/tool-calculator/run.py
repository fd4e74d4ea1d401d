"""tool-calculator: a model that mostly guesses learns to use the calculator.

    python examples/tool-calculator/run.py [SEED]

Builds model and questions from scratch, then runs a supervised warm start and reinforcement learning with the tool.
Every `slime train` command is printed before it runs. The exit code is 1 if the reward did not rise.
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
#: how much the mean reward must rise
RISE = 0.3


def main(seed: int) -> int:
    """Run all steps; the last line is `tool-calculator: reward A -> B, held-out accuracy C -> D, S s`."""
    started = time.monotonic()
    print("1. a model and a tokenizer from scratch, and products that are too hard for the model", flush=True)
    print(f"   {WORK}/model: {make_model(ROOT / WORK / 'model', seed=seed):,} parameters, random")
    for name, count in make_data(ROOT / WORK / "data", seed=seed).items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print("\n2. warm start: supervised fine-tuning on a teacher who mostly guesses", flush=True)
    train(HERE / "warm_start.toml", "tool-calculator-warm-start", seeds(seed))
    print("\n3. reinforcement learning: conversations with a correct answer become more likely", flush=True)
    run_dir = train(HERE / "grpo.toml", "tool-calculator-grpo", seeds(seed))
    show(run_dir, reward="rollout/reward_mean", calls="rollout/tools/calculator/calls")
    accuracy = curve(run_dir, "eval/held_out")
    more = f"held-out accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}, "
    return verdict("tool-calculator", run_dir, rise=RISE, started=started, more=more)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
