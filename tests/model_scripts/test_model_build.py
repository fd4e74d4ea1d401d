"""The model that Megatron builds for each script has the tensors of the published one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.model_scripts.test_model_scripts import NAMES, arrays, numbers, published
from tests.support.families import architecture
from tests.train.harness import RankLauncher, make_config, run_ranks

from slime.plugin.architecture import Architecture

pytestmark = pytest.mark.slow

#: models with the same `config.json` up to the length of the context are built once
_BUILT = [
    name for name in NAMES if name not in ("deepseek-r1", "deepseek-v3.1", "glm4.6-355B-A32B", "glm4.7-355B-A32B")
]


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """The model with its dense layers and one with experts; or with two layers, if it has no experts."""
    return config | {"num_hidden_layers": 1 + config.get("first_k_dense_replace", 1)}


def build_all(launcher: RankLauncher, models: dict[str, tuple[dict[str, Any], Architecture]]) -> dict[str, Any]:
    """The shape of every weight that Megatron builds on a device without memory, by its name in the rules."""
    import torch

    from slime.train import parallel
    from slime.train.chunks import build_chunks
    from slime.train.settings import train_settings
    from slime.weights.shards import local_parameters

    shapes: dict[str, Any] = {}
    started = False
    for name, (stated, found) in models.items():
        config = make_config(None, megatron=stated)
        settings = train_settings(config, found)
        if not started:
            parallel.start(config, settings.transformer, rank=0, world_size=1, meeting=("127.0.0.1", launcher.port))
            started = True
        with torch.device("meta"):
            chunks = build_chunks(settings, torch.device("meta"))
        shapes[name] = {key: tuple(tensor.shape) for key, tensor in local_parameters(chunks).items()}
    return shapes


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, tuple[int, ...]]]:
    from slime.config import read_config

    models = {}
    for name in _BUILT:
        words = arrays(name)["MODEL_ARGS"]
        config = shortened(published(name))
        stated = dict(read_config(words).megatron) | {"num_layers": config["num_hidden_layers"]}
        if isinstance(stated.get("moe_layer_freq"), list):
            stated["moe_layer_freq"] = stated["moe_layer_freq"][: config["num_hidden_layers"]]
        models[name] = (stated, architecture(config))
    [shapes] = run_ranks(build_all, 1, models)
    return dict(shapes)


@pytest.mark.parametrize("name", _BUILT)
def test_megatron_builds_the_tensors_of_the_published_model(built: dict[str, Any], name: str) -> None:
    found = architecture(shortened(published(name)))
    sizes = {rule.megatron: sum(numbers({key: shape}) for key, shape in rule.hf.items()) for rule in found.rules}
    assert {key: numbers({key: shape}) for key, shape in built[name].items()} == sizes


@pytest.mark.parametrize("name", _BUILT)
def test_the_whole_model_is_the_built_one_with_more_layers(built: dict[str, Any], name: str) -> None:
    config = published(name)
    last = f"decoder.layers.{shortened(config)['num_hidden_layers'] - 1}."
    more = config["num_hidden_layers"] - shortened(config)["num_hidden_layers"]
    assert numbers(built[name]) + more * numbers(built[name], last) == numbers(architecture(config).shapes)
