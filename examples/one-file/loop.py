"""The whole loop in one file: sample answers, score them, train on them, send the new weights to the engine.

    python examples/one-file/loop.py

SGLang and Megatron-core are real and have a process each; there is no Ray, and there are no plugins. `slime train` uses
the same modules in many processes. The task is the quickstart's: a small model has learned additions from a teacher who
forgets the carry seven times in ten, and reinforcement learning corrects it.

Not included: filters, over-sampling and the state of every prompt (`slime/rollout`), data files (`slime/kit/readers`),
checkpoints and Ray (`slime/run`), metrics and plots (`slime/observe`).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from make_data import make_data
from teach import teach

WORK = Path(__file__).resolve().parents[2] / "outputs" / "one-file"
ROLLOUTS, PROMPTS, SAMPLES = 60, 32, 8  # one optimizer step per rollout, on PROMPTS x SAMPLES answers
MAX_NEW_TOKENS, TEMPERATURE = 6, 1.0

OPTIONS = f"""
    --hf-checkpoint {WORK}/model --num-rollout {ROLLOUTS}
    --rollout-batch-size {PROMPTS} --n-samples-per-prompt {SAMPLES}
    --rollout-max-response-len {MAX_NEW_TOKENS} --rollout-temperature {TEMPERATURE}
    --advantage-estimator grpo --reward exact_match --prompt-data {WORK}/data/train.jsonl
    --use-kl-loss --kl-loss-coef 0.001 --lr 1e-4 --adam-beta2 0.98 --weight-decay 0.0
"""


def teacher(path: Path):
    """Lessons for the warm start: questions, answered by a teacher who usually forgets the carry."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lessons = [(row["prompt"][0]["content"], row["label"]) for row in rows]
    return lambda rng: rng.choice(lessons)


def read_questions(path: Path, tokenizer) -> list[tuple[list[int], str]]:
    """Questions as token ids, each with its correct answer."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    return [(tokenizer.encode(text), row["label"]) for text, row in zip(texts, rows, strict=True)]


class GroupMean:
    """The estimator: an answer's advantage is its reward relative to the other answers to the same question."""

    def advantages(self, batch):
        """One advantage for each response token; see `slime.plugin.Estimator`."""
        import torch

        from slime.plugin import Advantages

        relative = torch.empty_like(batch.rewards)
        for group in batch.group_ids.unique():
            members = batch.group_ids == group
            rewards = batch.rewards[members]
            relative[members] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        return Advantages([value * mask for value, mask in zip(relative, batch.loss_masks, strict=True)])


async def sample_groups(server, questions, tokenizer, rollout: int, samples: int):
    """Sample `samples` answers to each question, all at once; returns groups of scored samples."""
    from slime.engine.client import HttpPolicyClient
    from slime.plugin import SamplingParams
    from slime.types import Group, Sample, Status

    async def answer(prompt: list[int], label: str, group: int, index: int) -> Sample:
        sampling = SamplingParams(MAX_NEW_TOKENS, TEMPERATURE, sampling_seed=rollout * 1_000_003 + index)
        generation = await client.generate(prompt, sampling)
        response = tokenizer.decode(generation.tokens, skip_special_tokens=True)
        return Sample(
            group_index=group,
            index=index,
            tokens=prompt + generation.tokens,
            response=response,
            response_length=len(generation.tokens),
            label=label,
            reward=float(response.strip() == label),
            status=Status.COMPLETED if generation.finish_reason == "stop" else Status.TRUNCATED,
            rollout_log_probs=generation.log_probs,  # for exactly these tokens, from the engine that sampled them
        )

    async with HttpPolicyClient(server.url, server.spec.keys, timeout_s=60) as client:
        answers = await asyncio.gather(
            *(
                answer(prompt, label, group, group * samples + copy)
                for group, (prompt, label) in enumerate(questions)
                for copy in range(samples)
            )
        )
    return [Group(g, answers[g * samples : (g + 1) * samples]) for g in range(len(questions))]


def mean_reward(groups) -> float:
    """The mean over all samples."""
    rewards = [sample.reward for group in groups for sample in group.samples]
    return sum(rewards) / len(rewards)


def train(server, rank) -> tuple[float, float]:
    """Run the loop; returns the held-out accuracy before and after."""
    from transformers import AutoTokenizer

    from slime.rollout.train_batch import TrainBatch

    tokenizer = AutoTokenizer.from_pretrained(WORK / "model")
    questions = read_questions(WORK / "data" / "train.jsonl", tokenizer)
    held_out = read_questions(WORK / "data" / "held_out.jsonl", tokenizer)
    random.Random(0).shuffle(questions)

    def accuracy() -> float:
        return mean_reward(asyncio.run(sample_groups(server, held_out, tokenizer, rollout=-1, samples=2)))

    before = accuracy()
    print(f"held-out accuracy {before:.2f}\nrollout  reward    loss  log-prob gap", flush=True)
    for rollout in range(ROLLOUTS):
        start = rollout * PROMPTS % (len(questions) - PROMPTS)
        asked = questions[start : start + PROMPTS]
        groups = asyncio.run(sample_groups(server, asked, tokenizer, rollout, SAMPLES))
        batch = TrainBatch.from_groups(groups, rollout=rollout, num_steps=1)
        metrics = rank.train(batch)  # log-probs -> advantages -> loss -> optimizer step
        # The engine uses these weights from now on.
        rank.sync_weights([server.url], server.spec.keys, 1, str(rollout + 1))
        if rollout % 10 == 0 or rollout == ROLLOUTS - 1:
            gap = metrics["logprob_gap_mean"]
            print(f"{rollout:7}  {mean_reward(groups):6.3f}  {metrics['loss']:6.3f}  {gap:12.1e}", flush=True)
    return before, accuracy()


def main() -> int:
    """Create model and questions, start engine and trainer, run the loop, stop both."""
    from slime.config import load_config
    from slime.engine.control import EngineKeys
    from slime.engine.server import EngineServer, EngineSpec
    from slime.plugin import EstimatorSpec
    from slime.train.rank import MegatronRank

    warnings.filterwarnings("ignore")  # Megatron-core and torch warn about optional packages
    started = time.monotonic()
    make_data(WORK / "data")
    teach(WORK / "model", teacher(WORK / "data" / "teacher.jsonl"), steps=900)
    config = load_config(OPTIONS.split())
    keys = EngineKeys.random()  # otherwise everybody on this machine could change the engine's weights
    server = EngineServer(EngineSpec(str(WORK / "model"), WORK / "engine.log", device=config.device, keys=keys))
    server.start()
    try:
        server.wait_ready(timeout_s=120)
        rank = MegatronRank(
            config,
            rank=0,
            world_size=1,
            meeting=("127.0.0.1", 29_511),
            estimator=GroupMean(),
            spec=EstimatorSpec(name="group_mean", factory="", needs=frozenset({"group"})),
            run_dir=WORK,
        )
        before, after = train(server, rank)
        rank.close()
    finally:
        server.stop()
    print(f"one-file: held-out accuracy {before:.2f} -> {after:.2f}, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
