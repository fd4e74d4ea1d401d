"""search-r1: a model learns to search before it answers, and what to search for.

    python examples/search-r1/run.py [SEED]

Builds model and world from scratch, then runs a supervised warm start and reinforcement learning with the search tool.
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

from slime.observe.memory import PeakMemory
from slime.observe.sizes import gibibytes

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/search-r1")
#: how much the mean reward must rise
RISE = 0.3


def main(seed: int) -> int:
    """Run all steps; the last line is `search-r1: reward A -> B, held-out accuracy C -> D, S s, M GiB`."""
    started = time.monotonic()
    memory = PeakMemory().start()
    print("1. a model and a tokenizer from scratch, an invented world, and questions about it", flush=True)
    parameters = make_model(ROOT / WORK / "model", seed=seed)
    rows = make_data(ROOT / WORK / "data", seed=seed)
    print(f"   {WORK}/model: {parameters:,} parameters, random")
    for name, count in rows.items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print("\n2. warm start: supervised fine-tuning on a teacher who often searches badly or not at all", flush=True)
    train(HERE / "warm_start.toml", "search-r1-warm-start", seeds(seed))
    print("\n3. reinforcement learning: conversations with a correct answer become more likely", flush=True)
    run_dir = train(HERE / "grpo.toml", "search-r1-grpo", seeds(seed))
    show(run_dir, reward="rollout/reward_mean", searches="rollout/tools/search/calls")
    accuracy = curve(run_dir, "eval/held_out")
    more = f"held-out accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}, "
    return verdict("search-r1", run_dir, rise=RISE, started=started, more=more, last=f", {gibibytes(memory.stop())}")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
