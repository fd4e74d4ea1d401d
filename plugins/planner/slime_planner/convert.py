"""`slime convert`: write a run's checkpoint, or a model in fp8, as a Hugging Face model folder."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.eval import EvalRequest, read_request
from slime.cli.output import write
from slime.cli.preflight import preflight
from slime.cli.preflight_model import ModelFacts, read_model, weight_problems
from slime.cli.run_folders import unwritable
from slime.cli.train import make_run_folder, run_folder
from slime.config.assemble import stop_on
from slime.errors import CheckpointError, ConfigError
from slime.registry.plugin_set import load_plugins
from slime.run.checkpoint.files import digest_of_json, read_json_object
from slime.run.checkpoint.read import STATE, Checkpoint, read_checkpoint
from slime.weights.hf_config import read_hf_config
from slime.weights.lora import ADAPTERS_DESCRIPTION
from slime.weights.models import Models
from slime.weights.stored import sample_digest

if TYPE_CHECKING:
    from slime_planner.conversion import Conversion

_VERIFY, _TO_MEGATRON = "--verify", "--to-megatron"
_USAGE = """\
usage: slime convert SOURCE DIR [--verify] [--flag value]...
       slime convert MODEL DIR --to-megatron [--verify] [--flag value]...

Write a complete Hugging Face model folder: weights, configuration, tokenizer.

  SOURCE       a folder of --save (its newest checkpoint), one of its
               checkpoints, or a model folder with fp8 weights, which are
               dequantised
  DIR          the model folder to write; must be new or empty
  --verify     read source and result again and compare every bit, before DIR
               gets its name
  --to-megatron  the other way: write the weights of a Hugging Face folder as a
               checkpoint in Megatron's distributed format, for
               --initial-megatron-checkpoint of any layout
  --help       this text

Tensors are written one after another, in the types of the original model
(bfloat16 if that is in fp8), so that memory holds about one of them. The space
they need must be free. Repeat the command after it was interrupted: it
continues in .NAME.partial beside DIR.

--to-megatron needs training ranks: --tensor-model-parallel-size and the like
divide their memory. Its numbers have the type that most of MODEL's have,
unless --bf16 or --fp16 is given. A run does not need it: --hf-checkpoint reads
MODEL as it is.

Flags of `slime train` override the run's: --hf-checkpoint MODEL if the original
model has moved (its configuration and tokenizer are copied), --model-family.
Adapters (LoRA) are merged by training ranks in the layout of
the checkpoint's run, with logs in OUTPUT_DIR/RUN_NAME; --device and layout may
be given for another machine. Exit code: 0 written, 1 failed, 2 bad input.
"""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        ConfigError: Bad input, before anything is written.
        SlimeError: The conversion failed.
    """
    if "--help" in argv or "-h" in argv:
        write(_USAGE)
        return 0
    words = [word for word in argv if word not in (_VERIFY, _TO_MEGATRON)]
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise ConfigError(
            f"slime convert: got {' '.join(argv) or 'nothing'}, expected SOURCE DIR and then flags (see slime convert"
            " --help)"
        )
    source, *flags = words[0], *words[2:]
    if not Path(source).is_dir():
        raise ConfigError(f"slime convert: there is no folder {source}; expected a checkpoint or a model folder")
    folder = Path(words[1]).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder. Choose another DIR.")
    verify = _VERIFY in argv
    request = read_request([source, *flags], time.strftime("convert_%Y-%m-%d_%H%M%S"), exports=True)
    checkpoint = request.checkpoint
    if _TO_MEGATRON in argv:
        if checkpoint is not None:
            raise ConfigError(f"{_TO_MEGATRON}: {source} is a checkpoint already; expected a Hugging Face model folder")
        return _to_megatron(request, folder, verify=verify)
    if checkpoint is not None and (checkpoint.trainer_part / ADAPTERS_DESCRIPTION).is_file():
        if verify:
            raise ConfigError(
                f"{_VERIFY} has no effect: the adapters of {checkpoint.path} are merged by training ranks"
            )
        return _merge(request, folder)
    model = _model(request, folder)
    conversion = _of_model(model) if checkpoint is None else _of_checkpoint(checkpoint, model)
    conversion.write(folder, verify=verify, report=lambda text: print(f"slime: {text}", file=sys.stderr))
    print(folder)
    return 0


