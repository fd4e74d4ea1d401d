"""Over-sampling on real engines behind the real router: aborted responses are continued exactly."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import cpu_engine, running
from tests.support.routes import transformers_routes
from tests.support.tiny_models import make_tiny_model, transformers_model

from slime.config.options import DataOptions, RewardOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.engine.client import HttpPolicyClient
from slime.engine.router import RouterServer
from slime.engine.server import EngineServer
from slime.errors import EngineError
from slime.registry.plugin_set import load_plugins
from slime.rollout.record import Rollout
from slime.run.rollout_process import RolloutProcess
from slime.types import Sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LIMIT = 220
#: how many continued responses a test wants to see, and after how many rollouts it gives up: how many responses are cut
#: short depends on how soon aborts arrive, and so on what else the machine does
ENOUGH = 4
MOST_ROLLOUTS = 40
#: maximum difference between log-probs of engine and reference, both float32
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture with other weights."""
    return [
        make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=seed, max_position_embeddings=512)
        for seed in range(4)
    ]


@contextlib.contextmanager
def behind_router(model: Path, logs: Path, **engine: Any) -> Iterator[tuple[list[EngineServer], str]]:
    """Two engines, and the address of the router in front of them."""
    servers = [cpu_engine(model, logs, **engine) for _ in range(2)]
    with running(*servers), contextlib.ExitStack() as stack:
        router = RouterServer([server.url for server in servers], log_path=logs / "router.log")
        stack.callback(router.stop)
        router.start()
        router.wait_ready(60)
        yield servers, router.url


def config_of(prompt_file: Path, **rollout: Any) -> RunConfig:
    return RunConfig(
        data=DataOptions(prompt_data=[str(prompt_file)]),
        rollout=RolloutOptions(
            num_rollout=MOST_ROLLOUTS,
            rollout_batch_size=2,
            over_sampling_batch_size=6,
            n_samples_per_prompt=2,
            rollout_max_response_len=LIMIT,
            partial_rollout=True,
            **rollout,
        ),
        reward=RewardOptions(reward="exact_match"),
    )


def set_weights(servers: list[EngineServer], model: Path, version: int) -> None:
    for server in servers:
        server.control.pause()  # like a weight sync: aborted requests may still be in the engine's batch for a moment
        server.control.update_weights("disk", model_path=str(model), version=str(version))
        server.control.flush_cache()  # cached prefixes were computed with the previous weights
        server.control.resume()


def left_nothing(server: EngineServer) -> None:
    """Wait until nothing runs on the engines: flushing is refused until then."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return server.control.flush_cache()
        except EngineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


async def run(
    config: RunConfig,
    tokenizer: Any,
    servers: list[EngineServer],
    router: str,
    models: list[Path],
    folder: Path,
    **client: Any,
) -> list[Rollout]:
    """Rollouts until enough responses were continued; the weights change after each, in turn those of all models."""
    policy = HttpPolicyClient(router, timeout_s=60, **client)
    policy.connect(router, [server.url for server in servers])
    process = RolloutProcess(config, load_plugins(config.plugins), policy, folder, tokenizer)
    await process.start()
    done: list[Rollout] = []
    try:
        while len(done) < MOST_ROLLOUTS and continued(done) < ENOUGH:
            number = len(done)
            await asyncio.to_thread(set_weights, servers, models[number % len(models)], number)
            done.append(await asyncio.wait_for(process.make_rollout(number), 60))
            process.trained(number + 1)
    finally:
        await process.close()
        await policy.close()
    return done


def samples_of(rollouts: list[Rollout]) -> list[Sample]:
    return [sample for rollout in rollouts for group in rollout.groups for sample in group.samples]


def continued(rollouts: list[Rollout]) -> int:
    """How many responses have tokens of several weights."""
    return sum(len(sample.weight_versions) > 1 for sample in samples_of(rollouts))


class Reference:
    """Log-probs of whole sequences by Hugging Face's own models."""

    def __init__(self, models: list[Path]) -> None:
        from transformers import AutoModelForCausalLM

        self.models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in models]

    def response(self, sample: Sample) -> torch.Tensor:
        """[models, T] log-probs of the response under each of them."""
        tokens = torch.tensor([sample.tokens])
        rows = []
        with torch.no_grad():
            for model in self.models:
                log_probs = model(tokens).logits[0, :-1].log_softmax(-1)
                rows.append(log_probs.gather(1, tokens[0, 1:, None])[:, 0][sample.prompt_length - 1 :])
        return torch.stack(rows)


