"""Every model family on a real engine: log-probs and routed experts are those of transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import cpu_engine, running
from tests.support.model_folders import Folders
from tests.support.routes import transformers_routes
from tests.support.tiny_models import FAMILIES, MOE_FAMILIES, as_transformers_writes, transformers_model

import slime.engine.server
from slime.config import RunConfig
from slime.engine.client import HttpPolicyClient
from slime.errors import EngineError
from slime.plugin import Generation, SamplingParams
from slime.weights.models import Models

pytestmark = pytest.mark.engine

#: SGLang has no code for it, and its fallback, which runs the code of transformers, fails
NOT_SERVED = ("glm",)
#: of each kind of family one in every test run
_FAST = ("deepseek_v3", "qwen3_moe")
SERVED = [
    pytest.param(family, marks=() if family in _FAST else pytest.mark.slow)
    for family in FAMILIES
    if family not in NOT_SERVED
]
PROMPTS = [[40, 41, 42, 43, 44], [40, 41], [*range(90, 110)], [3]]
TOLERANCE = 1e-4
Conversation = tuple[list[int], Generation]


@contextmanager
def serving(
    folder: Path, logs: Path, fork_server: Path, *, moe: bool, tp_size: int = 1, extra_args: tuple[str, ...] = ()
) -> Iterator[str]:
    """The address of an engine."""
    server = cpu_engine(
        folder, logs, fork_server=fork_server, tp_size=tp_size, routed_experts=moe, extra_args=extra_args
    )
    with running(server):
        yield server.url


def answers(url: str, *, moe: bool) -> list[Conversation]:
    """Prompts with their answers: several at once, and one whose beginning the engine has in its cache.

    Greedy, so that the tokens are the same each time: at random ones, two experts are sometimes so near each other that
    rounding decides between them.
    """
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0)

    async def ask() -> list[Conversation]:
        async with HttpPolicyClient(url, timeout_s=60, routed_layers=3 if moe else None) as client:
            generated = await asyncio.gather(*(client.generate(prompt, sampling) for prompt in PROMPTS))
            longer = [*PROMPTS[2], *generated[2].tokens, 50, 51, 52]
            # The experts of the tokens but the last are known from the first answer.
            again = await client.generate(longer, replace(sampling, routed_from=len(longer) - 4))
            assert again.meta["cached_tokens"] >= len(PROMPTS[2])
            return [*zip(PROMPTS, generated, strict=True), (longer, again)]

    return asyncio.run(ask())


def log_prob_difference(conversations: Sequence[Conversation], model: Any) -> float:
    """The largest between an engine's log-probs and those of a transformers model."""
    largest = 0.0
    for prompt, answer in conversations:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        largest = max(largest, float(np.abs(expected.numpy() - answer.log_probs).max()))
    return largest


def assert_routes(conversations: Sequence[Conversation], model: Any) -> None:
    for prompt, answer in conversations:
        assert answer.routed_experts is not None and answer.routed_experts.dtype == np.uint8
        expected = transformers_routes(model, (prompt + answer.tokens)[:-1])
        assert np.array_equal(np.sort(answer.routed_experts, -1), expected[answer.routed_from :])
        assert "routed_experts" not in answer.meta
        assert len(np.unique(expected)) > expected.shape[-1], "all tokens have the same experts: this shows nothing"


@pytest.mark.parametrize("family", SERVED)
def test_an_engine_computes_what_transformers_computes(
    family: str, model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    folder, moe = model_folder(family), family in MOE_FAMILIES
    with serving(folder, tmp_path, fork_server, moe=moe) as url:
        conversations = answers(url, moe=moe)
    model = transformers_model(folder)
    assert log_prob_difference(conversations, model) < TOLERANCE
    if moe:
        assert_routes(conversations, model)


@pytest.mark.parametrize("family", SERVED)
def test_an_engine_serves_a_folder_that_transformers_wrote(
    family: str, model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    """With what SGLang needs and transformers does not write, as a run gives it to its engines."""
    published, moe = model_folder(family), family in MOE_FAMILIES
    folder = as_transformers_writes(Path(shutil.copytree(published, tmp_path / "model")))
    missing = Models.installed(RunConfig()).engine_config(folder)
    described = ("--json-model-override-args", json.dumps(missing))
    with serving(folder, tmp_path, fork_server, moe=moe, extra_args=described) as url:
        conversations = answers(url, moe=moe)
    assert log_prob_difference(conversations, transformers_model(published)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4", "glm4_moe", "moonlight", "qwen2"])
def test_two_ranks_compute_what_transformers_computes(
    family: str, model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    folder, moe = model_folder(family), family in MOE_FAMILIES
    with serving(folder, tmp_path, fork_server, moe=moe, tp_size=2) as url:
        conversations = answers(url, moe=moe)
    model = transformers_model(folder)
    assert log_prob_difference(conversations, model) < TOLERANCE
    if moe:
        assert_routes(conversations, model)


@pytest.mark.slow
def test_latent_attention_does_not_depend_on_seeded_sampling(
    model_folder: Folders, fork_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--enable-deterministic-inference` SGLang computes the prompt in another way, which is right by itself."""
    defaults: Callable[..., dict[str, str | None]] = slime.engine.server._defaults

    def without_seeds(spec: Any) -> dict[str, str | None]:
        flags = defaults(spec)
        del flags["--enable-deterministic-inference"]
        return flags

    monkeypatch.setattr(slime.engine.server, "_defaults", without_seeds)
    folder = model_folder("deepseek_v3")
    with serving(folder, tmp_path, fork_server, moe=True) as url:
        conversations = answers(url, moe=True)
    assert log_prob_difference(conversations, transformers_model(folder)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", NOT_SERVED)
def test_a_family_that_cannot_be_served_is_refused_by_sglang(
    family: str, model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(EngineError, match="Unsupported TP style"),
        serving(model_folder(family), tmp_path, fork_server, moe=False),
    ):
        pass
