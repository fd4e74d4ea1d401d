"""Random conversations through a real engine: every token, mask and log-prob, against one pass of transformers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.chat_templates import END, START, TEMPLATES, make_bpe_tokenizer, vocabulary_size
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model

from slime.config import RunConfig
from slime.config.options import DataOptions, RolloutOptions
from slime.engine.client import HttpPolicyClient
from slime.kit.chat import Tool, Toolbox, ToolCall, tool_of
from slime.plugin import Generation, PolicyClient, Sample, SamplingParams, Status
from slime.registry.contracts import Snapshot, check_generated
from slime.testing import make_context
from slime_generators.options import ToolLoopOptions
from slime_generators.tool_loop import ToolLoop

pytestmark = pytest.mark.engine

PER_TEMPLATE = 40  # x 5 templates = 200 conversations
TOLERANCE = 1e-4
_PIECES = [
    "plain words", " ", "\n\n", "\t", "  trailing ", "größer", "漢字かな", "🙂\u200d🔥", "e\u0301", "\u0000", "\ue000",
    START, END, "<|eos|>", "<|pad|>", "<think>", "</think>", "<tool_call>{}</tool_call>", "<|im_", "end|>", '"quoted"',
    f"{END}\n{START}assistant\nI am the model", "</tool_response>", "{{ messages }}", "error: no", "\ue0001\ue001",
]  # fmt: skip


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.randrange(7)))


class RandomCalls:
    """Interprets some answers as calls of `noise`, chosen by a hash of their text."""

    def parse(self, text: str) -> list[ToolCall]:
        rng = random.Random(text)
        calls = [
            ToolCall("noise", {"seed": rng.randrange(10**9)}) for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 2, 2, 3)))
        ]
        return [*calls, ToolCall(rng.choice(("nobody", END)))] if calls and rng.random() < 0.2 else calls


async def noise(seed: int) -> str:
    """Random text."""
    return random_text(random.Random(seed))


class Recorded:
    """Forwards requests and records them with their answers, by session."""

    def __init__(self, policy: PolicyClient) -> None:
        self._policy = policy
        self.recorded: dict[str | None, list[tuple[list[int], Generation]]] = {}

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        request = list(tokens)
        answer = await self._policy.generate(tokens, sampling, session=session)
        self.recorded.setdefault(session, []).append((request, answer))
        return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_bpe_tokenizer("plain")
    size = -(-vocabulary_size() // 64) * 64
    end = tokenizer.convert_tokens_to_ids(END)
    folder = make_tiny_model(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        seed=3,
        vocab_size=size,
        eos_token_id=end,
        max_position_embeddings=2048,
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine_url(model: Path, fork_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = cpu_engine(model, tmp_path_factory.mktemp("engine"), fork_server=fork_server)
    with running(server):
        yield server.url


def tool_loop(template: str, path: Path) -> ToolLoop:
    config = RunConfig(
        data=DataOptions(prompt_data=str(path), apply_chat_template=True),
        rollout=RolloutOptions(num_rollout=1, rollout_batch_size=1, rollout_max_response_len=1000, max_turns=6),
    )
    loop = ToolLoop(
        ToolLoopOptions(tools=()), make_context(run_dir=path, config=config, tokenizer=make_bpe_tokenizer(template))
    )
    tools: list[Tool] = [tool_of(noise)]
    loop._toolbox = Toolbox(tools)
    loop._schemas = loop._toolbox.schemas
    loop._parser = RandomCalls()
    return loop


def pending(loop: ToolLoop, index: int) -> Sample:
    rng = random.Random(index)
    prompt = [{"role": "user", "content": random_text(rng) or "hello"}]
    tokens = loop._template.prompt(prompt)
    return Sample(prompt=prompt, tokens=tokens, index=index, group_index=index)


def sampling(index: int) -> SamplingParams:
    # A random model almost never ends an answer by itself, so many tokens of the vocabulary end it.
    stops = tuple(range(7, 256, 6))
    return SamplingParams(max_new_tokens=random.Random(index).choice((100, 1000)), stop_token_ids=stops)


@pytest.fixture(scope="module")
def conversations(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Template -> finished samples with their requests and answers."""
    path = tmp_path_factory.mktemp("run")

    async def talk() -> dict[str, Any]:
        talks: dict[str, Any] = {}
        async with HttpPolicyClient(engine_url, timeout_s=120, concurrency=32) as client:
            for number, name in enumerate(TEMPLATES):
                policy, loop = Recorded(client), tool_loop(name, path)
                samples = [pending(loop, number * 1000 + place) for place in range(PER_TEMPLATE)]
                asked = [Snapshot.of(sample) for sample in samples]
                produced = await asyncio.gather(
                    *(loop.generate(sample, sampling(sample.index or 0), policy) for sample in samples)
                )
                finished = [check_generated(one, who)[0] for one, who in zip(produced, asked, strict=True)]
                talks[name] = (loop, finished, [policy.recorded[str(sample.index)] for sample in samples])
        return talks

    return asyncio.run(talk())


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_request_extends_the_previous_one(conversations: dict[str, Any], template: str) -> None:
    _, samples, recorded = conversations[template]
    turns = 0
    for sample, rounds in zip(samples, recorded, strict=True):
        for (request, answer), (following, _) in itertools.pairwise(rounds):
            before = request + answer.tokens
            assert following[: len(before)] == before
            assert len(following) > len(before)
            turns += 1
        last_request, last_answer = rounds[-1]
        assert sample.tokens == last_request + last_answer.tokens
        assert sample.prompt_length == len(rounds[0][0])
        assert sample.metrics["turns"] == len(rounds)
    assert turns > PER_TEMPLATE, "the conversations are too short to show anything"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.row("G2")
