"""Checkpoint folders: `ROOT/rollout_000010/`, complete or absent, and `ROOT/latest` naming the newest.

    megatron/      model, optimizer, scheduler, random states (written by the trainer ranks)
    rollout/       data source, replay buffer, prompts in flight (written by the rollout process)
    state.json     rollouts done, weight versions, what the data order depends on
    config.toml    the resolved run configuration
    plugins.json   the plugins the run used

A checkpoint is written under a temporary name and renamed when every part is on disk, so that a crash while saving
leaves the previous one untouched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config import RunConfig, config_from_toml
from slime.errors import CheckpointError, ConfigError
from slime.kit.readers.prompt_source import content_digest, parse_sources
from slime.redaction import redacted

FORMAT = 3
TRAINER_PART = "megatron"
ROLLOUT_PART = "rollout"
_STATE, _GROUPS = "state.json", "groups.jsonl"
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
_PROMPT_FILES = "prompt_data"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    rollouts_done: int
    weight_version: int
    #: weight version -> rollouts that had been trained on when the engines got it
    trained_at: dict[int, int]
    plugins: dict[str, Any]
    data_order: dict[str, Any]

    @property
    def trainer_part(self) -> Path:
        """What the trainer ranks wrote."""
        return self.path / TRAINER_PART

    @property
    def rollout_part(self) -> Path:
        """What the rollout process wrote."""
        return self.path / ROLLOUT_PART

    def require_continuable(self, config: RunConfig) -> None:
        """Check that a run with `config` can continue from here, with the prompts that come next in the saved run.

        Prompt files are compared by content; they may have moved.

        Raises:
            CheckpointError: The order of the prompts differs.
            ConfigError: Every rollout is done already.
            DataError: A prompt file cannot be read.
        """
        different = list(_differences(self.data_order, data_order(config)))
        if different:
            raise CheckpointError(
                f"{self.path} was saved by a run with another data order, so its position in the data means nothing"
                f" here: {'; '.join(different)}. Use the saved values, or start a new run from its weights with"
                " --initial-megatron-checkpoint."
            )
        if self.rollouts_done >= config.num_rollout:
            raise ConfigError(
                f"{self.path} was saved after {self.rollouts_done} rollouts and --num-rollout is {config.num_rollout}:"
                " nothing is left to do. Raise --num-rollout, the total number of rollouts."
            )

    def other_reference(self, config: RunConfig) -> str | None:
        """A warning if the KL reference of `config` differs from the saved run's, otherwise None.

        A reference saved in the checkpoint itself (an updated one) is used whatever `config` says.
        """
        algorithm = config.algorithm
        if not (algorithm.use_kl_loss or algorithm.kl_coef) or (self.trainer_part / "reference").is_dir():
            return None
        saved = config_from_toml((self.path / "config.toml").read_text(encoding="utf-8"))
        was, now = (one.checkpoint.ref_load or one.checkpoint.hf_checkpoint for one in (saved, config))
        if was == now:
            return None
        return (
            f"{self.path} was saved by a run whose KL reference has the weights of {was}; in this run it has those of"
            f" {now} (--ref-load, else --hf-checkpoint)"
        )


def require_own_folder(config: RunConfig) -> None:
    """Check that the folder of `--save` holds no checkpoints of another run.

    New checkpoints would reset `latest` and replace those with the same number.

    Raises:
        ConfigError: It holds checkpoints of a run that `config` does not continue.
    """
    if config.checkpoint.save is None:
        return
    root = Path(config.checkpoint.save)
    saved = sorted(root.glob("rollout_*"))
    load = config.checkpoint.load
    if not saved or (load is not None and Path(load).resolve() in (root.resolve(), *(one.resolve() for one in saved))):
        return
    raise ConfigError(
        f"--save {root} holds checkpoints of another run, up to {saved[-1].name}. Continue that run with --load {root},"
        " or choose another folder."
    )


def data_order(config: RunConfig) -> dict[str, Any]:
    """Everything that determines the order of the prompts, as JSON values.

    These are settings, the content of the prompt files (see `slime.kit.readers.prompt_source`) and the data source's
    options.

    Raises:
        DataError: A prompt file cannot be read.
    """
    order = {name: getattr(config.data, name) for name in _DATA_ORDER}
    order["n_samples_per_prompt"] = config.rollout.n_samples_per_prompt
    order[_PROMPT_FILES] = [
        {"path": str(source), "weight": str(source.weight), "sha256": content_digest(source)}
        for source in parse_sources(config.data.prompt_data)
    ]
    # As text, because `5` in a run file and the word "5" after a flag set the same value.
    options = config.component_options.get("datasource", {})
    order |= {f"datasource.{k}": v if isinstance(v, str) else json.dumps(v) for k, v in redacted(options).items()}
    return order


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One message for each part of the data order that differs."""
    for name in dict.fromkeys((*saved, *now)):
        was, is_now = saved.get(name), now.get(name)
        if name == _PROMPT_FILES and len(was or ()) == len(is_now or ()):
            yield from _different_files(was or (), is_now or ())
        elif was != is_now:
            yield f"--{name.replace('_', '-')}: was {was!r}, is {is_now!r}"


