"""Real runs whose reward stalls, each for another reason: material for docs/reading-a-run.md.

    python examples/stalled-runs/run.py [reward-bug | truncation | entropy-collapse] ...

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
from teach import teach
from yes_no import WARM_START_STEPS, lesson, make_yes_no

HERE = Path(__file__).resolve().parent
YES_NO = Path("outputs/stalled-runs/yes-no")
#: name of the run -> the flags that spoil it
RUNS = {
    # The reward accepts sums of two digits only.
    "reward-bug": ["--custom-rm-path", "examples/stalled-runs/sum_reward.py"],
    # A sum of three digits does not fit.
    "truncation": ["--rollout-max-response-len", "2"],
    # A temperature for answering and not for exploring, and no KL, where most labels are the same. The learning rate is
    # not higher than that of the others: with three times as much, a single step can end all answers at the limit.
    # Adam's beta2 has a long memory, so that a gradient after many zeros is not a large step.
    "entropy-collapse": [
        *("--prompt-data", f"{YES_NO}/train.jsonl", "--hf-checkpoint", f"{YES_NO}/model"),
        *("--eval-prompt-data", "held_out", f"{YES_NO}/held_out.jsonl"),
        *("--rollout-temperature", "0.3", "--kl-loss-coef", "0"),
        *("--adam-beta2", "0.999", "--num-rollout", "80"),
    ],
}


def main(names: list[str]) -> int:
    """Make the runs of these names, or all; returns 0."""
    if unknown := set(names) - set(RUNS):
        raise SystemExit(f"there is no run {', '.join(sorted(unknown))}; expected {', '.join(RUNS)}")
    names = names or list(RUNS)
    if set(names) - {"entropy-collapse"}:
        _prepare_sums(ROOT / "outputs" / "quickstart")
    if "entropy-collapse" in names:
        _prepare_yes_no(ROOT / YES_NO)
    for name in names:
        print(f"slime view {train(HERE / 'base.toml', name, RUNS[name]).relative_to(ROOT)}", flush=True)
    return 0


def _prepare_sums(folder: Path) -> None:
    """The quickstart's model, data and warm start, if they are not there."""
    if not (folder / "warm_start").is_dir():
        make_model(folder / "model")
        make_data(folder / "data")
        train(HERE.parent / "quickstart" / "warm_start.toml", "quickstart-warm-start")


def _prepare_yes_no(folder: Path) -> None:
    """Questions of yes and no, and a model that has seen a teacher who is often wrong, if they are not there."""
    make_yes_no(folder)
    if not (folder / "model" / "model.safetensors").is_file():
        teach(folder / "model", lesson, steps=WARM_START_STEPS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
