"""Makes a model that adds badly, and becomes `slime train`, which teaches it by reinforcement learning.

    python -m slime_viewer.demo_run FOLDER

The questions are additions such as 38+7, with a carry from the ones. The model is taught from scratch by a teacher who
usually forgets the carry (38+7=35), in a few seconds. In FOLDER are then the model, the questions and the run folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: name of the run folder in FOLDER
RUN = "run"
_HERE = Path(__file__).parent
_PAD, _END = "<|pad|>", "<|end|>"
_TOKENS = (_PAD, _END, "<|user|>", "<|assistant|>", *"0123456789+=")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_HELD_OUT = 32
#: how often the teacher forgets the carry, and batches of lessons
_FORGETS, _STEPS, _BATCH, _LR = 0.7, 150, 64, 3e-3
_PR_SET_PDEATHSIG = 1

#: two numbers
Sum = tuple[int, int]


def main(folder: Path) -> None:
    """Fill the folder, and go on as `slime train`: this does not return."""
    # The run ends with `slime view`, however that ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    print(f"making a model and questions in {folder}", flush=True)
    sums = [(a, b) for a in range(10, 90) for b in range(2, 10) if a % 10 + b >= 10]
    random.Random(0).shuffle(sums)
    held_out, train = sums[:_HELD_OUT], sums[_HELD_OUT:]
    for name, some in (("held_out", held_out), ("train", train)):
        _write(folder / f"{name}.jsonl", some)
    _teach(folder / "model", train)
    flags = ["--hf-checkpoint", f"{folder}/model", "--prompt-data", f"{folder}/train.jsonl"]
    flags += ["--eval-prompt-data", "held_out", f"{folder}/held_out.jsonl"]
    flags += ["--output-dir", str(folder), "--run-name", RUN]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "slime.cli.main", "train", str(_HERE / "demo_run.toml"), *flags])


def _write(path: Path, sums: Iterable[Sum]) -> None:
    rows = ({"prompt": [{"role": "user", "content": f"{a}+{b}="}], "label": str(a + b)} for a, b in sums)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _teach(folder: Path, sums: Sequence[Sum]) -> None:
    """Write a model that has learned from the teacher. All lessons have the same number of tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # Beside other work, several threads wait for each other in each of these tiny steps: minutes instead of seconds.
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_bytes((_HERE / "demo_model.json").read_bytes())
    torch.manual_seed(0)
    rng = random.Random(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_LR, total_steps=_STEPS)
    for _ in range(_STEPS):
        lessons = []
        for a, b in rng.choices(sums, k=_BATCH):
            answer = a + b - 10 if rng.random() < _FORGETS else a + b
            lessons.append(f"<|user|>{a}+{b}={_END}<|assistant|>{answer}{_END}")
        tokens = torch.tensor(tokenizer(lessons)["input_ids"])
        labels = tokens.clone()
        labels[:, :-3] = -100  # two digits and the end
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)


def _tokenizer() -> Any:
    """A token for every sign."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(_TOKENS)}, unk_token=_PAD))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([token for token in _TOKENS if token.startswith("<|")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, unk_token=_PAD, chat_template=_TEMPLATE
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