def _different_files(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """One message for each prompt file with other rows or another weight."""
    for was, is_now in zip(before, after, strict=True):
        if was["sha256"] != is_now["sha256"]:
            yield (
                f"--prompt-data: the content of {is_now['path']} differs from that of {was['path']} when the run began"
                f" (sha256 {is_now['sha256'][:12]}, was {was['sha256'][:12]})"
            )
        elif was["weight"] != is_now["weight"]:
            yield f"--prompt-data: {is_now['path']} has another weight: was {was['weight']}, is {is_now['weight']}"


class CheckpointWriter:
    """Writes checkpoints to the folder of `--save`."""

    def __init__(self, root: Path, config: RunConfig, plugins: dict[str, Any]) -> None:
        """Read the prompt files, whose content is saved as a digest. Raises `DataError` if one cannot be read."""
        self._root = root
        self._config = config
        self._plugins = plugins
        self._data_order = data_order(config)

    def begin(self, rollouts_done: int) -> Path:
        """Make a temporary folder for the parts of trainer ranks and rollout process. Raises `CheckpointError`."""
        temporary = self._root / f".rollout_{rollouts_done:06d}.partial"
        with _writing(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / TRAINER_PART).mkdir(parents=True)
        return temporary

    def commit(
        self, temporary: Path, *, rollouts_done: int, weight_version: int, trained_at: Mapping[int, int]
    ) -> Path:
        """Complete the checkpoint, rename the folder to its final name and point `latest` at it.

        Args:
            temporary: The folder that `begin` made, with both parts in it.
            rollouts_done: How many rollouts have been trained on.
            weight_version: The engines' current weight version.
            trained_at: Weight version -> rollouts that had been trained on when the engines got it.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: It cannot be written; `latest` still names the previous checkpoint.
        """
        state = {
            "format": FORMAT,
            "rollouts_done": rollouts_done,
            "weight_version": weight_version,
            "trained_at": list(trained_at.items()),
            "data_order": self._data_order,
        }
        final = self._root / f"rollout_{rollouts_done:06d}"
        with _writing(final):
            _write(temporary / _STATE, [json.dumps(state, indent=1)])
            _write(temporary / "plugins.json", [json.dumps(self._plugins, indent=1)])
            _write(temporary / "config.toml", [self._config.to_toml()])
            # `latest` may name a checkpoint of this number. It is moved first, because deleting it takes time.
            replaced = self._root / f".{final.name}.replaced"
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():
                final.rename(replaced)
            try:
                temporary.rename(final)
            except OSError:
                if replaced.exists():
                    replaced.rename(final)
                raise
            pointer = self._root / ".latest.partial"
            _write(pointer, [final.name, "\n"])
            pointer.replace(self._root / "latest")
            shutil.rmtree(replaced, ignore_errors=True)
        return final


@contextmanager
def _writing(checkpoint: Path) -> Iterator[None]:
    """Report errors of the disk with the checkpoint's name, and not as a bug."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint {checkpoint} could not be written: {error}") from error


def _write(path: Path, parts: Iterable[str]) -> None:
    """Write a file and flush it to disk, so that a checkpoint only becomes visible when its bytes are there."""
    with path.open("w", encoding="utf-8") as handle:
        handle.writelines(parts)
        handle.flush()
        os.fsync(handle.fileno())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the description of a checkpoint.

    Args:
        folder: A checkpoint, or a `--save` folder whose `latest` names one.

    Raises:
        CheckpointError: There is none, it is incomplete, or it has another format.
    """
    path = folder
    if not (folder / _STATE).is_file():
        pointer = folder / "latest"
        if not pointer.is_file():
            saved = sorted(p.name for p in folder.glob("rollout_*")) if folder.is_dir() else []
            raise CheckpointError(
                f"no checkpoint in {folder}: expected `latest` or `state.json` there. "
                + (f"Folders found: {', '.join(saved)}; name one of them." if saved else "Was it written by --save?")
            )
        path = folder / pointer.read_text(encoding="utf-8").strip()
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        plugins = json.loads((path / "plugins.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {state.get('format')!r}; this slime reads format {FORMAT}. Continue with the"
            " slime that wrote it, or start a new run from the model that it exports with --save-hf."
        )
    return Checkpoint(
        path=path,
        rollouts_done=state["rollouts_done"],
        weight_version=state["weight_version"],
        trained_at=dict(state["trained_at"]),
        plugins=plugins,
        data_order=state["data_order"],
    )


# --- the rollout part: state.json with the data source's state and counts, groups.jsonl with one line a group -----


def write_rollout_part(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state that `slime.rollout.manager.RolloutManager.state` returns.

    The standard library's JSON reads back exactly what it wrote: floats to the last bit, NaN and lone surrogates.

    Raises:
        CheckpointError: The disk is full, for example, or a group's metadata is not JSON.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _GROUPS, map(_line, state["groups"]))
        rest = {name: value for name, value in state.items() if name != "groups"}
        _write(folder / _STATE, [json.dumps(rest, indent=1)])


def read_rollout_part(folder: Path) -> dict[str, Any]:
    """The state that `write_rollout_part` wrote. Raises `CheckpointError` if it is incomplete."""
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="ascii"))
        with (folder / _GROUPS).open(encoding="ascii") as handle:
            state["groups"] = [json.loads(line) for line in handle]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {error}") from error
    return state


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"group {row['index']} cannot be saved: {error}. What data sources and generators put on a sample"
            " (metadata, multimodal_inputs, train_metadata) must be JSON, so that a group in progress can be saved."
        ) from error
