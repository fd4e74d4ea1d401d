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
from slime.config.sglang_options import engine_options
from slime.config.weight_options import SyncOptions
from slime.engine.server import EngineServer
from slime.weights.transports import create_transport

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
    # Without log-probs of the prompt, for which an engine would compute it even if it were cached.
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def log_probs(logits: torch.Tensor, following: list[int]) -> torch.Tensor:
    chosen: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(following)[:, None])[:, 0]
    return chosen


def answered_log_probs(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def off_from(model: Any, tokens: list[int], answer: dict[str, Any], *, after: int = 0) -> float:
    """Largest difference between the answer's log-probs and the model's, from output token `after` on."""
    output = answer["output_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([tokens + output])).logits[0, len(tokens) - 1 : -1]
    return float((answered_log_probs(answer) - log_probs(logits, output))[after:].abs().max())


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
    shared = ask(engine, PROMPT, 4)  # the same prompt, whose old cache is still in use
    assert long_request.is_alive()
    long_request.join(60)
    transport.close()

    old, new = model(folders["old"]), model(folders["new"])
    with torch.no_grad():
        assert shared["meta_info"]["weight_version"] == "new"
        assert off_from(new, PROMPT, shared) < 1e-4
        assert off_from(old, PROMPT, shared) > 0.1

        # the long response: both weights' tokens, with the log-probs of what sampled them
        [answer] = answers
        output, meta = answer["output_ids"], answer["meta_info"]
        first, last = meta["weight_versions"]
        assert (first["version"], last["version"], last["end"]) == ("old", "new", LONG)
        switch = last["start"]
        assert 0 < switch < LONG
        reported = answered_log_probs(answer)
        assert any(
            (reported - mixed_log_probs(old, new, output, by_old)).abs().max() < 1e-4
            # SGLang computes the next token while it pauses, with the old weights, and counts it with the new ones
            for by_old in (switch, switch + 1)
        )
    assert off_from(new, PROMPT, answer, after=switch + 1) > 1e-3  # not recomputed

    # a continuation of the finished request does not find its cache either
    continued = PROMPT + output[:100]
    assert off_from(new, continued, ask(engine, continued, 4)) < 1e-4
