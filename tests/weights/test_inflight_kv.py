"""`--inflight-kv keep`: a request in flight keeps the KV cache of the old weights, and no other ever sees it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.engines import cpu_engine, running, wait_until_running
from tests.support.families import read_architecture
from tests.support.model_folders import Folders

from slime.config import RunConfig
from slime.config.options import SyncOptions
from slime.engine.server import EngineServer
from slime.run.engines import engine_options
from slime.weights import create_transport

pytestmark = pytest.mark.engine

PROMPT = [5, 20, 33, 47, 61, 80, 12, 90, 44, 7, 101, 3]
LONG = 400


@pytest.fixture(scope="module")
def engine(
    model_folder: Folders, fork_server: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """An engine with the options of such a run."""
    options = engine_options(RunConfig(sync=SyncOptions(inflight_kv="keep")))
    folder = tmp_path_factory.mktemp("engine")
    server = cpu_engine(model_folder("qwen3", seed=1), folder, extra_args=tuple(options), fork_server=fork_server)
    with running(server):
        yield server


def ask(engine: EngineServer, tokens: list[int], new: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    sampling = {"max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def prompt_log_probs(engine: EngineServer, tokens: list[int]) -> tuple[torch.Tensor, str]:
    meta = ask(engine, tokens, 1)["meta_info"]
    return torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]]), meta["weight_version"]


def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def log_probs(logits: torch.Tensor, following: list[int]) -> torch.Tensor:
    chosen: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(following)[:, None])[:, 0]
    return chosen


def mixed_log_probs(old: Any, new: Any, output: list[int], by_old: int) -> torch.Tensor:
    """Log-probs of `output`, of which the old model made the first `by_old` tokens and the new one the others.

    The last of these tokens goes into the cache under the new weights.
    """
    cached = old(torch.tensor([PROMPT + output[: by_old - 1]]), use_cache=True)
    first = log_probs(cached.logits[0, len(PROMPT) - 1 :], output[:by_old])
    rest = new(torch.tensor([output[by_old - 1 : -1]]), past_key_values=cached.past_key_values, use_cache=True)
    return torch.cat([first, log_probs(rest.logits[0], output[by_old:])])


def test_a_request_in_flight_keeps_its_cache_and_new_requests_have_the_new_weights(
    engine: EngineServer, model_folder: Folders, tmp_path: Path
) -> None:
    folders = {name: model_folder("qwen3", seed=seed) for name, seed in (("old", 1), ("new", 2))}
    options = SyncOptions(inflight_kv="keep", weight_sync_timeout_s=30.0)
    description = read_architecture(folders["old"])
    transport = create_transport(
        options, [engine.control], model=description, hf_folder=folders["old"], scratch=tmp_path, on_gpu=False
    )

    def send(name: str) -> None:
        transport.send(iter(load_file(folders[name] / "model.safetensors").items()), version=name)

    send("old")
    answers: list[dict[str, Any]] = []
    long_request = threading.Thread(target=lambda: answers.append(ask(engine, PROMPT, LONG)))
    long_request.start()
    wait_until_running(engine)
    send("new")
    shared, version = prompt_log_probs(engine, PROMPT)  # the same prompt, whose old cache is still in use
    assert long_request.is_alive()
    long_request.join(60)
    transport.close()

    old, new = model(folders["old"]), model(folders["new"])
    with torch.no_grad():
        prompt = torch.tensor([PROMPT])
        expected = log_probs(new(prompt).logits[0, :-1], PROMPT[1:])
        assert version == "new"
        assert (shared - expected).abs().max() < 1e-4
        assert (log_probs(old(prompt).logits[0, :-1], PROMPT[1:]) - expected).abs().max() > 0.1

        # the long response: both weights' tokens, with the log-probs of what sampled them
        [answer] = answers
        output, meta = answer["output_ids"], answer["meta_info"]
        first, last = meta["weight_versions"]
        assert (first["version"], last["version"], last["end"]) == ("old", "new", LONG)
        switch = last["start"]
        assert 0 < switch < LONG
        reported = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        assert any(
            (reported - mixed_log_probs(old, new, output, by_old)).abs().max() < 1e-4
            # SGLang computes the next token while it pauses, with the old weights, and counts it with the new ones
            for by_old in (switch, switch + 1)
        )
        recomputed = log_probs(new(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1], output)
        assert (reported - recomputed)[switch + 1 :].abs().max() > 1e-3

    # a continuation of the finished request does not find its cache either
    continued = PROMPT + output[:100]
    found, _ = prompt_log_probs(engine, continued)
    with torch.no_grad():
        assert (found - log_probs(new(torch.tensor([continued])).logits[0, :-1], continued[1:])).abs().max() < 1e-4
