"""TRL's side of versus_trl.py: trains as its one argument says, and writes when each step ended to `trl.json`."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Ends(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self.ends.append(time.monotonic())


def main() -> None:
    """Train."""
    task = json.loads(sys.argv[1])
    folder = Path(task["folder"])
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    reward_text = runpy.run_path(str(folder / "reward.py"))["reward_text"]
    lengths: list[float] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [reward_text(text, wanted) for text, wanted in zip(texts, label, strict=True)]

    ends = Ends()
    samples = task["prompts"] * task["samples"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows]),
        callbacks=[ends],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=samples,
            num_generations=task["samples"],
            max_completion_length=task["new_tokens"],
            temperature=1.0,
            generation_kwargs={"min_new_tokens": task["new_tokens"]} if task["fixed"] else None,
            beta=task["beta"],
            learning_rate=task["lr"],
            lr_scheduler_type="constant",
            adam_beta2=0.98,
            max_steps=task["steps"],
            save_strategy="no",
            report_to="none",
            logging_steps=1000,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    (folder / "trl.json").write_text(json.dumps({"ends": ends.ends, "lengths": lengths}))


if __name__ == "__main__":
    main()
