"""Asks the installed SGLang what it accepts, where its source does not list the values of an option.

Some choices are lists that SGLang's plugins extend, and some values are looked up when a server starts. A process of
its own, `python -m slime.cli.preflight_engine DEVICE WHOLE OPTIONS ARGUMENTS...`, imports SGLang, which takes seconds:
it is started only for a run that sets such an option.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr, suppress
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from slime.cli.preflight_model import missing_parts
from slime.config import RunConfig
from slime.config.flags import Flag
from slime.config.run_config import nvidia_devices
from slime.config.sglang_options import sglang_flags
from slime.engine.server import EngineSpec, server_arguments, server_environment
from slime.errors import ConfigError, did_you_mean, one_line
from slime.platform import platform_of
from slime.plugin.architecture import Architecture
from slime.weights.models import Models
from slime.weights.quantised import model_arguments, quantisation_of

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0
#: the levels of Python's and uvicorn's logs
_LEVELS = {
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "log_level_http": ("trace", "debug", "info", "warning", "error", "critical"),
}
#: option -> the tables of names, below sglang.srt, in which a server looks its value up when it has parsed its words
_LATER = {
    "chat_template": ("parser.conversation:chat_templates", "parser.python_chat_template:PYTHON_CHAT_TEMPLATES"),
    "completion_template": ("parser.code_completion_parser:completion_templates",),
    "eplb_algorithm": ("eplb.eplb_algorithms:EplbAlgorithm.__members__",),
    "model_config_parser": ("configs.model_config_parser_registry:_MODEL_CONFIG_PARSER_REGISTRY",),
    "model_impl": ("configs.model_config:ModelImpl._value2member_map_",),
    "radix_cache_backend": ("mem_cache.registry:_RADIX_CACHE_REGISTRY",),
    "warmups": ("entrypoints.warmup:_warmup_registry",),
}
#: those that may name a file instead
_FILES = ("chat_template", "completion_template")
#: how SGLang's help describes a file that a server reads
_PATH = re.compile(r"(?:the |optional )?(?:file )?path (?:of|to) (?:an?|the) ", re.IGNORECASE)
#: described like that too: files of the model folder, and a folder that is written to
_NOT_READ = ("decrypted_config_file", "decrypted_draft_config_file", "file_storage_path")
#: some weights have other shards with these than `slime.weights.verify` computes
_DIVIDE_OTHERWISE = ("enable_dp_lm_head", "moe_dense_tp_size")
#: texts that are JSON, or name a file
_JSON = ("_config", "expert_location")


def engine_option_problems(config: RunConfig, models: Models | None, *, trains: bool) -> Iterator[str]:
    """What SGLang would refuse of the options of a run that has no other problems, or compute wrongly.

    Args:
        config: The run.
        models: Those that are known, if it has a model folder.
        trains: Whether a trainer sends the engines its weights.
    """
    options = dict(config.sglang)
    yield from _weight_problems(options, trains=trains)
    tp, dp = config.cluster.rollout_num_gpus_per_engine, options.get("dp_size", 1)
    if options.get("enable_dp_attention") and tp % dp:
        yield (
            f"--sglang-dp-size {dp}: with --sglang-enable-dp-attention it divides the GPUs of an engine"
            f" (--rollout-num-gpus-per-engine {tp})"
        )
    for key in _DIVIDE_OTHERWISE if config.sync.check_weight_update_equal else ():
        if options.get(key):
            yield (
                f"--sglang-{key.replace('_', '-')} divides weights among an engine's ranks in a way that"
                " --check-weight-update-equal cannot compare. Drop one of them"
            )
    unread = [*_unread(options, elsewhere=config.cluster.ray_address is not None)]
    yield from unread
    if unread:
        return
    for key in _LEVELS.keys() & options.keys():
        if (level := str(options.pop(key)).lower()) not in _LEVELS[key]:
            yield _unknown(key, level, _LEVELS[key])
    # Numbers alone are compared with their ranges and the model; SGLang is not asked, since its start takes longer than
    # all other checks. What only a device can tell remains in any case: whether weights, cache and CUDA graphs fit it.
    open_options = {key: value for key, value in options.items() if _flag(key).type.is_open}
    if open_options:
        yield from _asked(config, models, open_options)


def _weight_problems(options: Mapping[str, Any], *, trains: bool) -> Iterator[str]:
    """Weights that are not the model's, or that the trainer's cannot replace."""
    kind, form = options.get("quantization"), options.get("load_format")
    if trains and kind not in (None, "unquant") and form != "flash_rl":
        yield (
            f"--sglang-quantization {kind}: the weights that training sends are not quantised, and engines would take"
            " them without the scales. Drop it"
        )
    if form == "dummy" and not trains:
        yield "--sglang-load-format dummy: engines would answer with random weights. Drop it"
    elif form == "dummy":
        logger.warning("--sglang-load-format dummy: engines start with random weights, until the trainer sends its own")


def _unread(options: Mapping[str, Any], *, elsewhere: bool) -> Iterator[str]:
    """Files that are missing, and texts that are not JSON: a server reads them when it has started.

    Engines `elsewhere` may have other disks than this machine, so that a missing file is only noted.
    """
    for key, value in options.items():
        flag = _flag(key)
        is_path = key == "lora_paths" or (_PATH.match(flag.help) and key not in _NOT_READ)
        for text in map(_path_in, value) if key == "lora_paths" else [value]:
            if not isinstance(text, str) or text == flag.default.strip("'"):
                continue
            # Not `Path.exists`, which raises an OSError for a text that is too long for a file name.
            if not (is_path or key.endswith(_JSON)) or os.path.exists(text.removeprefix("@")):
                continue
            where = f"--{flag.name}: got {text!r}, expected"
            if elsewhere and not text.startswith(("{", "[")):
                if not _on_the_hub(text, flag.help):
                    logger.warning("%s a file on the engines' machines, since this one has none", where)
            elif is_path:
                if not _on_the_hub(text, flag.help):
                    yield f"{where} a file or folder that exists"
            else:
                try:
                    json.loads(text)
                except ValueError as error:
                    yield f"{where} JSON, or a file that exists: {error}"


def _path_in(adapter: Any) -> Any:
    """The folder of an adapter, which is given as PATH, NAME=PATH, or an object of SGLang's."""
    return adapter.get("lora_path") if isinstance(adapter, dict) else str(adapter).rpartition("=")[2]


