"""The layouts in the table of `scripts/models/README.md`, for GPUs with 80 GB.

    python -m tests.model_scripts.layouts

writes the table anew.
"""

from __future__ import annotations

import math
from pathlib import Path

from tests.model_scripts.test_model_scripts import NAMES, arrays, published
from tests.support.families import architecture

from slime.config import read_config
from slime.observe.sizes import GIB
from slime_planner.predicted_memory import rank_memory

PAGE = Path(__file__).parents[2] / "scripts" / "models" / "README.md"

_TP2 = "8 --tensor-model-parallel-size 2"
_GLM = "128 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --expert-model-parallel-size 32"
_V3 = (
    "256 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 13"
    " --expert-model-parallel-size 32"
)
#: script -> model as people call it, GPUs for training, their layout
TABLE = {
    "qwen2.5-0.5B": ("Qwen2.5-0.5B, base and Instruct", "8"),
    "qwen2.5-1.5B": ("Qwen2.5-1.5B, base and Instruct", "8"),
    "qwen2.5-3B": ("Qwen2.5-3B, base and Instruct", _TP2),
    "qwen2.5-7B": ("Qwen2.5-7B, base and Instruct", _TP2),
    "qwen3-0.6B": ("Qwen3-0.6B", "8"),
    "qwen3-1.7B": ("Qwen3-1.7B", "8"),
    "qwen3-4B": ("Qwen3-4B", _TP2),
    "qwen3-8B": ("Qwen3-8B", _TP2),
    "qwen3-14B": ("Qwen3-14B", "8 --tensor-model-parallel-size 4"),
    "qwen3-32B": ("Qwen3-32B", "16 --tensor-model-parallel-size 8"),
    "qwen3-30B-A3B": ("Qwen3-30B-A3B", "16 --tensor-model-parallel-size 4 --expert-model-parallel-size 8"),
    "qwen3-235B-A22B": (
        "Qwen3-235B-A22B",
        "128 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 22"
        " --expert-model-parallel-size 16",
    ),
    "llama3-8B": ("Llama 3 8B, base and Instruct", _TP2),
    "llama3-70B": (
        "Llama 3 70B, base and Instruct",
        "32 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2",
    ),
    "llama3.1-8B": ("Llama 3.1 8B, base and Instruct", _TP2),
    "llama3.1-70B": (
        "Llama 3.1 70B, base and Instruct",
        "32 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2",
    ),
    "glm4-9B": ("GLM-Z1-9B-0414, GLM-4-9B-0414", _TP2),
    "glm4.5-106B-A12B": (
        "GLM-4.5-Air",
        "64 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 16",
    ),
    "glm4.5-355B-A32B": ("GLM-4.5", _GLM),
    "glm4.6-355B-A32B": ("GLM-4.6", _GLM),
    "glm4.7-355B-A32B": ("GLM-4.7", _GLM),
    "glm4.7-30B-A3B": ("GLM-4.7-Flash", "16 --tensor-model-parallel-size 4 --expert-model-parallel-size 8"),
    "deepseek-v3": ("DeepSeek-V3", _V3),
    "deepseek-v3.1": ("DeepSeek-V3.1", _V3),
    "deepseek-r1": ("DeepSeek-R1", _V3),
    "kimi-k2": ("Kimi K2 Instruct", _V3.replace("256", "512").replace(" 32", " 64")),
    "moonlight-16B-A3B": (
        "Moonlight-16B-A3B, base and Instruct",
        "8 --tensor-model-parallel-size 2 --expert-model-parallel-size 8",
    ),
}
_SHORT = {
    "--tensor-model-parallel-size": "TP",
    "--pipeline-model-parallel-size": "PP",
    "--decoder-last-pipeline-num-layers": "layers of the last stage",
    "--expert-model-parallel-size": "EP",
}


def layout_words(name: str) -> list[str]:
    """The flags of a model's layout, in bfloat16."""
    gpus, *words = TABLE[name][1].split()
    experts = ["--expert-tensor-parallel-size", "1"] if "--expert-model-parallel-size" in words else []
    return ["--bf16", "--actor-num-gpus-per-node", gpus, *words, *experts]


def table() -> str:
    """The table of the page."""
    heads = ("script", "model", "billions of parameters", "GPUs and layout", "memory of a GPU")
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | --- | --- |"]
    for name in sorted(NAMES, key=list(TABLE).index):
        model = architecture(published(name))
        config = read_config([*arrays(name)["MODEL_ARGS"], *layout_words(name)])
        numbers = sum(map(math.prod, model.shapes.values()))
        need = max(one.total for one in rank_memory(config, model))
        title, layout = TABLE[name]
        gpus, *words = layout.split()
        shown = ", ".join(
            [gpus, *(f"{_SHORT[flag]} {value}" for flag, value in zip(words[::2], words[1::2], strict=True))]
        )
        lines.append(f"| `{name}.sh` | {title} | {numbers / 1e9:.2f} | {shown} | {need / GIB:.0f} GiB |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table of today."""
    before, rest = page.split("| script |", 1)
    return before + table() + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
