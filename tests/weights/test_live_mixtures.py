"""Weights of mixtures of experts and of latent attention, sent to live engines and checked there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.engines import cpu_engine, running
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.support.tiny_models import transformers_model
from torch import Tensor

from slime.config.weight_options import SyncOptions
from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineControl
from slime.engine.server import EngineServer
from slime.errors import EngineError, WeightSyncError
from slime.plugin import SamplingParams
from slime.weights.transports import create_transport
from slime.weights.transports.tensor import TensorTransport
from slime.weights.verify import WeightCheck

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [40, 41, 42, 43, 44]
#: family -> tensors of a layer, and the parameters of the engine that they are parts of
PARTS = {
    "deepseek_v3": {
        "self_attn.kv_a_proj_with_mqa.weight": "self_attn.fused_qkv_a_proj_with_mqa.weight",
        "mlp.shared_experts.up_proj.weight": "mlp.shared_experts.gate_up_proj.weight",
        "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.experts.7.down_proj.weight": "mlp.experts.w2_weight",
    },
    "glm4": {"mlp.gate_up_proj.weight": "mlp.gate_up_proj.weight"},
    "moonlight": {"self_attn.q_proj.weight": "self_attn.q_proj.weight"},
    "qwen3_moe": {"mlp.experts.3.up_proj.weight": "mlp.experts.w13_weight"},
}
LAYER = "model.layers.2"


def weights(folder: Path) -> dict[str, Tensor]:
    """What a trainer sends: everything but layers that it does not train."""
    carried = read_architecture(folder).carried
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(carried or ("-",))}


def assert_serves(engine: EngineServer, folder: Path) -> None:
    async def ask() -> tuple[list[int], list[float]]:
        async with HttpPolicyClient(engine.url, timeout_s=60) as client:
            answer = await client.generate(PROMPT, SamplingParams(max_new_tokens=16))
            return answer.tokens, answer.log_probs

    tokens, log_probs = asyncio.run(ask())
    with torch.no_grad():
        logits = transformers_model(folder)(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def off_by_little(tensors: dict[str, Tensor], name: str) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in tensors.items():
        if key == name:
            tensor = tensor.clone()
            tensor.view(-1)[-1] += 1e-3
        yield key, tensor


@pytest.mark.parametrize("tp_size", [1, 2], ids=["tp1", "tp2"])
@pytest.mark.parametrize("family", PARTS)
def test_a_checked_sync_leaves_the_engine_with_the_weights_that_were_sent(
    family: str, tp_size: int, model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    old, new = model_folder(family, seed=1), model_folder(family, seed=2)
    model, sent = read_architecture(new), weights(new)
    engine = cpu_engine(old, tmp_path, fork_server=fork_server, tp_size=tp_size)
    options = SyncOptions(check_weight_update_equal=True, weight_sync_timeout_s=60.0, update_weight_buffer_size=40_000)
    with running(engine):
        # The engine has `old` at first, and again from the folder that is sent through a disk.
        for transport, wanted in (("distributed", new), ("disk", old)) if tp_size == 1 else (("distributed", new),):
            sender = create_transport(
                options.model_copy(update={"update_weight_transport": transport}),
                [engine.control],
                model=model,
                hf_folder=new,
                scratch=tmp_path,
                on_gpu=False,
            )
            sender.send(iter(weights(wanted).items()), version=transport)
            sender.close()
            assert_serves(engine, wanted)
        unchecked = TensorTransport(engines=[engine.control], timeout_s=60, on_gpu=False, bucket_bytes=2**29)
        for name, parameter in PARTS[family].items():
            unchecked.send(off_by_little(sent, f"{LAYER}.{name}"), version="2")
            check = WeightCheck(model, [tp_size])
            list(check.observe(iter(sent.items())))
            with pytest.raises(WeightSyncError, match=f"1 differ from the trainer's: {LAYER}.{parameter}\\."):
                check.compare(engine.url, engine.control.weights_checksum())


def test_experts_divided_among_ranks_are_checked(model_folder: Folders, fork_server: Path, tmp_path: Path) -> None:
    folder = model_folder("qwen3_moe", seed=1)
    arguments = ("--ep-size", "2")
    engine = cpu_engine(folder, tmp_path, fork_server=fork_server, tp_size=2, extra_args=arguments)
    with running(engine):
        for ep_size, accepted in ((2, True), (1, False)):
            check = WeightCheck(read_architecture(folder), [2], ep_size=ep_size)
            list(check.observe(iter(weights(folder).items())))
            control = EngineControl(engine.url, tp_size=2)
            if accepted:
                check.compare(engine.url, control.weights_checksum())
            else:
                with pytest.raises(WeightSyncError, match="6 differ"):
                    check.compare(engine.url, control.weights_checksum())


@pytest.mark.parametrize("family", PARTS)
def test_an_engine_that_has_released_its_memory_serves_what_it_gets_then(
    family: str, model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    old, new = model_folder(family, seed=1), model_folder(family, seed=2)
    engine = cpu_engine(old, tmp_path, fork_server=fork_server)
    options = SyncOptions(weight_sync_timeout_s=60.0, update_weight_buffer_size=40_000)
    with running(engine):
        assert_serves(engine, old)
        transport = create_transport(
            options, [engine.control], model=read_architecture(new), hf_folder=new, scratch=tmp_path, on_gpu=False
        )
        for number in range(2):  # the second time nothing of the model's files is left
            engine.control.release_memory(["kv_cache", "weights", "cuda_graph"], timeout_s=30)
            engine.control.restore_memory(["weights"])
            transport.send(iter(weights(new).items()), version=str(number))
            engine.control.restore_memory(["cuda_graph", "kv_cache"])
            assert_serves(engine, new)
        engine.control.release_memory(["weights", "kv_cache"], timeout_s=30)
        engine.control.restore_memory(["weights"])
        left_out = f"{LAYER}.self_attn.o_proj.weight"
        sent = ((name, tensor) for name, tensor in weights(new).items() if name != left_out)
        transport.send(sent, version="2")
        with pytest.raises(EngineError):
            engine.control.restore_memory(["kv_cache"])
        deadline = time.monotonic() + 60
        while engine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        transport.close()
        assert f"not sent again in full: {left_out}. Run this model without --colocate" in engine.log_path.read_text()
