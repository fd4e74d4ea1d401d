"""`scripts/models/*.sh` describe the published models.

`slime_planner/models` has the `config.json` of each, as published, without the keys that slime does not read.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.families import architecture

import slime_planner
from slime.config import read_config
from slime.plugin.architecture import Architecture
from slime.weights.stated_model import contradictions

_SCRIPTS = Path(__file__).parents[2] / "scripts" / "models"
_CONFIGS = Path(slime_planner.__file__).parent / "models"
NAMES = sorted(path.stem for path in _SCRIPTS.glob("*.sh"))

#: parameters of the published weights, as their safetensors files count them
PUBLISHED = {
    "deepseek-r1": 684_489_845_504,
    "deepseek-v3": 684_489_845_504,
    "deepseek-v3.1": 684_489_845_504,
    "glm4-9B": 9_400_279_040,
    "glm4.5-106B-A12B": 110_468_824_832,
    "glm4.5-355B-A32B": 358_337_791_296,
    "glm4.7-30B-A3B": 31_221_488_576,
    "kimi-k2": 1_026_408_232_448,
    "llama3-70B": 70_553_706_496,
    "llama3-8B": 8_030_261_248,
    "llama3.1-70B": 70_553_706_496,
    "llama3.1-8B": 8_030_261_248,
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-1.5B": 1_543_714_304,
    "qwen2.5-3B": 3_085_938_688,
    "qwen2.5-7B": 7_615_616_512,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-14B": 14_768_307_200,
    "qwen3-235B-A22B": 235_093_634_560,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-32B": 32_762_123_264,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
}
#: billions of parameters on the model card, where the exact number is not known
ROUNDED = {"glm4.6-355B-A32B": 357, "glm4.7-355B-A32B": 358, "moonlight-16B-A3B": 16}
#: flags that say how a model computes, not what it is
_NOT_OF_THE_MODEL = {"moe_grouped_gemm"}


def published(name: str) -> dict[str, Any]:
    """The `config.json` of a script's model."""
    config: dict[str, Any] = json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def arrays(name: str, **variables: str) -> dict[str, list[str]]:
    """The arrays that a script sets."""
    show = 'for one in MODEL_ARGS CKPT_ARGS; do declare -n all=$one; printf "%s\\0" "${all[@]}" "|"; done'
    done = subprocess.run(
        ["bash", "-euc", f'source "$0"; {show}', str(_SCRIPTS / f"{name}.sh")],
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], **variables},
    )
    assert not done.stderr
    model, checkpoint = done.stdout.split("|\0")[:2]
    return {"MODEL_ARGS": model.split("\0")[:-1], "CKPT_ARGS": checkpoint.split("\0")[:-1]}


def differences(words: list[str], found: Architecture) -> list[str]:
    """Where Megatron's flags in `words` differ from a model."""
    return list(contradictions(read_config(words).megatron, found, "it"))


def test_every_model_has_a_script_and_a_config() -> None:
    assert NAMES == sorted(path.stem for path in _CONFIGS.glob("*.json")) == sorted(PUBLISHED | ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.row("N4")
def test_a_script_agrees_with_the_published_config(name: str) -> None:
    words = arrays(name)["MODEL_ARGS"]
    assert differences(words, architecture(published(name))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-7B", "llama3.1-8B", "glm4-9B", "glm4.5-106B-A12B", "deepseek-v3", "kimi-k2"])
def test_every_value_of_a_script_is_compared(name: str) -> None:
    """Each flag alone, with another value, contradicts the model."""
    found, words = architecture(published(name)), arrays(name)["MODEL_ARGS"]
    flags = [number for number, word in enumerate(words) if word.startswith("--")]
    compared = 0
    for start, end in zip(flags, [*flags[1:], len(words)], strict=True):
        flag, values = words[start], words[start + 1 : end]
        if flag in ("--swiglu", "--use-rotary-position-embeddings", "--group-query-attention"):
            continue  # other spellings of these say the opposite
        if set(read_config([flag, *values]).megatron) <= _NOT_OF_THE_MODEL:
            continue
        if flag == "--moe-router-pre-softmax":
            continue  # a sigmoid has no "before" and "after" the choice
        match values:
            case []:
                changed = [_opposite(flag)]
            case [value] if value.replace(".", "").replace("e-", "").isdigit():
                changed = [flag, str(float(value) * 2) if "." in value or "e" in value else str(int(value) * 2)]
            case ["RMSNorm"]:
                changed = [flag, "LayerNorm"]
            case ["sigmoid"]:
                changed = [flag, "softmax"]
            case ["yarn"]:
                changed = [flag, "rope"]
            case _:
                assert flag == "--moe-layer-freq"
                changed = [flag, "1"]
        assert differences([flag, *values], found) == []
        assert differences(changed, found), (flag, changed)
        compared += 1
    assert compared >= 12


def _opposite(flag: str) -> str:
    """The switch that says the opposite."""
    return {"--disable-bias-linear": "--add-bias-linear"}.get(flag, f"--no-{flag.removeprefix('--')}")


@pytest.mark.parametrize("name", NAMES)
def test_the_folders_can_be_chosen(name: str) -> None:
    plain, chosen = arrays(name), arrays(name, HF_CHECKPOINT="/models/my model", SAVE_DIR="/out")
    assert chosen["CKPT_ARGS"] == ["--hf-checkpoint", "/models/my model", "--save", "/out"]
    assert [plain["CKPT_ARGS"][0], plain["CKPT_ARGS"][2:]] == ["--hf-checkpoint", ["--save", f"checkpoints/{name}"]]
    used = plain["CKPT_ARGS"][1]
    folder = used.removesuffix("-bf16")
    assert folder.startswith("models/")
    # The script says how to get the model to where it expects it.
    text = (_SCRIPTS / f"{name}.sh").read_text(encoding="utf-8")
    commands = re.findall(r"^# ((?:hf|slime) .*)$", text, re.M)
    published_as = re.fullmatch(r"hf download [\w-]+/(\S+) --local-dir (\S+)", commands[0])
    assert published_as is not None and published_as.groups() == (Path(folder).name, folder)
    # In fp8, no run could use it.
    quantised = "quantization_config" in published(name)
    assert commands[1:] == [f"slime convert {folder} {used}"] * quantised
    assert (used != folder) == quantised


def test_a_later_kimi_k2_stretches_positions_further() -> None:
    words = arrays("kimi-k2", ROTARY_SCALING_FACTOR="64")["MODEL_ARGS"]
    assert words[words.index("--rotary-scaling-factor") + 1] == "64"


# --- the number of parameters ------------------------------------------------------------------------


def numbers(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> int:
    """The numbers in the tensors whose names begin with `prefix`."""
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix))


def predicting_layer(config: dict[str, Any], found: Architecture) -> int:
    """The numbers in the layer for multi-token prediction.

    It is a layer with norms of both inputs and of the output, the projection that joins the inputs, and in most
    checkpoints copies of embedding and output layer.
    """
    hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
    copies = 2 * config["vocab_size"] * hidden
    return numbers(found.shapes, f"model.layers.{last}.") + 3 * hidden + 2 * hidden**2 + copies


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    config = published(name)
    found = architecture(config)
    total = numbers(found.shapes) + config.get("num_nextn_predict_layers", 0) * predicting_layer(config, found)
    if name in PUBLISHED:
        assert total == PUBLISHED[name]
    else:
        assert abs(total / 1e9 - ROUNDED[name]) < 1.6  # with or without the copies of embedding and output layer
