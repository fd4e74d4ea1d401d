"""SGLang's own fp8 loader, sent quantised weights by every transport: what it computes with, and what it holds."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import fp8_reference
from tests.support.engines import cpu_engine, running
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.support.tiny_models import transformers_model
from tests.weights.megatron_ranks import build, run_ranks
from torch import Tensor

from slime.config.weight_options import SyncOptions
from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineControl
from slime.engine.server import EngineServer
from slime.errors import WeightSyncError
from slime.plugin import SamplingParams
from slime.weights.hf_load import load_hf
from slime.weights.shards import named_hf_tensors
from slime.weights.transports import create_transport
from slime.weights.transports.stages import Turns
from slime.weights.transports.transport import WeightTransport
from slime_quantised.fp8 import Fp8

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [40, 41, 42, 43, 44]
#: family -> sizes that blocks of 128 divide, on two ranks too
SIZES = {
    "qwen3": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 256, "head_dim": 128},
    "deepseek_v3": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "kv_lora_rank": 128,
        "moe_intermediate_size": 256,
        "q_lora_rank": 128,
        **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
    },
    "glm4_moe": {"hidden_size": 192, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 128},
}


#: a weight that is sent -> the engine's parameter that it is a part of; the last expert is on the last rank
_WRONG = {
    "model.layers.1.self_attn.o_proj.weight": "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.experts.7.down_proj.weight": "model.layers.1.mlp.experts.w2_weight",
}


def _weights(folder: Path) -> dict[str, Tensor]:
    carried = read_architecture(folder).carried
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(carried or ("-",))}


def _dequantised(folder: Path, copy: Path) -> Path:
    """The model of what its weights stand for once they are quantised, by the reference quantiser."""
    shutil.copytree(folder, copy)
    tensors = {
        name: fp8_reference.dequantised(tensor)
        if name.endswith("_proj.weight") or "kv_a_proj" in name
        else tensor.clone()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def _engine(folder: Path, tmp_path: Path, fork_server: Path, tp_size: int, ep_size: int = 1) -> EngineServer:
    config = {"quantization_config": Fp8(read_architecture(folder)).model.engine_config["quantization_config"]}
    arguments = ("--load-format", "dummy", "--json-model-override-args", json.dumps(config))
    arguments += ("--ep-size", str(ep_size))
    return cpu_engine(folder, tmp_path, fork_server=fork_server, tp_size=tp_size, extra_args=arguments)


def _transport(
    name: str, engine: EngineControl, folder: Path, scratch: Path, *, compared: bool = True, turns: Turns | None = None
) -> WeightTransport:
    options = SyncOptions.model_validate(
        {
            "update_weight_transport": name,
            "check_weight_update_equal": compared,
            "weight_sync_timeout_s": 60.0,
            "update_weight_buffer_size": 40_000,
        }
    )
    model = read_architecture(folder)
    return create_transport(
        options,
        [engine],
        model=model,
        hf_folder=folder,
        scratch=scratch,
        on_gpu=False,
        quantised=Fp8(model),
        turns=turns,
    )


def _largest_difference(engine: EngineServer, folder: Path) -> float:
    """Between log-probs of an engine's own tokens and those of transformers with this model."""

    async def ask() -> tuple[list[int], list[float]]:
        async with HttpPolicyClient(engine.url, timeout_s=60) as client:
            answer = await client.generate(PROMPT, SamplingParams(max_new_tokens=16))
            return answer.tokens, answer.log_probs

    tokens, log_probs = asyncio.run(ask())
    with torch.no_grad():
        logits = transformers_model(folder)(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((torch.tensor(log_probs) - expected).abs().max())


def _off_by_a_bit(tensors: Iterator[tuple[str, Tensor]], changed: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if name == changed:
            tensor = tensor.clone()
            tensor.view(torch.uint8)[-1, -1] ^= 1
        yield name, tensor


@pytest.mark.parametrize(
    ("family", "tp_size", "ep_size"),
    [
        ("qwen3", 2, 1),
        ("qwen3_moe", 2, 1),
        ("qwen3_moe", 2, 2),
        ("deepseek_v3", 1, 1),
        pytest.param("deepseek_v3", 2, 2, marks=pytest.mark.nightly),
        pytest.param("glm4_moe", 1, 1, marks=pytest.mark.nightly),
    ],
)
def test_an_engine_computes_with_what_the_blocks_stand_for_by_every_transport(
    family: str, tp_size: int, ep_size: int, model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    compared = family != "glm4_moe"  # its blocks at the end of a row are narrower than the others
    folders = [model_folder(family, seed=seed, **SIZES[family]) for seed in (1, 2, 3)]
    engine = _engine(folders[0], tmp_path, fork_server, tp_size, ep_size)
    with running(engine):
        control = EngineControl(engine.url, tp_size=tp_size, ep_size=ep_size)
        for number, (name, folder) in enumerate(zip(("tensor", "distributed", "disk"), folders, strict=True)):
            quantised = Fp8(read_architecture(folder))
            assert not list(quantised.problems({"ep_size": ep_size}, tp_size=tp_size, compared=compared))
            transport = _transport(name, control, folder, tmp_path, compared=compared)
            metrics = transport.send(quantised.tensors(iter(_weights(folder).items())), version=str(number))
            transport.close()
            expected = _dequantised(folder, tmp_path / f"dequantised-{number}")
            assert _largest_difference(engine, expected) < 1e-4
            assert metrics["synced_bytes"] < 0.6 * sum(tensor.nbytes for tensor in _weights(folder).values())
        # The same tokens under the weights before they were quantised: the check above would see it.
        assert _largest_difference(engine, folders[-1]) > 1e-3

        if not compared:
            return
        sent = _weights(folders[-1])
        wrongs = {wrong: held_in for wrong, held_in in _WRONG.items() if wrong in sent}
        assert len(wrongs) == (1 if family == "qwen3" else 2)  # qwen3 has no experts
        for wrong, held_in in wrongs.items():
            check = quantised.check([tp_size], ep_size=ep_size)
            list(check.observe(_off_by_a_bit(quantised.tensors(iter(sent.items())), wrong)))
            with pytest.raises(WeightSyncError, match=f"1 differ from the trainer's: {held_in}\\."):
                check.compare(engine.url, control.weights_checksum())


def test_each_pipeline_stage_sends_its_own_blocks(model_folder: Folders, fork_server: Path, tmp_path: Path) -> None:
    start, folder = (model_folder("qwen3", seed=seed, **SIZES["qwen3"]) for seed in (1, 2))
    engine, quantised = _engine(start, tmp_path, fork_server, 1), Fp8(read_architecture(folder))

    def rank(_: int) -> dict[str, float]:
        models, model = build(folder, pp=2), read_architecture(folder)
        load_hf(models, folder, model)
        transport = _transport("distributed", engine.control, folder, tmp_path, turns=Turns.of_pipeline())
        metrics = transport.send(quantised.tensors(named_hf_tensors(models, model, by_stage=True)), version="1")
        torch.distributed.barrier()
        transport.close()
        return metrics

    with running(engine):
        metrics, of_other = run_ranks(rank, 2)
        assert _largest_difference(engine, _dequantised(folder, tmp_path / "dequantised")) < 1e-4
    sent = quantised.tensors(iter(_weights(folder).items()))
    sizes = [metrics[f"perf/sync/stage{stage}_bytes"] for stage in range(2)]
    assert min(sizes) > 0 and sum(sizes) == metrics["synced_bytes"] == sum(tensor.nbytes for _, tensor in sent)
    assert of_other == {}
