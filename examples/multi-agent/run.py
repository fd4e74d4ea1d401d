"""multi-agent: one policy learns to be both solver and reviewer.

    python examples/multi-agent/run.py [SEED]

Builds the quickstart's model from scratch, then runs a supervised warm start and reinforcement learning of both roles.
Every `slime train` command is printed before it runs. The exit code is 1 if the reward did not rise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from make_data import make_data
from make_model import make_model
from slime_run import ROOT, curve, ends, seeds, show, train, verdict

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/multi-agent")
#: how much the mean reward must rise
RISE = 0.15


def main(seed: int) -> int:
    """Run all steps; the last line is `multi-agent: reward A -> B, first answers right C -> D, S s`."""
    started = time.monotonic()
    print("1. the quickstart's model from scratch, and sums", flush=True)
    print(f"   {WORK}/model: {make_model(ROOT / WORK / 'model', seed=seed):,} parameters, random")
    for name, count in make_data(ROOT / WORK / "data", seed=seed).items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print("\n2. warm start: supervised fine-tuning on a teacher who is bad at both roles", flush=True)
    train(HERE / "warm_start.toml", "multi-agent-warm-start", seeds(seed))
    print("\n3. reinforcement learning: solver and reviewer get the mean of their rewards", flush=True)
    run_dir = train(HERE / "grpo.toml", "multi-agent-grpo", seeds(seed))
    show(run_dir, reward="rollout/reward_mean", first_right="rollout/team/first_right")
    first, last = ends(curve(run_dir, "rollout/team/first_right"))
    more = f"first answers right {first:.2f} -> {last:.2f}, "
    return verdict("multi-agent", run_dir, rise=RISE, started=started, more=more)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
