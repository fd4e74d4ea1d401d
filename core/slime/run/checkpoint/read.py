"""Reads checkpoints: which there are, whether they are complete and intact, and what they say of their runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic checks it, and needs this one before Python 3.12

from slime.config import RunConfig, config_from_toml
from slime.errors import CheckpointError
from slime.errors.redaction import redacted
from slime.kit.readers.prompt_source import content_digest, parse_sources
from slime.plugin.architecture import Architecture
from slime.run.checkpoint.files import (
    LATEST,
    Files,
    check_content,
    check_files,
    digest_of_json,
    read_description,
    read_json_object,
)

FORMAT = 4
TRAINER_PART = "megatron"
ROLLOUT_PART = "rollout"
STATE, PLUGINS, CONFIG = "state.json", "plugins.json", "config.toml"
#: the name of a checkpoint, and the name under which one waits to be deleted
_NAME = re.compile(r"rollout_(\d+)")
_ASIDE = re.compile(r"\.(rollout_\d+)\.replaced")
#: matches the name of a checkpoint
IS_CHECKPOINT = _NAME.fullmatch
#: options of [data] that the order of the prompts depends on
_DATA_ORDER = (
    "data_source",
    "input_key",
    "label_key",
    "tool_key",
    "apply_chat_template",
    "apply_chat_template_kwargs",
    "bad_rows",
    "streaming_data",
    "rollout_shuffle",
    "rollout_seed",
)
PROMPT_FILES = "prompt_data"


class PromptFile(TypedDict):
    path: str
    weight: str
    sha256: str


class Model(TypedDict):
    """The model whose weights a checkpoint holds."""

    tensors: str  #: sha256 of the names and shapes of its Hugging Face tensors
    sizes: dict[str, Any]  #: Megatron's terms


def _pairs(value: Any) -> dict[Any, Any]:
    """The dictionary that a JSON list of pairs stands for."""
    try:
        return dict(value)
    except TypeError as error:
        raise ValueError(str(error)) from None


class Checkpoint(BaseModel):
    """A complete checkpoint on disk: what its state.json says, and its folder."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[4]
    rollouts_done: NonNegativeInt
    weight_version: NonNegativeInt
    #: weight version -> rollouts that had been trained on when the engines got it; a list of pairs in the file
    trained_at: Annotated[dict[NonNegativeInt, NonNegativeInt], BeforeValidator(_pairs)]
    data_order: dict[str, Any]
    #: None: saved by a run without --hf-checkpoint
    model: Model | None
    files: Files
    #: of all the rest
    sha256: str
    #: the folder, and what is in plugins.json there
    path: Path
    plugins: dict[str, Any]

    @property
    def place(self) -> Path:
        """Its folder, by the name under which it is found: a killed run may have moved it aside.

        That of a link with another name is where it leads.
        """
        aside = _ASIDE.fullmatch(self.path.name)
        place, target = self.path if aside is None else self.path.with_name(aside[1]), self.path.resolve()
        return target if IS_CHECKPOINT(target.name) and not IS_CHECKPOINT(place.name) else place

    @property
    def trainer_part(self) -> Path:
        """What the trainer ranks wrote."""
        return self.path / TRAINER_PART

    @property
    def rollout_part(self) -> Path:
        """What the rollout process wrote."""
        return self.path / ROLLOUT_PART

    @property
    def config(self) -> RunConfig:
        """The configuration of the run that wrote it. Raises `CheckpointError` or `ConfigError`."""
        return config_from_toml(read_description(self.path / CONFIG), self.path / CONFIG)

    def check_files(self) -> None:
        """Compare every file with its size and hash in state.json; it takes about 0.6 s for a GB and a core.

        Then the content of those that are no tensors is looked at.

        Raises:
            CheckpointError: Files are damaged; the message names them.
        """
        check_files(self.path, self.files)
        check_content(self.path, self.files, self.rollout_part)

    def is_last(self, config: RunConfig) -> bool:
        """Whether nothing is left to train in a run with `config`."""
        return self.rollouts_done >= config.num_rollout


