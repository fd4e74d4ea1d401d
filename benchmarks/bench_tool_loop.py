"""CPU time per turn of the tool loop, compared with the single-turn generator.

    python benchmarks/bench_tool_loop.py [--conversations 1024] [--in-flight 256] [--tokens 512] [--turns 4]

A stub HTTP engine in another process returns answers of `--tokens` tokens with their log-probs. In the tool loop all
but the last of `--turns` answers end with a call of the calculator. Everything except the engine is real: client,
tokenizer (byte-level BPE), chat template, parser, tool, sample. The table shows the CPU time of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from slime.config import RunConfig
from slime.config.options import DataOptions, RolloutOptions
from slime.engine.client import HttpPolicyClient
from slime.engine.ports import free_port
from slime.kit.processes import collect_seldom, keep_out_of_collections
from slime.plugin import Context, Generator, NoOptions, Sample, SamplingParams
from slime.testing import make_context
from slime_generators.options import ToolLoopOptions
from slime_generators.single_turn import SingleTurn
from slime_generators.tool_loop import ToolLoop

PROMPT_TOKENS = 128
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*(3+4)"}}</tool_call>'
WORDS = "the answer to this question is found step by step: first add the numbers, then divide what comes out. "
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """A byte-level BPE, as in most model families."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS, CALL] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)


def answers(tokens: int) -> tuple[bytes, bytes]:
    """An answer with a call at its end and one without, in the format of SGLang's /generate."""
    tokenizer = make_tokenizer()
    words = tokenizer.encode(WORDS * tokens)

    def answer(ending: str) -> bytes:
        end = tokenizer.encode(ending)
        ids = [*words[: tokens - len(end)], *end]
        meta = {
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "output_token_logprobs": [[-1.25 - n / 4096, token, None] for n, token in enumerate(ids)],
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_versions": [{"version": "7", "start": 0, "end": tokens}],
        }
        return orjson.dumps({"text": WORDS * 8, "output_ids": ids, "meta_info": meta})

    return answer(CALL + END), answer(END)


def serve_stub(port: int, tokens: int, turns: int) -> None:
    """Answer every request on `port`, with a call until the conversation has `turns` answers."""
    from aiohttp import web

    calling, final = answers(tokens)

    async def generate(request: web.Request) -> web.Response:
        ids = orjson.loads(await request.read())["input_ids"]
        last = len(ids) >= PROMPT_TOKENS + (turns - 1) * tokens
        return web.Response(body=final if last else calling, content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", generate)
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None, access_log=None)


async def wait_for_stub(url: str) -> None:
    """Wait until the stub answers."""
    deadline = time.monotonic() + 60
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url):
                    return
            except aiohttp.ClientError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)


async def measure(generator: Generator, url: str, conversations: int, in_flight: int) -> tuple[float, int]:
    """(CPU seconds, requests) of `conversations` conversations."""
    left = conversations
    requests = 0
    sampling = SamplingParams(max_new_tokens=2**16)
    async with HttpPolicyClient(url, timeout_s=120, concurrency=in_flight) as client:

        async def worker() -> None:
            nonlocal left, requests
            while left > 0:
                left -= 1
                sample = Sample(prompt="q", tokens=list(range(2, 2 + PROMPT_TOKENS)), index=left, group_index=left)
                [finished] = await generator.generate(sample, sampling, client)
                requests += int(finished.metrics.get("turns", 1))

        started = time.process_time()
        await asyncio.gather(*(worker() for _ in range(in_flight)))
        return time.process_time() - started, requests


def context(folder: Path) -> Context:
    """The context of a run whose limits do not matter here."""
    config = RunConfig(
        data=DataOptions(prompt_data="unused"),
        rollout=RolloutOptions(num_rollout=1, rollout_batch_size=1, rollout_max_response_len=2**16, max_turns=64),
    )
    return make_context(run_dir=folder, config=config, tokenizer=make_tokenizer())


async def bench(url: str, options: argparse.Namespace) -> None:
    """Measure both generators alternately and print the medians."""
    await wait_for_stub(url)
    with tempfile.TemporaryDirectory() as folder:
        run = context(Path(folder))
        generators: dict[str, Generator] = {
            "single_turn": SingleTurn(NoOptions(), run),
            "tool_loop": ToolLoop(ToolLoopOptions(), run),
        }
        costs: dict[str, list[float]] = {name: [] for name in generators}
        for repeat in range(options.repeats + 1):
            for name, generator in generators.items():
                count = options.conversations if name == "single_turn" else options.conversations // options.turns
                seconds, requests = await measure(generator, url, count, options.in_flight)
                if name == "tool_loop":
                    assert requests == count * options.turns, f"{requests} requests of {count} conversations"
                if repeat:  # the first one warms up
                    costs[name].append(seconds / requests * 1e3)
    print(f"{'generator':<14}{'tokens / turn':>14}{'CPU ms / turn':>16}{'x single_turn':>16}")
    base = statistics.median(costs["single_turn"])
    for name, values in costs.items():
        cost = statistics.median(values)
        print(f"{name:<14}{options.tokens:>14}{cost:>16.3f}{cost / base:>16.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1024)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve-stub", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_stub:
        serve_stub(options.serve_stub, options.tokens, options.turns)
        return
    port = free_port()
    argv = [sys.executable, __file__, "--serve-stub", str(port)]
    stub = subprocess.Popen([*argv, "--tokens", str(options.tokens), "--turns", str(options.turns)])
    try:
        keep_out_of_collections()  # as the process that generates does
        collect_seldom()
        asyncio.run(bench(f"http://127.0.0.1:{port}", options))
    finally:
        stub.kill()
        stub.wait()


if __name__ == "__main__":
    main()