def parts(sample: Sample, reference: Reference) -> list[int]:
    """The number of response tokens of each weight version; asserts that each token agrees with its weights."""
    versions = [int(version) for version in sample.weight_versions]
    expected = reference.response(sample)
    lengths, now = [0] * len(versions), 0
    for place, log_prob in enumerate(sample.rollout_log_probs or []):
        while abs(float(expected[versions[now] % len(expected), place]) - log_prob) > TOLERANCE:
            now += 1
            assert now < len(versions), f"token {place} of sample {sample.index} is of none of its weights {versions}"
        lengths[now] += 1
    return lengths


@pytest.mark.row("G7")
def test_each_part_of_a_continued_response_has_the_log_probs_of_its_weights(
    models: list[Path], fork_server: Path, prompt_file: Path, tmp_path: Path
) -> None:
    """With parts of earlier weights masked; `test_first_finished.py` has both."""
    from transformers import AutoTokenizer

    config = config_of(prompt_file, mask_offpolicy_in_partial_rollout=True)
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    with behind_router(models[0], tmp_path, fork_server=fork_server) as (servers, router):
        rollouts = asyncio.run(run(config, tokenizer, servers, router, models, tmp_path))
        for server in servers:
            left_nothing(server)
    assert continued(rollouts) >= ENOUGH, "hardly any response was cut short: the test shows nothing"
    reference, seen = Reference(models), set[int | None]()
    for done, group in [(each, group) for each in rollouts for group in each.groups]:
        for sample in group.samples:
            seen.add(sample.index)
            assert sample.trainable, sample.failure
            assert sample.response_length <= LIMIT
            assert len(sample.rollout_log_probs or []) == sample.response_length
            text = tokenizer.decode(sample.tokens[sample.prompt_length :], skip_special_tokens=True)
            assert text == sample.response
            lengths = parts(sample, reference)
            finished_in = str(done.number - group.age)
            assert sample.loss_mask == [
                int(version == finished_in)
                for version, length in zip(sample.weight_versions, lengths, strict=True)
                for _ in range(length)
            ]
    assert len(seen) == 4 * len(rollouts)
    assert sum(rollout.metrics["rollout/given_back"] for rollout in rollouts) >= ENOUGH / 2  # groups of two
    last = rollouts[-1].metrics
    assert (
        last["ledger/taken"]
        == last["ledger/in_batches"] + last["ledger/trained"] + last["ledger/waiting"] + last["ledger/buffered"]
    )


@pytest.mark.row("G7")
def test_each_token_of_a_continued_response_has_the_experts_that_generated_it(
    fork_server: Path, prompt_file: Path, tmp_path: Path
) -> None:
    models = [make_tiny_model(tmp_path / f"model-{seed}", "qwen3_moe", seed=seed) for seed in range(4)]
    config = config_of(prompt_file, use_rollout_routing_replay=True)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models[0])
    with behind_router(models[0], tmp_path, fork_server=fork_server, routed_experts=True) as (servers, router):
        rollouts = asyncio.run(run(config, tokenizer, servers, router, models, tmp_path, routed_layers=3))
    reference, routers = Reference(models), [transformers_model(folder) for folder in models]
    assert continued(rollouts) >= ENOUGH, "hardly any response was cut short: the test shows nothing"
    for rollout in rollouts:
        batch = rollout.batch
        assert batch is not None and batch.routed_experts is not None
        samples = [sample for group in rollout.groups for sample in group.samples]
        assert len(samples) == len(batch.routed_experts.parts)
        for sample, [[routed]] in zip(samples, batch.routed_experts.parts, strict=True):
            lengths = parts(sample, reference)
            expected, start, end = np.zeros_like(routed), 0, sample.prompt_length - 1
            for version, length in zip(sample.weight_versions, lengths, strict=True):
                end += length  # the last token that this version generated was read by the next one
                expected[start:end] = transformers_routes(routers[int(version) % len(routers)], sample.tokens[:-1])[
                    start:end
                ]
                start = end
            assert np.array_equal(np.sort(routed, -1), expected)