def newest_intact(folders: Iterable[Path], damaged: Callable[[CheckpointError], object]) -> Checkpoint | None:
    """The first of these checkpoints that is intact; `damaged` is called for each damaged one before it."""
    for folder in folders:
        try:
            checkpoint = read_checkpoint(folder)
            checkpoint.check_files()
        except CheckpointError as error:
            damaged(error)
        else:
            return checkpoint
    return None


def checkpoints_in(root: Path) -> list[Path]:
    """The checkpoints of a `--save` folder, newest first."""
    try:
        names = [path.name for path in root.iterdir()]
    except OSError:
        return []
    complete = {name for name in names if _NAME.fullmatch(name)}
    aside = {match[1] for name in names if (match := _ASIDE.fullmatch(name))}
    return [root / name for name in sorted(complete | aside, key=number_of, reverse=True)]


def number_of(name: str) -> int:
    """The number in the name of a checkpoint."""
    return int(name.removeprefix("rollout_"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the description of a checkpoint; its other files are not looked at.

    Args:
        folder: A checkpoint, or a `--save` folder whose `latest` names one.

    Raises:
        CheckpointError: There is none, it is incomplete, or it has another format.
    """
    try:
        path = _find(folder)
        state = read_json_object(path / STATE)
        _check_origin(path, state)
        plugins = read_json_object(path / PLUGINS)
        return _described(path / STATE, {**state, "path": path, "plugins": plugins})
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error.strerror}") from error


def _find(folder: Path) -> Path:
    """The checkpoint that `folder` is, or that its `latest` names."""
    path = standing(folder)
    if path is not None:
        return path
    pointer = folder / LATEST
    if not pointer.exists():
        saved = [path.name for path in checkpoints_in(folder)]
        raise CheckpointError(
            f"no checkpoint in {folder}: expected `{LATEST}` or `{STATE}` there."
            + (
                f" Folders found: {', '.join(reversed(saved))}; name one of them."
                if saved
                else (" Was it written by --save?" if folder.is_dir() else " It is no folder.")
            )
        )
    name = read_description(pointer).strip()
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{pointer} is damaged: got {name[:80]!r}, expected the name of a checkpoint beside it.")
    path = standing(folder / name)
    if path is None:
        raise CheckpointError(f"{pointer} names {name}, which is not there or has no {STATE}.")
    return path


def standing(path: Path) -> Path | None:
    """The checkpoint `path`, or the one of this name that a killed run had moved aside; None if there is neither."""
    for place in (path, path.with_name(f".{path.name}.replaced") if path.name else path):
        if (place / STATE).exists():
            return place
    return None


def _check_origin(path: Path, state: dict[str, Any]) -> None:
    """Check that this slime wrote state.json, and that it was not changed since."""
    version, own = state.get("format"), state.get("sha256")
    if version != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {version!r}; this slime reads format {FORMAT}. Continue with the slime that"
            " wrote it, or start a new run from the model that it exports with --save-hf."
        )
    if own != digest_of_json({name: value for name, value in state.items() if name != "sha256"}):
        raise CheckpointError(f"{path / STATE} is damaged: it was changed after it was saved (its own sha256 differs).")


def _described(path: Path, content: dict[str, Any]) -> Checkpoint:
    """The checkpoint that state.json describes, whose hash somebody else may have made."""
    try:
        checkpoint = Checkpoint.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {_first_problem(error)}") from error
    try:
        TypeAdapter(list[PromptFile]).validate_python(checkpoint.data_order.get(PROMPT_FILES, []), strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: data_order.{PROMPT_FILES}: {_first_problem(error)}") from error
    named = _NAME.fullmatch(checkpoint.place.name)
    if named is not None and int(named[1]) != checkpoint.rollouts_done:
        raise CheckpointError(
            f"{path.parent} is another checkpoint: it was saved after {checkpoint.rollouts_done} rollouts, and its name"
            f" says {int(named[1])}. Give it its own name, in a folder of its own, and continue from it with --load."
        )
    if not {PLUGINS, CONFIG} <= checkpoint.files.keys():
        raise CheckpointError(f"{path} is damaged: it does not describe a checkpoint.")
    for name in checkpoint.files:
        if "\0" in name or ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise CheckpointError(f"{path} is damaged: it lists {name!r}, which is no file of the checkpoint.")
    return checkpoint


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)


# --- what a checkpoint says of the run that wrote it ------------------------------------------------


def describe_model(model: Architecture) -> Model:
    """What a checkpoint says of its model, whether or not its layers for multi-token prediction are trained."""
    further = model.predicting.rules if model.predicts and model.predicting is not None else ()
    own = model.rules[: len(model.rules) - len(further)]
    shapes = {name: list(shape) for rule in own for name, shape in rule.hf.items()}
    sizes = {"family": model.family, **model.transformer, **model.gpt}
    return {"tensors": digest_of_json(shapes), "sizes": json.loads(json.dumps(sizes))}


def data_order(config: RunConfig) -> dict[str, Any]:
    """Everything that determines the order of the prompts, as JSON values.

    These are settings, the content of the prompt files (see `slime.kit.readers.prompt_source`) and the data source's
    options.

    Raises:
        DataError: A prompt file cannot be read.
    """
    order = {name: getattr(config.data, name) for name in _DATA_ORDER}
    order["n_samples_per_prompt"] = config.rollout.n_samples_per_prompt
    order[PROMPT_FILES] = [
        {"path": str(source), "weight": str(source.weight), "sha256": content_digest(source)}
        for source in parse_sources(config.data.prompt_data)
    ]
    # As text, because `5` in a run file and the word "5" after a flag set the same value.
    options = config.component_options.get("datasource", {})
    order |= {f"datasource.{k}": v if isinstance(v, str) else json.dumps(v) for k, v in redacted(options).items()}
    return order


# --- checkpoints that Megatron-LM saved -------------------------------------------------------------

#: names the newest iteration in a --save folder of Megatron-LM
_NEWEST = "latest_checkpointed_iteration.txt"
#: what a folder of tensors says about itself
_TENSORS = "metadata.json"
_KIND = "torch_dist"


def initial_part(folder: Path) -> Path:
    """The folder with the tensors of a checkpoint, slime's or Megatron-LM's, as a new run reads its first weights.

    Raises:
        CheckpointError: There is none.
    """
    return megatron_part(folder) or read_checkpoint(folder).trainer_part


def megatron_part(folder: Path) -> Path | None:
    """The folder with the tensors of a checkpoint of Megatron-LM; None if this is not one.

    Args:
        folder: A --save folder of Megatron-LM, or the folder of one iteration.

    Raises:
        CheckpointError: It is in another format than torch_dist, or its newest iteration is not there.
    """
    part = folder
    if (folder / _NEWEST).is_file():
        newest = read_description(folder / _NEWEST).strip()
        if newest != "release" and not (newest.isascii() and newest.isdigit()):
            raise CheckpointError(
                f"{folder / _NEWEST} is damaged: got {newest[:80]!r}, expected `release` or the number of an iteration"
            )
        part = folder / (newest if newest == "release" else f"iter_{int(newest):07d}")
        if not part.is_dir():
            raise CheckpointError(f"{folder / _NEWEST} names {part.name}, which is not there")
    if (part / _TENSORS).is_file():
        found = read_json_object(part / _TENSORS).get("sharded_backend")
        if found == _KIND:
            return part
        raise _other_format(part, found)
    if part != folder or any(part.glob("mp_rank_*")):
        raise _other_format(part, "torch")
    return None


def _other_format(part: Path, found: object) -> CheckpointError:
    return CheckpointError(
        f"{part} is a checkpoint of Megatron-LM in the format {found!r}, expected {_KIND!r}. Save it again there with"
        f" --ckpt-convert-format {_KIND}, or convert it to a Hugging Face folder for --hf-checkpoint"
    )
