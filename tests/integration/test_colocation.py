"""With --colocate, engines and trainer use the same devices in turn, and nothing that is computed changes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun
from tests.integration.test_engine_recovery import scheduler_of
from tests.integration.test_runs import assert_same_bits
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]

MIB = 2**20
#: for a run, on a machine under any load
WAIT_S = 500.0
#: one token takes 8 layers x 2 (keys, values) x 16 heads x 256 numbers x 4 bytes = 256 KiB
LARGE = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}
#: the evaluation before training: 64 prompts, whose responses have at least 16 tokens, all at the same time
USED = 64 * 16 * MIB // 4
#: of the attention alone, in float32: 8 layers x 4 projections x 64 x 4096 numbers
WEIGHTS = 8 * 4 * 64 * 4096 * 4
STAGES = [
    "the trainer released training",
    "the engines restored weights",
    "the trainer released weights",
    "the engines restored cuda_graph, kv_cache",
    "the engines released kv_cache, weights, cuda_graph",
    "the trainer restored weights, training",
]
#: holds the third rollout until the test goes on
REWARD = """
import asyncio
from pathlib import Path

async def reward_func(args, sample, **kwargs):
    while int(sample.weight_versions[-1]) == 3 and not Path("go on").exists():
        await asyncio.sleep(0.05)
    return float(len(sample.response) % 2)
"""


@pytest.mark.row("L3")
def test_a_colocated_run_frees_memory_and_computes_the_same_also_when_its_engine_is_lost(
    slime_train: Start, data: Path, tmp_path: Path
) -> None:
    model, hold = make_tiny_model(tmp_path / "model", "qwen3", seed=0, **LARGE), tmp_path / "go on"
    (tmp_path / "reward.py").write_text(REWARD)
    same = (
        "--hf-checkpoint", str(model), "--deterministic", "--num-rollout", "3", "--use-kl-loss",
        "--kl-loss-coef", "0.01", "--use-tis", "--entropy-coef", "0.1", "--check-weight-update-equal",
        "--advantage-estimator", "grpo", "--custom-rm-path", "reward.py", "--save-interval", "1",
        "--eval-prompt-data", "held", str(data), "--eval-interval", "3", "--eval-max-response-len", "16",
        "--sglang-preferred-sampling-params", json.dumps({"ignore_eos": True}),
        "--sglang-max-total-tokens", "4096", "--sglang-mem-fraction-static", "0.4",
    )  # fmt: skip
    hold.touch()
    apart = slime_train(*same, "--save", "apart-ckpt", name="apart", reward=False)
    assert apart.wait(WAIT_S) == 0, apart.output
    hold.unlink()
    more = ("--colocate", "--use-fault-tolerance", "--save", "shared-ckpt")
    shared = slime_train(*same, *more, name="shared", reward=False)
    shared.wait_for_output(r"checkpoint after 2 rollouts")
    scheduler_of(shared, 0).kill()
    shared.wait_for_output("restart 1 of 3, from shared-ckpt/rollout_000002, 0 rollouts are repeated")
    hold.touch()
    assert shared.wait(WAIT_S) == 0, shared.output
    assert shared.left_over() == []

    # The weights are sent when the engines' turn comes, which may be in an evaluation between two steps.
    differ = ("restarts/run", "synced_bytes")
    assert_same_bits(apart, [shared] * 3, "apart-ckpt", shared, "shared-ckpt", but=differ)
    evaluated = [(run.run_dir / "rollouts" / "eval_held_000003.jsonl").read_bytes() for run in (apart, shared)]
    assert evaluated[0] == evaluated[1]
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in shared.steps())
    # memory: what the evaluation used of the cache, and all weights; then gradients, which are as large
    first = shared.steps()[0]
    assert first["memory/engines_released"] > 0.9 * (USED + WEIGHTS)
    assert first["synced_bytes"] > WEIGHTS  # before the evaluation
    assert all(row["memory/engines_released"] > 0.9 * WEIGHTS for row in shared.steps())
    assert shared.steps()[1]["memory/trainer_released"] > 0.9 * WEIGHTS
    log = (shared.run_dir / "logs" / "driver.log").read_text()
    assert re.findall(r" colocation: (.*) in \d", log)[: 2 * len(STAGES)] == 2 * STAGES
    assert "colocation:" not in (apart.run_dir / "logs" / "driver.log").read_text()