def _on_the_hub(text: str, description: str) -> bool:
    """Whether a server may find a tokenizer, a draft model or an adapter at the Hugging Face Hub, or in a bucket."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is in its documentation

    if "://" in text:
        return True
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return re.search("tokenizer|draft|LoRA", description) is not None


def _flag(key: str) -> Flag:
    return next(flag for flag in sglang_flags().values() if flag.key == key)


def _asked(config: RunConfig, models: Models | None, options: Mapping[str, Any]) -> list[str]:
    """The problems that a child process finds with these options, and with all of them together."""
    folder = Path(str(config.checkpoint.hf_checkpoint))
    model = [] if models is None else model_arguments(config.sync, models, folder)
    spec = EngineSpec.of(config, model, Path(os.devnull))
    # What SGLang makes of its options depends on the machine and the model's files: for engines elsewhere, and in the
    # plan of a run whose model is not here yet, only their words are checked.
    here = config.cluster.ray_address is None and (not config.on_gpu or nvidia_devices() > 0)
    whole = here and not any(missing_parts(folder, ""))
    words = [config.device, json.dumps(whole), json.dumps(options), *server_arguments(spec, port=1)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, *words],
            env={**os.environ, **server_environment(spec)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        found: list[str] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        logger.warning("SGLang could not be asked whether it accepts its options: %s", one_line(error))
        return []
    return found


def quantisation_problems(config: RunConfig, model: Architecture) -> list[str]:
    """Why engines cannot hold the model quantised, as the run asks for it."""
    try:
        found = quantisation_of(config.sync, model)
    except ConfigError as error:
        return [str(error)]
    if found is None:
        return []
    tp_size, compared = config.cluster.rollout_num_gpus_per_engine, config.sync.check_weight_update_equal
    return list(found.problems(config.sglang, tp_size=tp_size, compared=compared))


def draft_problems(config: RunConfig, model: Architecture) -> Iterator[str]:
    """Why engines cannot speculate with the model's own layers, as the run asks for it."""
    known = model.predicting is not None or not model.carried  # a family may carry such layers without describing them
    if config.drafts == "own" and known and (count := 0 if model.predicting is None else model.predicting.count) != 1:
        yield (
            f"--sglang-speculative-algorithm {config.sglang['speculative_algorithm']}: engines draft with one layer for"
            f" multi-token prediction, and the model has {count or 'none'}. Drop it, or name a draft model with"
            " --sglang-speculative-draft-model-path"
        )
    elif config.drafts == "own" and known and config.sglang.get("enable_multi_layer_eagle"):
        yield (
            "--sglang-enable-multi-layer-eagle: engines would draft each token with another layer, and the model has"
            " one for multi-token prediction. Drop it"
        )


