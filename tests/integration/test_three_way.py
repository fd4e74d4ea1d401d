"""Engine, trainer and transformers compute the same log-probs, before and after a weight sync."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model
from tests.train.harness import Centred, RankLauncher, make_config, run_ranks

from slime.config import RunConfig
from slime.data import TrainBatch
from slime.plugin import SamplingParams
from slime.types import Group, Sample, Status

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

PROMPTS = [[5, 20, 33], [47, 61, 80, 12, 90, 44, 7, 101], [3, 3, 3, 9, 9], [110]]
TEMPERATURE = 0.8


def generated(engine_url: str) -> TrainBatch:
    """Two answers of the engine for each of PROMPTS, with log-probs."""
    from slime.engine.client import HttpPolicyClient

    async def ask() -> list[Any]:
        async with HttpPolicyClient(engine_url, timeout_s=60) as client:
            sampling = SamplingParams(max_new_tokens=24, temperature=TEMPERATURE)
            return await asyncio.gather(*(client.generate(p, sampling) for p in PROMPTS for _ in range(2)))

    samples = [
        Sample(
            group_index=i // 2, index=i, rollout_id=i, tokens=PROMPTS[i // 2] + answer.tokens,
            response_length=len(answer.tokens), rollout_log_probs=answer.log_probs, reward=float(i % 2),
            status=Status.COMPLETED, weight_versions=answer.weight_versions,
        )
        for i, answer in enumerate(asyncio.run(ask()))
    ]  # fmt: skip
    groups = [Group(g, samples[2 * g : 2 * g + 2]) for g in range(len(PROMPTS))]
    return TrainBatch.from_groups(groups, rollout=0, num_steps=1)


def train_and_sync(
    launcher: RankLauncher, config: RunConfig, engine_url: str, exported: Path
) -> list[tuple[TrainBatch, Any]]:
    """On the trainer rank: (batch, trainer's log-probs) before and after a step that reaches the engine."""
    from tests.support.families import read_architecture

    from slime.engine.control import EngineControl
    from slime.weights import create_transport, save_hf

    source = Path(str(config.checkpoint.hf_checkpoint))
    rank = launcher.start(config, Centred())
    first = generated(engine_url)
    before = (first, rank.log_probs(first))
    rank.train(first)
    transport = create_transport(
        config.sync,
        [EngineControl(engine_url)],
        model=read_architecture(source),
        hf_folder=source,
        scratch=exported.parent,
        on_gpu=False,
    )
    transport.send(rank.named_hf_weights(), version="1")
    transport.close()
    save_hf(exported, rank.named_hf_weights(), source, read_architecture(source))
    second = generated(engine_url)
    after = (second, rank.log_probs(second))
    rank.close()
    return [before, after]


def transformers_log_probs(folder: Path, batch: TrainBatch) -> list[np.ndarray[Any, Any]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    result = []
    for tokens, length in zip(batch.tokens, batch.response_lengths, strict=True):
        ids = torch.from_numpy(tokens).long()
        with torch.no_grad():
            scores = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        result.append(scores.gather(-1, ids[1:, None])[-int(length) :, 0].numpy())
    return result


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_three_implementations_agree_before_and_after_a_weight_sync(family: str, tmp_path: Path) -> None:
    folder, exported = make_tiny_model(tmp_path / "model", family, seed=3), tmp_path / "exported"
    config = make_config(folder, rollout_temperature=TEMPERATURE, check_weight_update_equal=True)
    engine = cpu_engine(folder, tmp_path)
    with running(engine):
        [(before, after)] = [tuple(run_ranks(train_and_sync, 1, config, engine.url, exported)[0])]

    moved = [a - b for a, b in zip(transformers_log_probs(exported, before[0]), before[1], strict=True)]
    # the step must change the model, or the second half proves nothing
    assert max(np.abs(m).max() for m in moved) > 1e-2
    for (batch, trainer), model in ((before, folder), (after, exported)):
        assert batch.rollout_log_probs is not None
        for engines, trainers, independent in zip(
            batch.rollout_log_probs, trainer, transformers_log_probs(model, batch), strict=True
        ):
            assert np.abs(engines - trainers).max() < 1e-4
            assert np.abs(engines - independent).max() < 1e-4
            assert np.abs(trainers - independent).max() < 1e-4
