"""What precedes the first kernel, on the packages for GPUs, without a GPU: modules import, and engines can be called.

    python -m proofs.gpu_set

Every module of slime and its shops is imported, SGLang's own parser reads the command line of an engine for each
script in `scripts/models`, and flash-attn-4 is compared with how slime calls it. The exit status is 1 if one fails. It
works with the packages for the CPU too.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.model_scripts.test_model_scripts import NAMES, arrays, published
from tests.support.tiny_models import write_tiny_tokenizer

from slime.config import read_config
from slime.config.sglang_options import sglang_argv
from slime.engine.server import EngineSpec, server_arguments
from slime.platform import platform_of

ROOT = Path(__file__).parents[1]


def modules() -> list[str]:
    """Every module in the packages of the wheel, but those that are programs."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    found = []
    for path in (ROOT / package for package in build["targets"]["wheel"]["packages"]):
        found.append(path.stem)
        if path.is_dir():
            found += [info.name for info in pkgutil.walk_packages([str(path)], f"{path.name}.")]
    return [name for name in found if not name.endswith(".__main__")]


def import_problems(names: list[str]) -> Iterator[str]:
    """The modules that cannot be imported, each with the reason."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a library raises at its import
            yield f"import {name}: {type(error).__name__}: {error}"


def command_line(name: str, folder: Path) -> list[str]:
    """What `slime train` calls SGLang's server with, for the model of a script, on two GPUs."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(published(name)), encoding="utf-8")
    write_tiny_tokenizer(model)
    words = arrays(name, HF_CHECKPOINT=str(model), SAVE_DIR=str(folder / "saved"))
    flags = ["--device", "cuda", "--rollout-num-gpus-per-engine", "2", "--bf16"]
    config = read_config([*flags, *words["MODEL_ARGS"], *words["CKPT_ARGS"]])
    spec = EngineSpec(
        model_path=str(config.checkpoint.hf_checkpoint),
        log_path=folder / "engine.log",
        device=config.device,
        tp_size=config.cluster.rollout_num_gpus_per_engine,
        extra_args=sglang_argv(config.sglang),
    )
    return server_arguments(spec, port=1)


def refusals(folder: Path) -> Iterator[str]:
    """The scripts whose command lines SGLang's parser refuses."""
    if importlib.util.find_spec("triton") is None:  # the packages for the CPU: SGLang's import needs the platform
        platform_of("cpu").prepare_engine()
    server_args = importlib.import_module("sglang.srt.server_args").ServerArgs
    parser = argparse.ArgumentParser(exit_on_error=False)
    server_args.add_cli_args(parser)
    for name in NAMES:
        line = command_line(name, folder)
        try:
            _, unknown = parser.parse_known_args(line)
        except argparse.ArgumentError as error:
            yield f"{name}: {error}"
        else:
            if unknown:
                yield f"{name}: SGLang has no {' '.join(unknown)}"


def call_problems() -> Iterator[str]:
    """What flash-attn-4, where it is installed, would not take of the call in `slime_fused.attention`."""
    if importlib.util.find_spec("flash_attn") is None:
        return
    call = ast.parse(inspect.getsource(importlib.import_module("slime_fused.attention")))
    nodes = [node for node in ast.walk(call) if isinstance(node, ast.Call)]
    calls = [node for node in nodes if ast.unparse(node.func) == "flash_attn_varlen_func"]
    signature = inspect.signature(importlib.import_module("flash_attn.cute").flash_attn_varlen_func)
    for one in calls:
        try:
            signature.bind(*one.args, **{str(word.arg): None for word in one.keywords})
        except TypeError as error:
            yield f"flash_attn_varlen_func: {error}"


def main() -> int:
    """Look at everything; a line for each problem."""
    names = modules()
    found = [*import_problems(names), *call_problems()]
    with tempfile.TemporaryDirectory() as folder:
        found += refusals(Path(folder))
    for problem in found:
        print(problem)
    print(f"{len(names)} modules, {len(NAMES)} command lines, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