def _merge(request: EvalRequest, folder: Path) -> int:
    """Merge the adapters of a checkpoint into the model that they belong to, in a run with only a trainer."""
    from slime_planner.conversion import require_space, unquantised

    config = request.exporting
    checked = preflight(config, run_folder(config), request.functions, problems_of=lambda _: [])
    base = Path(str(config.checkpoint.hf_checkpoint))
    require_space(folder, [unquantised(base, "").tensors], base)
    make_run_folder(checked.run_dir, checked.config)

    # It imports Ray, which nothing above this line needs.
    from slime.run import entry

    return entry.export(checked.config, checked.run_dir, checked.plugins, folder)


def _to_megatron(request: EvalRequest, root: Path, *, verify: bool) -> int:
    """Write the model that the request names as a checkpoint, in a run with only a trainer."""
    from slime_planner.conversion import require_space

    model = _model(request, root)
    conversion = _of_model_folder(model)
    config, stated = request.exporting, request.exporting.megatron
    if not stated.get("bf16") and not stated.get("fp16"):
        sizes = Counter[str]()
        for tensor in conversion.tensors:
            sizes[str(tensor.dtype)] += tensor.nbytes
        flag = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(sizes.most_common(1)[0][0])
        config = config if flag is None else config.model_copy(update={"megatron": {**stated, flag: True}})
    checked = preflight(config, run_folder(config), request.functions, problems_of=lambda _: [])
    require_space(root, [conversion.tensors], model.folder)
    make_run_folder(checked.run_dir, checked.config)

    # It imports Ray, which nothing above this line needs.
    from slime.run import entry

    code = entry.convert_to_megatron(checked.config, checked.run_dir, checked.plugins, root)
    written = read_checkpoint(root)
    if code == 0 and verify:
        _compare(written, model)
    print(written.path)
    return code


def _compare(checkpoint: Checkpoint, model: ModelFacts) -> None:
    """Compare every number of a checkpoint with the model that it was made from. Raises `CheckpointError`."""
    conversion, back = _of_model_folder(model), _of_checkpoint(checkpoint, model)
    for tensor in back.tensors:
        expected, found = conversion.read(tensor.name), back.read(tensor.name)
        if not found.equal(expected.to(found.dtype)):
            raise CheckpointError(f"{checkpoint.path}: {tensor.name} differs from that in {model.folder}")


def _model(request: EvalRequest, folder: Path) -> ModelFacts:
    """The model folder that is converted, or that the checkpoint's run started from, after checking it."""
    config = request.exporting
    if config.checkpoint.hf_checkpoint is None:
        raise ConfigError("--hf-checkpoint is missing: the model folder that the run started from")
    models = Models(load_plugins(config.plugins), config, Path.cwd())
    model = read_model(Path(config.checkpoint.hf_checkpoint), "--hf-checkpoint", models)
    problems = list(weight_problems(model, "--hf-checkpoint", everything=False))
    if (problem := unwritable(folder)) is not None:
        problems.append(f"{folder} {problem}")
    original = model.folder.resolve()
    if original in folder.parents or folder in original.parents:
        problems.append(f"{folder} and {original} are inside each other: choose another DIR")
    stop_on(problems)
    return model


def _of_model(model: ModelFacts) -> Conversion:
    if model.block is None:
        raise ConfigError(
            f"{model.folder} is a Hugging Face model folder without quantised weights: there is nothing to convert."
            f" --hf-checkpoint reads it as it is, under every parallel layout. {_TO_MEGATRON} writes a checkpoint."
        )
    return _of_model_folder(model)


def _of_model_folder(model: ModelFacts) -> Conversion:
    from slime_planner.conversion import unquantised

    return unquantised(model.folder, _origin(model))


def _of_checkpoint(checkpoint: Checkpoint, model: ModelFacts) -> Conversion:
    with warnings.catch_warnings(action="ignore"):  # Megatron lists the libraries that are not installed
        from slime_planner.checkpoint_weights import CheckpointWeights
    from slime.weights.hf_load import SafetensorsFolder
    from slime.weights.hf_save import kept_names
    from slime_planner.conversion import Conversion, outputs

    weights = CheckpointWeights(checkpoint.trainer_part, model.architecture)
    original = SafetensorsFolder(model.folder, keeps_open=False)
    kept, copies = kept_names(original.names, weights.model)
    others = {name: original.shape(name) for name in sorted({*kept, *copies})}
    return Conversion(
        source_folder=model.folder,
        config=read_hf_config(model.folder),
        tensors=outputs(original, {**weights.shapes, **others}),
        read=lambda name: original.whole(name) if name in kept else weights.read(copies.get(name, name)),
        origin=f"{digest_of_json(read_json_object(checkpoint.path / STATE))} {_origin(model)}",
    )


def _origin(model: ModelFacts) -> str:
    return f"{digest_of_json(read_hf_config(model.folder))} {sample_digest(model.folder)}"
