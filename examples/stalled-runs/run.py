"""Real runs whose reward stalls, each for another reason: material for docs/reading-a-run.md.

    python examples/stalled-runs/run.py [reward-bug | truncation] ...

They share base.toml and differ in what is printed with each command.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from make_data import make_data
from make_model import make_model
from slime_run import ROOT, train

HERE = Path(__file__).resolve().parent
#: name of the run -> the flags that spoil it
RUNS = {
    # The reward accepts sums of two digits only.
    "reward-bug": ["--custom-rm-path", "examples/stalled-runs/sum_reward.py"],
    # A sum of three digits does not fit.
    "truncation": ["--rollout-max-response-len", "2"],
}


def main(names: list[str]) -> int:
    """Make the runs of these names, or all; returns 0."""
    if unknown := set(names) - set(RUNS):
        raise SystemExit(f"there is no run {', '.join(sorted(unknown))}; expected {', '.join(RUNS)}")
    start = ROOT / "outputs" / "quickstart"
    if not (start / "warm_start").is_dir():
        make_model(start / "model")
        make_data(start / "data")
        train(HERE.parent / "quickstart" / "warm_start.toml", "quickstart-warm-start")
    for name in names or RUNS:
        print(f"slime view {train(HERE / 'base.toml', name, RUNS[name]).relative_to(ROOT)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
