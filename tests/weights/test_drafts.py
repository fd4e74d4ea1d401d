"""Layers for multi-token prediction, sent to engines that draft with them.

Stock SGLang starts its draft worker and loads weights into it on a CPU, but lacks functions with which it would
generate. The engines here leave those out: they take weights and say what they hold, and generate nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.config.conftest import GOOD
from tests.support.engines import cpu_engine, running
from tests.support.families import architecture, read_architecture
from tests.support.model_folders import Folders
from tests.support.tiny_models import published
from torch import Tensor

from slime.cli.preflight_engine import draft_problems
from slime.config import read_config
from slime.config.weight_options import SyncOptions
from slime.engine.server import EngineServer
from slime.errors import WeightSyncError
from slime.plugin.architecture import Architecture
from slime.weights.transports import create_transport
from slime.weights.transports.transport import WeightTransport
from slime.weights.verify import WeightCheck

DRAFTING = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", "2")  # fmt: skip
#: imported by every process of the engine, as the user's own models are
WITHOUT_GENERATING = """
import importlib, torch
moves = importlib.import_module("sglang.kernels.ops.kvcache.cache_move")
moves.copy_all_layer_kv_cache_cpu = lambda *_: None
backends = importlib.import_module("sglang.srt.speculative.draft_utils").DraftBackendFactory
backends.create_draft_extend_backend = lambda _: None
torch.cuda.empty_cache = torch.cuda.synchronize = lambda *_: None
class NoModel(torch.nn.Module): ...
EntryClass = NoModel
"""
#: family -> a tensor of its layer for multi-token prediction, and the parameter of the draft model that it is in
PARTS = {
    "deepseek_v3": ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
                    "draft.model.decoder.self_attn.fused_qkv_a_proj_with_mqa.weight"),
    "glm4_moe": ("model.layers.3.mlp.experts.7.down_proj.weight", "draft.model.decoder.mlp.experts.w2_weight"),
    "glm4_moe_lite": ("model.layers.3.eh_proj.weight", "draft.model.eh_proj.weight"),
}  # fmt: skip


def trained(folder: Path) -> Architecture:
    return read_architecture(folder).with_predicting_layers()


def tensors(folder: Path) -> dict[str, Tensor]:
    """What a trainer of the model and its layers for multi-token prediction sends."""
    names = trained(folder).shapes
    return {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name in names}


@pytest.fixture
def drafting(
    request: pytest.FixtureRequest, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, EngineServer]]:
    """A family and an engine of its model of seed 1 that drafts."""
    family, tp_size = request.param
    package = tmp_path / "python" / "without_generating"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "patches.py").write_text(WITHOUT_GENERATING)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", package.name)
    engine = cpu_engine(model_folder(family, seed=1), tmp_path, tp_size=tp_size, extra_args=DRAFTING)
    with running(engine):
        yield family, engine


@contextmanager
def transport_of(
    name: str, engine: EngineServer, model: Architecture, folder: Path, scratch: Path
) -> Iterator[WeightTransport]:
    options = SyncOptions.model_validate({"update_weight_transport": name, "check_weight_update_equal": True})
    made = create_transport(options, [engine.control], model=model, hf_folder=folder, scratch=scratch, on_gpu=False)
    yield made
    made.close()


def held(engine: EngineServer) -> dict[str, str]:
    """The checksums of what the first rank's draft model has of its own."""
    (first, *_) = engine.control.weights_checksum()["ranks"]
    shared = ("draft.model.embed_tokens.weight", "draft.lm_head.weight")
    return {n: s for n, s in first["checksums"].items() if n.startswith("draft.") and n not in shared}


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.parametrize("drafting", [(f, 1) for f in PARTS] + [("deepseek_v3", 2), ("glm4_moe", 2)], indirect=True,
                         ids=lambda one: f"{one[0]}-tp{one[1]}")  # fmt: skip
