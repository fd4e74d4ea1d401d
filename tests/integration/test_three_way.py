"""Engine, trainer and transformers compute the same log-probs, before and after a weight sync, and from an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.engines import cpu_engine, generated_batch, running
from tests.support.tiny_models import make_tiny_model, transformers_log_probs
from tests.train.harness import Centred, RankLauncher, make_config, run_ranks

from slime.config import RunConfig
from slime.rollout.train_batch import TrainBatch

pytestmark = pytest.mark.engine

PROMPTS = [[5, 20, 33], [47, 61, 80, 12, 90, 44, 7, 101], [3, 3, 3, 9, 9], [110]]
TEMPERATURE = 0.8


def train_and_sync(
    launcher: RankLauncher, config: RunConfig, engine_url: str, exported: Path
) -> list[tuple[TrainBatch, Any]]:
    """On the trainer rank: (batch, trainer's log-probs) before and after a step that reaches the engine."""
    from tests.support.families import read_architecture

    from slime.engine.control import EngineControl
    from slime.weights.hf_save import save_hf
    from slime.weights.transports import create_transport

    source = Path(str(config.checkpoint.hf_checkpoint))
    rank = launcher.start(config, Centred())
    first = generated_batch(engine_url, PROMPTS, temperature=TEMPERATURE)
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
    second = generated_batch(engine_url, PROMPTS, temperature=TEMPERATURE)
    after = (second, rank.log_probs(second))
    rank.close()
    return [before, after]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_three_implementations_agree_before_and_after_a_weight_sync(
    family: str, fork_server: Path, tmp_path: Path
) -> None:
    folder, exported = make_tiny_model(tmp_path / "model", family, seed=3), tmp_path / "exported"
    config = make_config(folder, rollout_temperature=TEMPERATURE, check_weight_update_equal=True)
    engine = cpu_engine(folder, tmp_path, fork_server=fork_server)
    with running(engine):
        [(before, after)] = [tuple(run_ranks(train_and_sync, 1, config, engine.url, exported)[0])]
    reader = cpu_engine(exported, tmp_path, fork_server=fork_server)
    with running(reader):
        read_back = generated_batch(reader.url, PROMPTS, temperature=TEMPERATURE)

    moved = [
        a - b
        for a, b in zip(transformers_log_probs(exported, before[0], temperature=TEMPERATURE), before[1], strict=True)
    ]
    # the step must change the model, or the second half proves nothing
    assert max(np.abs(m).max() for m in moved) > 1e-2
    for (batch, trainer), model in ((before, folder), (after, exported)):
        assert batch.rollout_log_probs is not None
        for engines, trainers, independent in zip(
            batch.rollout_log_probs, trainer, transformers_log_probs(model, batch, temperature=TEMPERATURE), strict=True
        ):
            assert np.abs(engines - trainers).max() < 1e-4
            assert np.abs(engines - independent).max() < 1e-4
            assert np.abs(trainers - independent).max() < 1e-4
    # an engine that starts from the exported folder has the trained weights too
    assert read_back.rollout_log_probs is not None
    for engines, independent in zip(
        read_back.rollout_log_probs, transformers_log_probs(exported, read_back, temperature=TEMPERATURE), strict=True
    ):
        assert np.abs(engines - independent).max() < 1e-4
