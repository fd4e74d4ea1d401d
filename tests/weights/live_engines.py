"""What tests send to live engines, and what those must compute afterwards."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.support.families import read_architecture
from torch import Tensor

from slime.config.weight_options import SyncOptions
from slime.engine.control import EngineControl
from slime.engine.server import EngineServer
from slime.weights.local_copy import LocalCopy
from slime.weights.transports import create_transport
from slime.weights.transports.transport import WeightTransport

TOKENS = [5, 20, 33, 47, 61, 80, 12, 90, 44, 7, 101, 3]
TRANSPORTS = ["distributed", "tensor", "disk"]


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model folder."""
    return load_file(folder / "model.safetensors")


def transport_to(
    engine: EngineServer,
    name: str,
    folder: Path,
    scratch: Path,
    *,
    also: Sequence[EngineControl] = (),
    repeated: bool = False,
    **options: object,
) -> WeightTransport:
    """The transport `name` from the model in `folder` to an engine, and to `also`."""
    if name == "delta":
        name, options = "disk", {**options, "disk_delta": True}
    settings = SyncOptions.model_validate({"update_weight_transport": name, "weight_sync_timeout_s": 30.0, **options})
    return create_transport(
        settings,
        [engine.control, *also],
        model=read_architecture(folder),
        hf_folder=folder,
        scratch=scratch,
        on_gpu=False,
        repeated=repeated,
        receive=lambda _, versions, version, __: LocalCopy(scratch / "copy").bring_to(versions, version),
    )


def engine_log_probs(engine: EngineServer) -> tuple[Tensor, str]:
    """Log-probs of TOKENS [11] and the version of the weights that gave them. A cached prefix would show."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    body = {
        "input_ids": TOKENS,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    meta = json.loads(connection.getresponse().read())["meta_info"]
    connection.close()
    return torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]]), meta["weight_version"]


def hf_log_probs(folder: Path) -> Tensor:
    """Log-probs of TOKENS [11] by transformers."""
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    gathered: Tensor = log_probs.gather(1, tokens[1:, None])[:, 0]
    return gathered


def assert_serves(engine: EngineServer, folder: Path, version: str | None = None) -> None:
    """The engine computes with the weights of `folder`, under this version."""
    log_probs, served = engine_log_probs(engine)
    assert (log_probs - hf_log_probs(folder)).abs().max() < 1e-4
    if version is not None:
        assert served == version
        assert engine.control.weight_version() == version