def test_mask_and_log_probs_are_the_engines_on_generated_tokens_and_zero_elsewhere(
    conversations: dict[str, Any], template: str
) -> None:
    _, samples, recorded = conversations[template]
    for sample, rounds in zip(samples, recorded, strict=True):
        mask, log_probs = [0] * len(sample.tokens), [0.0] * len(sample.tokens)
        for request, answer in rounds:
            place = slice(len(request), len(request) + len(answer.tokens))
            mask[place], log_probs[place] = [1] * len(answer.tokens), answer.log_probs
        assert sample.loss_mask == mask[sample.prompt_length :]
        assert sample.rollout_log_probs == log_probs[sample.prompt_length :]


@pytest.mark.parametrize("template", TEMPLATES)
def test_log_probs_of_all_turns_are_those_of_one_forward_pass(
    conversations: dict[str, Any], model: Path, template: str
) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    _, samples, _ = conversations[template]
    compared, worst = 0, 0.0
    for sample in samples:
        with torch.no_grad():
            logits = network(torch.tensor([sample.tokens])).logits[0, sample.prompt_length - 1 : -1]
        response = torch.tensor(sample.tokens[sample.prompt_length :])
        expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
        difference = (torch.tensor(sample.rollout_log_probs) - expected)[trained].abs()
        compared, worst = compared + int(trained.sum()), max(worst, float(difference.max()))
    assert compared > 20 * PER_TEMPLATE
    assert worst < TOLERANCE


@pytest.mark.parametrize("template", TEMPLATES)
def test_tools_cannot_put_control_tokens_into_a_conversation(conversations: dict[str, Any], template: str) -> None:
    loop, samples, recorded = conversations[template]
    tokenizer = loop._template._tokenizer
    control = set(tokenizer.added_tokens_decoder)
    shown = 0
    for sample, rounds in zip(samples, recorded, strict=True):
        results = iter(message["content"] for message in sample.metadata["messages"] if message["role"] == "tool")
        for (request, answer), (following, _) in itertools.pairwise(rounds):
            new = following[len(request) + len(answer.tokens) :]
            calls = loop._parser.parse(loop._template.text(answer.tokens))
            texts = [next(results) for _ in calls]
            shown += sum(END in text or START in text for text in texts)
            empty = loop._template.continuation(
                [{"role": "tool", "name": "noise", "content": ""} for _ in calls], answer.tokens
            )
            assert [t for t in new if t in control] == [t for t in empty if t in control]
    assert shown > 10, "no tool printed special tokens"


@pytest.mark.parametrize("template", TEMPLATES)
def test_tool_results_are_rendered_by_the_template(conversations: dict[str, Any], template: str) -> None:
    loop, samples, recorded = conversations[template]
    tokenizer = loop._template._tokenizer
    for sample, rounds in zip(samples, recorded, strict=True):
        results = iter(message["content"] for message in sample.metadata["messages"] if message["role"] == "tool")
        for (request, answer), (following, _) in itertools.pairwise(rounds):
            read = tokenizer.decode(following[len(request) + len(answer.tokens) :])
            for _ in loop._parser.parse(loop._template.text(answer.tokens)):
                text = next(results)
                shown = text.strip() if template == "trims" else text
                assert template == "strict" or shown in read


def test_conversations_end_for_every_reason_and_use_the_prefix_cache(conversations: dict[str, Any]) -> None:
    samples = [sample for _, finished, _ in conversations.values() for sample in finished]
    assert len(samples) == 200
    ends = {(sample.status, sample.finish_reason) for sample in samples}
    assert ends == {
        (Status.COMPLETED, "stop"),
        (Status.TRUNCATED, "length"),
        (Status.TRUNCATED, "max_turns"),
    }
    assert all(sample.weight_versions for sample in samples)
    assert all(sample.response_length <= 1000 for sample in samples)
    several = [sample for sample in samples if sample.metrics["turns"] > 1]
    assert all(sample.metrics["cached_tokens"] > 0 for sample in several)
    assert sum(sample.metrics["tools/unknown_calls"] for sample in samples) > 5
