"""The endpoint in front of a real engine: all trained tokens and log-probs are compared with one forward pass."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.engine.client import HttpPolicyClient
from slime.engine.server import EngineServer
from slime.plugin import Generation, Sample, SamplingParams, Status
from slime.testing import make_context, make_sample
from slime_generators.endpoint import EndpointGenerator
from slime_generators.options import AgentOptions

pytestmark = pytest.mark.engine

SAMPLING = SamplingParams(max_new_tokens=200, temperature=0.8, sampling_seed=11)
SAMPLES = 24


async def wandering(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> str:
    """An agent that continues, strips answers, goes back, starts over, streams, and sends special tokens."""
    chance = random.Random(metadata["seed"])
    talk: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": prompt}]
    answer_text = ""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(chance.randrange(1, 5)):
            limit = chance.randrange(3, 24)
            stop = chance.choice([None, ["e", "42"]])
            create = client.chat.completions.create
            if chance.random() < 0.3:
                stream = await create(model="m", messages=talk, stream=True, max_tokens=limit, stop=stop)
                answer_text = "".join([event.choices[0].delta.content or "" async for event in stream])
            else:
                answer = await create(model="m", messages=talk, max_tokens=limit, stop=stop)
                answer_text = answer.choices[0].message.content or ""
            kind = chance.random()
            if kind < 0.2:
                talk = [talk[0], {"role": "user", "content": f"another matter {turn} {metadata}"}]
                continue
            if kind < 0.35 and len(talk) > 3:
                talk = [*talk[:-2], talk[-2], {"role": "user", "content": f"no, rather {turn} ünïcode 学"}]
                continue
            talk.append({"role": "assistant", "content": answer_text.strip() if chance.random() < 0.5 else answer_text})
            talk.append({"role": "user", "content": chance.choice(["go on", " <|im_end|>\n<eos> ", "why? 学"])})
    return answer_text


class Listening(HttpPolicyClient):
    """Records requests to the engine and its answers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answered: list[tuple[list[int], Generation]] = []

    async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Generation:
        answer = await super().generate(tokens, sampling, **options)
        self.answered.append((list(tokens), answer))
        return answer


def test_every_trained_token_was_sampled_by_the_engine_at_that_position(engine: EngineServer, tiny_model: Path) -> None:
    import torch

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    async def work() -> tuple[list[list[Sample]], list[tuple[list[int], Generation]]]:
        generator = EndpointGenerator(
            AgentOptions(),
            make_context(tokenizer=tokenizer),
            lambda task: wandering(task.base_url, task.api_key, str(task.prompt), task.metadata),
        )
        async with Listening(engine.url, timeout_s=60) as policy:
            pending = [make_sample(f"say {n}", None, index=n, metadata={"seed": n}) for n in range(SAMPLES)]
            produced = await asyncio.gather(*(generator.generate(one, SAMPLING, policy) for one in pending))
            await generator.close()
            return produced, policy.answered

    produced, answered = asyncio.run(work())
    samples = [sample for rollout in produced for sample in rollout]
    assert all(sample.status in (Status.COMPLETED, Status.TRUNCATED) for sample in samples)
    assert len(samples) > SAMPLES, "some agents branched"
    # Each answer is trained on exactly once, with the engine's log-probs, after exactly the tokens of its request.
    answers = {tuple(prompt) + tuple(answer.tokens): answer for prompt, answer in answered}
    trained = 0
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    worst = 0.0
    for sample in samples:
        assert sample.loss_mask is not None and sample.rollout_log_probs is not None
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, :-1] / SAMPLING.temperature
        log_probs = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
        start = sample.prompt_length
        for index, (mask, log_prob) in enumerate(zip(sample.loss_mask, sample.rollout_log_probs, strict=True)):
            if mask:
                worst = max(worst, abs(float(log_probs[start + index - 1]) - log_prob))
            else:
                assert log_prob == 0.0
        ends = [n for n in range(len(sample.tokens) + 1) if tuple(sample.tokens[:n]) in answers]
        assert ends and ends[-1] == len(sample.tokens), "the sample is what the engine was sent, and its answer"
        for end in ends:
            answer = answers[tuple(sample.tokens[:end])]
            end_index = end - start
            masks = set(sample.loss_mask[end_index - len(answer.tokens) : end_index])
            assert len(masks) == 1, "an answer is trained on as a whole, or not"
            if masks == {1}:
                trained += len(answer.tokens)
                assert sample.rollout_log_probs[end_index - len(answer.tokens) : end_index] == answer.log_probs
    assert worst < 1e-4
    assert trained == sum(sum(sample.loss_mask or []) for sample in samples)
    assert trained == sum(len(answer.tokens) for _, answer in answered), "no answer is lost, and none counts twice"


def test_a_client_that_disconnects_frees_the_engine(engine: EngineServer, tiny_model: Path) -> None:
    """The engine stops within seconds, long before the answer would have ended."""
    from slime_endpoint import SessionServer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    async def running_requests(http: aiohttp.ClientSession) -> int:
        async with http.get(f"{engine.url}/v1/loads") as response:
            loads = (await response.json())["loads"]
        return sum(int(load["num_running_reqs"]) for load in loads)

    async def work() -> None:
        server = SessionServer(tokenizer)
        await server.start()
        async with HttpPolicyClient(engine.url, timeout_s=60) as policy, aiohttp.ClientSession() as http:
            session = server.open(policy, SamplingParams(max_new_tokens=1900))
            body = {"messages": [{"role": "user", "content": "hi"}]}
            url = server.base_url(session) + "/chat/completions"
            asking = asyncio.ensure_future(http.post(url, json=body))
            async with asyncio.timeout(60):
                while not await running_requests(http):
                    if asking.done():  # the answer ended before the load was read
                        asking = asyncio.ensure_future(http.post(url, json=body))
                    await asyncio.sleep(0.02)
                asking.cancel()
                while await running_requests(http):
                    await asyncio.sleep(0.05)
            assert session.counts.disconnected == 1
            await server.close()

    asyncio.run(work())
