"""Stock SGLang with the CPU patches: results that would be wrong, or refused, without them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model

from slime.engine.client import HttpPolicyClient
from slime.engine.server import EngineServer
from slime.kit.processes import living_members
from slime.plugin import Generation, SamplingParams

pytestmark = pytest.mark.engine

PROMPT = [40, 41, 42, 43, 44]


async def generate(url: str, requests: list[tuple[list[int], SamplingParams]]) -> list[Generation]:
    async with HttpPolicyClient(url, timeout_s=60) as client:
        return await asyncio.gather(*(client.generate(*request) for request in requests))


def seeded(seed: int | None, num_tokens: int = 32) -> tuple[list[int], SamplingParams]:
    return PROMPT, SamplingParams(max_new_tokens=num_tokens, sampling_seed=seed)


@pytest.fixture(scope="module")
def one_engine(fork_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0)
    server = cpu_engine(model, tmp_path_factory.mktemp("engine"), fork_server=fork_server)
    with running(server):
        yield server


@pytest.fixture
def seeded_engine_url(one_engine: EngineServer) -> str:
    return one_engine.url


def test_a_seed_gives_the_same_response_alone_and_in_any_batch(seeded_engine_url: str) -> None:
    alone = [asyncio.run(generate(seeded_engine_url, [seeded(i)]))[0].tokens for i in range(8)]
    others = [([50 + i] * (1 + i % 9), SamplingParams(max_new_tokens=5 + i)) for i in range(24)]
    together = asyncio.run(generate(seeded_engine_url, [*[seeded(i) for i in range(8)], *others]))
    assert [g.tokens for g in together[:8]] == alone
    assert len({tuple(tokens) for tokens in alone}) == 8


def test_requests_without_a_seed_differ(seeded_engine_url: str) -> None:
    generations = asyncio.run(generate(seeded_engine_url, [seeded(None)] * 8))
    assert len({tuple(g.tokens) for g in generations}) == 8


def test_seeded_samples_follow_the_models_distribution(seeded_engine_url: str) -> None:
    count = 1500
    generations = asyncio.run(generate(seeded_engine_url, [seeded(i, num_tokens=1) for i in range(count)]))
    probability = {g.tokens[0]: float(np.exp(g.log_probs[0])) for g in generations}
    drawn = np.bincount([g.tokens[0] for g in generations], minlength=128)
    for token, p in sorted(probability.items(), key=lambda item: -item[1])[:10]:
        assert abs(drawn[token] / count - p) < 4 * np.sqrt(p * (1 - p) / count)


def test_an_engine_says_how_long_it_had_a_request(one_engine: EngineServer) -> None:
    started = time.monotonic()
    (answer,) = asyncio.run(generate(one_engine.url, [seeded(1)]))
    assert (
        0 < answer.meta["e2e_latency"] < time.monotonic() - started
    )  # what `slime.observe.timing.BusyClock` relies on


def test_a_paused_engine_leaves_the_cores_to_the_trainer(one_engine: EngineServer) -> None:
    control = one_engine.control
    assert one_engine.pid is not None

    def cpu_s() -> float:
        times = [psutil.Process(pid).cpu_times() for pid in living_members(one_engine.pid or 0)]
        return sum(time.user + time.system for time in times)

    control.pause()
    try:
        control.begin_weight_update()  # answered after the pause
        control.end_weight_update()
        before = cpu_s()
        time.sleep(2)
        assert cpu_s() - before < 0.5  # a scheduler that spins takes all of a core that it can get
    finally:
        control.resume()


def test_a_deterministic_engine_gives_the_same_bits_alone_and_in_any_batch(fork_server: Path, tmp_path: Path) -> None:
    # prompts that share prefixes, of 1 to 75 tokens, and answers that end at different times
    requests = [
        (
            [*PROMPT, *range(8, 78)][: 1 + 6 * i] + [80 + i] * (i % 4),
            SamplingParams(max_new_tokens=20 + i, sampling_seed=i),
        )
        for i in range(13)
    ]
    server = cpu_engine(
        make_tiny_model(tmp_path, "qwen3", seed=0), tmp_path, fork_server=fork_server, deterministic=True
    )
    with running(server):
        alone = [asyncio.run(generate(server.url, [request]))[0] for request in requests]
        together = asyncio.run(generate(server.url, requests))
        backwards = asyncio.run(generate(server.url, requests[::-1]))[::-1]
    for answers in (together, backwards):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
        assert [answer.log_probs for answer in answers] == [answer.log_probs for answer in alone]  # to the bit


def test_two_ranks_have_the_log_probs_of_one(fork_server: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    answers = []
    for ranks in (1, 2):
        server = cpu_engine(model, tmp_path, tp_size=ranks, fork_server=fork_server)
        with running(server):
            answers.append(asyncio.run(generate(server.url, [(PROMPT, greedy)]))[0])
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].log_probs == pytest.approx(answers[1].log_probs, abs=1e-4)
