"""Writes the tables of docs/migrating.md.

    python -m tests.docs.migrating

The refused names and those of other frameworks come from `slime.registry.original_names`; the accepted flags are here.
"""

from __future__ import annotations

import re
from pathlib import Path

from slime.registry.original_names import original_names

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"

#: flags of the original slime that mean the same here: name -> (a value; None for a switch, what differs)
ACCEPTED: dict[str, tuple[str | None, str]] = {
    "actor-num-nodes": ("2", ""),
    "actor-num-gpus-per-node": ("8", "default 1"),
    "rollout-num-gpus": ("8", ""),
    "rollout-num-gpus-per-engine": ("2", ""),
    "rollout-external-engine-addrs": ("10.0.0.7:30000", "keys in the file of `--rollout-external-engine-keys`"),
    "colocate": (None, "releases the memory of both sides"),
    "distributed-timeout-minutes": ("10", ""),
    "use-fault-tolerance": (
        None,
        "restarts the whole run, from its newest checkpoint; engines are restarted without it",
    ),
    "update-weight-transport": ("disk", "`nccl` is called `distributed`"),
    "update-weight-buffer-size": ("1000000", ""),
    "update-weights-interval": ("2", ""),
    "check-weight-update-equal": (None, ""),
    "hf-checkpoint": ("model", ""),
    "ref-load": ("model", "a Hugging Face folder; default: the initial weights"),
    "load": ("checkpoints", "checkpoints of this slime; Megatron-LM's are for `--initial-megatron-checkpoint`"),
    "save": ("checkpoints", ""),
    "save-interval": ("10", ""),
    "async-save": (None, "needs `--save-interval`"),
    "save-hf": ("model-{rollout}", "`{rollout}` instead of `{rollout_id}`"),
    "seed": ("1", ""),
    "rollout-temperature": ("0.8", ""),
    "rollout-top-p": ("0.9", ""),
    "rollout-top-k": ("50", ""),
    "rollout-max-context-len": ("4096", ""),
    "rollout-max-prompt-len": ("1024", ""),
    "rollout-max-response-len": ("2048", "default 1024"),
    "rollout-stop": ("END", ""),
    "rollout-stop-token-ids": ("1", ""),
    "rollout-shuffle": (None, ""),
    "rollout-seed": ("1", ""),
    "over-sampling-batch-size": ("64", ""),
    "dynamic-sampling-filter-path": ("filter.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "partial-rollout": (None, ""),
    "mask-offpolicy-in-partial-rollout": (None, ""),
    "use-rollout-routing-replay": (None, ""),
    "custom-generate-function-path": ("generate.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "buffer-filter-path": ("filter.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "rollout-sample-filter-path": ("filter.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "num-rollout": ("100", ""),
    "data-source-path": ("source.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "prompt-data": ("prompts.jsonl", ""),
    "apply-chat-template": (None, ""),
    "apply-chat-template-kwargs": ("{}", ""),
    "input-key": ("question", "default `prompt`"),
    "label-key": ("answer", "default `label`; `none` if rows have none"),
    "metadata-key": ("extra", ""),
    "tool-key": ("tools", "no default"),
    "rollout-batch-size": ("32", ""),
    "n-samples-per-prompt": ("8", ""),
    "global-batch-size": ("256", ""),
    "num-steps-per-rollout": ("1", ""),
    "micro-batch-size": ("1", "default: packed up to `--max-tokens-per-gpu`"),
    "max-tokens-per-gpu": ("4096", "default 8192"),
    "eval-interval": ("10", ""),
    "eval-prompt-data": ("aime aime.jsonl", "may be repeated"),
    "skip-eval-before-train": (None, ""),
    "n-samples-per-eval-prompt": ("4", ""),
    "eval-temperature": ("0.6", "default 0"),
    "eval-top-p": ("0.9", ""),
    "eval-top-k": ("50", ""),
    "eval-max-response-len": ("4096", ""),
    "eval-max-prompt-len": ("1024", ""),
    "clip-grad": ("1.0", "Megatron's"),
    "lr": ("1e-6", "Megatron's"),
    "calculate-per-token-loss": (None, ""),
    "num-critic-only-steps": ("1", ""),
    "eps-clip": ("0.2", ""),
    "eps-clip-high": ("0.28", ""),
    "eps-clip-c": ("3.0", ""),
    "value-clip": ("0.2", ""),
    "kl-coef": ("0.01", ""),
    "loss-type": ("policy_loss", "no `custom_loss`: write an estimator plugin"),
    "kl-loss-type": ("low_var_kl", "default `k3`"),
    "advantage-estimator": ("grpo", "no default"),
    "use-kl-loss": (None, ""),
    "kl-loss-coef": ("0.001", ""),
    "use-unbiased-kl": (None, ""),
    "ref-update-interval": ("10", ""),
    "entropy-coef": ("0.001", ""),
    "offload-train": (None, "default with `--colocate`; `--no-offload-train` keeps the trainer's memory"),
    "offload-rollout": (None, "default with `--colocate`; `--no-offload-rollout` keeps the engines' memory"),
    "normalize-advantages": (None, ""),
    "mtp-num-layers": ("1", "as many as the model has"),
    "enable-mtp-training": (None, "neither with context parallelism nor with LoRA"),
    "mtp-loss-scaling-factor": ("0.2", ""),
    "use-rollout-logprobs": (None, "default with `--async`, filters and over-sampling"),
    "use-tis": (None, ""),
    "tis-clip": ("2.0", "also called `--tis-threshold`"),
    "tis-clip-low": ("0", "also called `--tis-threshold-low`"),
    "rm-type": ("math", "also called `--reward`; the names are below"),
    "reward-key": ("score", ""),
    "group-rm": (None, ""),
    "custom-rm-path": ("rm.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "custom-reward-post-process-path": ("post.py", "`FILE.py:NAME` or `package.module:NAME`"),
}

#: arguments of GRPOTrainer
TRL_TRAINER = ("model", "reward_funcs", "train_dataset", "eval_dataset", "tools", "peft_config")


def tables() -> dict[str, str]:
    """The tables of the page, by name."""
    return {
        "accepted": _table("flag", "what differs", {f"`--{name}`": note for name, (_, note) in ACCEPTED.items()}),
        "refused": _table("flag", "here", {f"`--{name}`": text for name, text in original_names()["flags"].items()}),
        "rewards": _table("`--rm-type`", "here", _coded(original_names()["rewards"])),
        "paths": _table("path", "here", _coded(original_names()["paths"])),
        "trl": _table("TRL", "here", _coded(original_names()["TRL"])),
        "verl": _table("verl", "here", _coded(original_names()["verl"])),
        "openrlhf": _table("OpenRLHF", "here", _coded(original_names()["OpenRLHF"])),
    }


def written(page: str) -> str:
    """The page with its tables."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        page = re.sub(f"{begin}.*?{end}", lambda _, text=f"{begin}\n{table}\n{end}": text, page, flags=re.DOTALL)
    return page


def _coded(rows: object) -> dict[str, str]:
    assert isinstance(rows, dict)
    return {f"`{name}`": text for name, text in rows.items()}


def _table(first: str, second: str, rows: dict[str, str]) -> str:
    return "\n".join(
        [f"| {first} | {second} |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())]
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