# --- in the child process ---------------------------------------------------------------------------


def main() -> None:
    """Entry point of the child: the problems as a JSON list in the last line of the output."""
    device, whole, options, *arguments = sys.argv[1:]
    platform_of(device).prepare_engine()
    importlib.import_module("sglang.srt.plugins").load_plugins()
    problems = [*_unknown_names(json.loads(options))] or [*_refused(arguments, whole=json.loads(whole))]
    print("\n" + json.dumps(problems), flush=True)
    os._exit(0)  # SGLang's threads and exit handlers have nothing to do


def _unknown_names(options: Mapping[str, Any]) -> Iterator[str]:
    """Values that are none of those that SGLang's parser, or its server, knows."""
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    actions = {action.dest: action for action in parser._actions}
    for key, value in options.items():
        if key not in actions:
            continue
        known = actions[key].choices
        with suppress(ImportError, AttributeError):  # another SGLang may keep them elsewhere
            if known is None and key in _LATER:
                known = {str(actions[key].default or ""), *chain.from_iterable(map(_names_in, _LATER[key]))}
        for one in value.split(",") if key == "warmups" else value if isinstance(value, list) else [value]:
            if known is not None and one not in known and not (key in _FILES and os.path.exists(one)):
                yield _unknown(key, one, map(str, known))


def _names_in(place: str) -> list[str]:
    """The names in a table of SGLang, which is given as `module:attribute`."""
    module, _, path = place.partition(":")
    table: Any = importlib.import_module(f"sglang.srt.{module}")
    for part in path.split("."):
        table = getattr(table, part)
    return list(map(str, table))


def _refused(arguments: list[str], *, whole: bool) -> Iterator[str]:
    """What SGLang's own checks say, as a server would when it starts."""
    said = StringIO()
    try:
        with redirect_stderr(said):
            server_args = importlib.import_module("sglang.srt.server_args").prepare_server_args(arguments)
            if whole:
                server_args.resolve_once()
                _build(server_args)
    except SystemExit:
        yield f"SGLang refuses its options: {said.getvalue().strip().splitlines()[-1].partition('error: ')[2]}"
    except Exception as error:  # noqa: BLE001 - SGLang's checks raise anything
        yield f"SGLang refuses its options: {one_line(error)}"


def _build(server_args: Any) -> None:
    """Make what a server makes of its options first: the tokenizer, and the way in which weights are stored."""
    with suppress(ImportError, AttributeError):  # another SGLang may have them elsewhere
        if server_args.tokenizer_path:
            tokenizers = importlib.import_module("sglang.srt.utils.hf_transformers_utils")
            tokenizers.get_tokenizer(
                server_args.tokenizer_path,
                tokenizer_mode=server_args.tokenizer_mode,
                trust_remote_code=server_args.trust_remote_code,
            )
        model = importlib.import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(server_args)
        load = importlib.import_module("sglang.srt.configs.load_config").LoadConfig(
            load_format=server_args.load_format, model_loader_extra_config=server_args.model_loader_extra_config
        )
        loader = importlib.import_module("sglang.srt.model_loader.loader")
        loader.get_model_loader(load, model)
        loader._get_quantization_config(model, load)


def _unknown(key: str, value: str, known: Iterable[str]) -> str:
    names = sorted(name for name in known if name)
    expected = f"one of {', '.join(names)}" if names else "nothing: this SGLang has none"
    return f"--sglang-{key.replace('_', '-')}: got {value!r}, expected {expected}.{did_you_mean(value, names)}"


if __name__ == "__main__":
    main()