def test_the_engines_drafts_are_those_that_were_trained(
    drafting: tuple[str, EngineServer], model_folder: Folders, tmp_path: Path
) -> None:
    family, engine = drafting
    old = model_folder(family, seed=1)
    name, parameter = PARTS[family]
    before = held(engine)
    for seed, transport in enumerate(("distributed", "tensor", "disk"), start=2):
        new = tensors(model_folder(family, seed=seed))
        with transport_of(transport, engine, trained(old), old, tmp_path / transport) as sending:
            sending.send(iter(new.items()), version=str(seed))
        after = held(engine)
        assert after.keys() == before.keys()
        same = {key for key in after if after[key] == before[key]}
        assert all("bias" in key or "norm" in key for key in same), same  # which tiny models may have alike
        before = after
    # A policy alone leaves the drafts as they are, and a separate check of what was not sent names them.
    policy = read_architecture(old)
    alone = {key: tensor for key, tensor in tensors(model_folder(family, seed=1)).items() if key in policy.shapes}
    for transport in ("distributed", "tensor"):
        with transport_of(transport, engine, policy, old, tmp_path) as sending:
            sending.send(iter(alone.items()), version=transport)
        assert held(engine) == before
    check = WeightCheck(trained(old), [engine.control.tp_size])
    list(check.observe((key, off(value) if key == name else value) for key, value in (new | alone).items()))
    with pytest.raises(WeightSyncError, match=rf"1 differ from the trainer's: {parameter}\."):
        check.compare(engine.url, engine.control.weights_checksum())


def off(tensor: Tensor) -> Tensor:
    """The tensor with one value a little off."""
    changed = tensor.clone()
    changed.view(-1)[-1] += 1e-3
    return changed


@pytest.mark.parametrize(
    ("layers", "words", "refused"),
    [
        (0, "", "engines draft with one layer for multi-token prediction, and the model has none"),
        (1, "", None),
        (2, "", "engines draft with one layer for multi-token prediction, and the model has 2"),
        (1, "--sglang-enable-multi-layer-eagle", "--sglang-enable-multi-layer-eagle: engines would draft each token"),
        (2, "--sglang-enable-multi-layer-eagle --sglang-speculative-draft-model-path other", None),
    ],
)
def test_engines_draft_with_one_layer_of_the_model(layers: int, words: str, refused: str | None) -> None:
    model = architecture(published("glm4_moe") | {"num_nextn_predict_layers": layers})
    drafting = ["--device", "cuda", "--sglang-speculative-algorithm", "NEXTN", *words.split()]
    problems = [*draft_problems(read_config([*GOOD, *drafting]), model)]
    assert len(problems) == (refused is not None) and (refused is None or refused in problems[0])


@pytest.mark.parametrize("family", PARTS)
def test_every_tensor_of_a_layer_has_its_place_in_the_draft_model(family: str, model_folder: Folders) -> None:
    model = trained(model_folder(family, seed=1))
    assert model.predicting is not None
    names = {rule.engine for rule in model.predicting.rules}
    assert all(name.startswith("draft.model.") for name in names)
    assert PARTS[family][1] in names
    assert {"draft.model.enorm.weight", "draft.model.hnorm.weight", "draft.model.shared_head.norm.weight"} < names
    layers = {name.removeprefix("draft.model.decoder.") for name in names if "decoder" in name}
    own = {rule.engine.removeprefix("model.layers.2.") for rule in model.rules if "layers.2." in rule.engine}
    assert layers == own  # those of the model's last layer, which is a mixture too


def test_a_draft_model_is_compared_if_it_is_sent(model_folder: Folders) -> None:
    folder = model_folder("glm4_moe", seed=1)
    sent = tensors(folder)
    check = WeightCheck(trained(folder), [1])
    list(check.observe(iter(sent.items())))
    (_, _, sums) = check.report()["expected"][0]
    one = {name: values[0] for name, values in sums.items()}
    shared = {"draft.model.embed_tokens.weight": one["model.embed_tokens.weight"],
              "draft.lm_head.weight": one["lm_head.weight"]}  # fmt: skip
    info = {"tp_rank": 0, "tp_size": 1}

    def compare(checking: WeightCheck, checksums: dict[str, str]) -> None:
        checking.compare("http://engine", {"ranks": [{"checksums": checksums, "parallelism_info": [info, info]}]})

    compare(check, one | shared)
    with pytest.raises(WeightSyncError, match=r"1 differ from the trainer's: draft\.lm_head\.weight"):
        compare(check, one | shared | {"draft.lm_head.weight": "0"})
    with pytest.raises(WeightSyncError, match=r"1 are in the engine only: draft\.model\.fc\.weight"):
        compare(check, one | shared | {"draft.model.fc.weight": "0"})
    with pytest.raises(WeightSyncError, match=r"missing in the engine: draft\."):
        compare(check, {name: value for name, value in one.items() if not name.startswith("draft.")})
    policy = WeightCheck(read_architecture(folder), [1])
    list(policy.observe((n, t) for n, t in sent.items() if n in read_architecture(folder).shapes))
    compare(policy, one | shared | {"draft.lm_head.weight": "0"})  # what it keeps is not the trainer's
