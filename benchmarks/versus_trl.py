"""A GRPO step of slime against one of TRL's GRPOTrainer: same model, prompts, answers' lengths and threads.

    python benchmarks/versus_trl.py [--only quickstart 1M 10M] [--steps 9] [--threads 2] [--engines 2] [--kl]

`quickstart` is the warm-started model of `make quickstart`, with its prompts and reward, and needs its outputs; answers
have 1 to 6 tokens. The others are random models that answer 64 tokens with exactly 128. Both sides generate 32 x 8
samples, score them with the same function, and take one optimizer step of AdamW in float32, with neither or (`--kl`)
both comparing with a reference model. TRL generates with transformers in its own process.

TRL is installed into a virtual environment of its own (`--environment`), which sees the packages of this one, so that
torch and transformers are the same. slime's trainer has all of `--threads`, and its engines, in turn with it, share the
same number. The results are medians of the steps after the first three.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TRL_SIDE = Path(__file__).with_name("trl_side.py")
#: what TRL needs beside the packages of this environment
TRL = ("trl==1.16.0", "accelerate==1.15.0")
WARM_UP, PROMPTS, SAMPLES, LR = 3, 32, 8, 1e-4
PROMPT_TOKENS, NEW_TOKENS = 64, 128
#: a reward that any answer of a random model has
REWARD = """
def reward_text(text, label):
    return sum(letter in "aeiou0123" for letter in text) / max(1, len(text))


async def reward_func(args, sample, **kwargs):
    return reward_text(sample.response, sample.label)
"""
EXACT_MATCH = REWARD.replace(
    'sum(letter in "aeiou0123" for letter in text) / max(1, len(text))', "float(text == label)"
)


@dataclass(frozen=True)
class Task:
    """What both sides work on: a folder with `model`, `prompts.jsonl` and `reward.py`, and their options."""

    folder: Path
    model: Path
    new_tokens: int
    #: whether answers end only at `new_tokens`
    fixed: bool
    chat: bool


def make_task(folder: Path, shape: str, quickstart: Path) -> Task:
    """Prepare the folder of a shape."""
    folder.mkdir()
    if shape == "quickstart":
        model = quickstart / "warm_start"
        if not model.is_dir():
            sys.exit(f"{model} is missing: run `make quickstart` first")
        (folder / "reward.py").write_text(EXACT_MATCH)
        (folder / "prompts.jsonl").write_bytes((quickstart / "data" / "train.jsonl").read_bytes())
        return Task(folder, model, 6, fixed=False, chat=True)
    from bench_training import make_model

    make_model(folder / "model", shape)
    (folder / "reward.py").write_text(REWARD)
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = (
        "".join(letters[(7 * row + place * (row + 1)) % 26] for place in range(PROMPT_TOKENS)) for row in range(512)
    )
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text, "label": ""}) + "\n" for text in rows))
    return Task(folder, folder / "model", NEW_TOKENS, fixed=True, chat=False)


def slime_step(task: Task, steps: int, threads: int, engines: int, *, kl: bool) -> tuple[float, float]:
    """Seconds of a median step, and tokens of a mean answer."""
    words = [str(Path(sys.executable).with_name("slime")), "train", "--run-name", "slime", "--device", "cpu"]
    options: dict[str, Any] = {
        "hf-checkpoint": task.model,
        "prompt-data": task.folder / "prompts.jsonl",
        "custom-rm-path": f"{task.folder}/reward.py:reward_func",
        "advantage-estimator": "grpo",
        "num-rollout": WARM_UP + steps,
        "rollout-batch-size": PROMPTS,
        "n-samples-per-prompt": SAMPLES,
        "global-batch-size": PROMPTS * SAMPLES,
        "rollout-max-response-len": task.new_tokens,
        "lr": LR,
        "threads-per-rank": threads,
        "threads-per-engine": threads // engines,
        "rollout-num-gpus": engines,
    }
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--apply-chat-template"] if task.chat else []
    words += ["--sglang-preferred-sampling-params", '{"ignore_eos": true}'] if task.fixed else []
    words += ["--use-kl-loss", "--kl-loss-coef", "0.001"] if kl else []
    run(words, task.folder, "slime.log")
    rows = [row for row in read_metrics(task.folder / "outputs" / "slime") if "time/step" in row][WARM_UP:]
    lengths = (row["rollout/response_length_mean"] for row in rows)
    return statistics.median(row["time/step"] for row in rows), statistics.mean(lengths)


def trl_step(task: Task, python: Path, steps: int, threads: int, *, kl: bool) -> tuple[float, float]:
    """The same of TRL."""
    description = {
        "folder": str(task.folder),
        "model": str(task.model),
        "new_tokens": task.new_tokens,
        "fixed": task.fixed,
        "chat": task.chat,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "lr": LR,
        "beta": 0.001 if kl else 0.0,
        "steps": WARM_UP + steps,
        "threads": threads,
    }
    run([str(python), str(TRL_SIDE), json.dumps(description)], task.folder, "trl.log")
    found = json.loads((task.folder / "trl.json").read_text())
    seconds = [after - before for before, after in zip(found["ends"], found["ends"][1:], strict=False)][WARM_UP - 1 :]
    return statistics.median(seconds), statistics.mean(found["lengths"][WARM_UP:])


def run(words: list[str], folder: Path, log: str) -> None:
    """Run a command in a folder; its output is printed if it fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / log).open("w") as file:
        done = subprocess.run(words, cwd=folder, env=environment, stdout=file, stderr=file, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{(folder / log).read_text()}")


def trl_python(environment: Path) -> Path:
    """Install TRL unless it is there; the environment's interpreter."""
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        [site] = (environment / "lib").glob("python*/site-packages")
        (site / "of_slime.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *TRL]
        subprocess.run(install, check=True)
    return python


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("quickstart", "1M", "10M"), default=["quickstart", "1M", "10M"])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1, help="that share the threads")
    parser.add_argument("--kl", action="store_true", help="both sides compare with a reference model")
    parser.add_argument("--environment", type=Path, default=ROOT / "outputs" / "trl-environment")
    parser.add_argument("--quickstart", type=Path, default=ROOT / "outputs" / "quickstart", help="its outputs")
    options = parser.parse_args()
    if options.threads % options.engines:
        parser.error(f"{options.engines} engines cannot share {options.threads} threads equally")
    python = trl_python(options.environment)
    reference = "with" if options.kl else "without"
    print(f"{options.threads} threads, {options.engines} engines, {reference} a reference model, {', '.join(TRL)}\n")
    print("| model | slime s | TRL s | slime / TRL | tokens of an answer |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="versus-trl-") as made:
        for shape in options.only:
            task = make_task(Path(made, shape), shape, options.quickstart.resolve())
            theirs, their_tokens = trl_step(task, python, options.steps, options.threads, kl=options.kl)
            ours, our_tokens = slime_step(task, options.steps, options.threads, options.engines, kl=options.kl)
            tokens = f"{our_tokens:.1f}, {their_tokens:.1f}"
            print(f"| {shape} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {tokens} |", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
