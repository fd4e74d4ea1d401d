"""Stock SGLang with the CPU patches: results that would be wrong, or refused, without them."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model, write_tiny_tokenizer

from slime.engine.client import HttpPolicyClient
from slime.plugin import Generation, SamplingParams

pytestmark = pytest.mark.engine

PROMPT = [40, 41, 42, 43, 44]
_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def save_model(folder: Path, config: Any) -> Any:
    """A float32 model with random weights and the tiny tokenizer in `folder`."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return model.eval()


async def generate(url: str, requests: list[tuple[list[int], SamplingParams]]) -> list[Generation]:
    async with HttpPolicyClient(url, timeout_s=60) as client:
        return await asyncio.gather(*(client.generate(*request) for request in requests))


def seeded(seed: int | None, num_tokens: int = 32) -> tuple[list[int], SamplingParams]:
    return PROMPT, SamplingParams(max_new_tokens=num_tokens, sampling_seed=seed)


@pytest.fixture(scope="module")
def seeded_engine_url(fork_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0)
    server = cpu_engine(model, tmp_path_factory.mktemp("engine"), fork_server=fork_server)
    with running(server):
        yield server.url


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


def test_latent_attention_has_the_log_probs_of_transformers(fork_server: Path, tmp_path: Path) -> None:
    from transformers import DeepseekV3Config

    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
    }
    config = DeepseekV3Config(
        **_TINY,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        rope_parameters=yarn,
    )
    model = save_model(tmp_path, config)
    description = json.loads((tmp_path / "config.json").read_text())
    # transformers omits keys that published checkpoints have and SGLang reads
    description |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    (tmp_path / "config.json").write_text(json.dumps(description))
    server = cpu_engine(tmp_path, tmp_path, fork_server=fork_server)
    with running(server):
        prompts = [PROMPT, PROMPT[:2], [90, 91, 92, 93, 94, 95, 96]]
        requests = [(prompt, SamplingParams(max_new_tokens=16)) for prompt in prompts]
        generations = asyncio.run(generate(server.url, requests))
    for prompt, generation in zip(prompts, generations, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + generation.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(generation.tokens)[:, None])[:, 0]
        assert generation.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_routed_experts_are_those_of_transformers(fork_server: Path, tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    layers, top_k = _TINY["num_hidden_layers"], 2
    config = Qwen3MoeConfig(
        **_TINY,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=top_k,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
    model = save_model(tmp_path, config)
    server = cpu_engine(tmp_path, tmp_path, extra_args=("--enable-return-routed-experts",), fork_server=fork_server)
    with running(server):
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
            "return_routed_experts": True,
        }
        request = urllib.request.Request(
            f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    seen = PROMPT + answer["output_ids"][:-1]
    routed = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    with torch.no_grad():
        gates = model(torch.tensor([seen]), output_router_logits=True).router_logits
    expected = np.stack([g.view(len(seen), -1).topk(top_k, -1).indices.numpy() for g in gates], axis=1)
    assert np.array_equal(np.sort(routed.reshape(len(seen), layers, top_k), -1), np.sort(expected, -1))


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
