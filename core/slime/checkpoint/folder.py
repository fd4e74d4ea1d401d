"""Checkpoint folders: `ROOT/rollout_000010/`, complete or absent, and `ROOT/latest` naming the newest.

    megatron/      model, optimizer, scheduler, random states (written by the trainer ranks)
    rollout/       data source, replay buffer, prompts in flight (written by the rollout process)
    state.json     rollouts done, weight versions, what the data order depends on
    config.toml    the resolved run configuration
    plugins.json   the plugins the run used

A checkpoint is written under a temporary name and renamed when every part is on disk, so a crash
while saving leaves the one before untouched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config import RunConfig, config_from_toml
from slime.data.content import content_digest
from slime.data.prompt_source import parse_sources
from slime.errors import CheckpointError, ConfigError

FORMAT = 3
TRAINER_PART = "megatron"
ROLLOUT_PART = "rollout"
#: sections and fields the data order depends on; a resumed run must agree on them
_DATA_ORDER = (
    (
        "data",
        (
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
        ),
    ),
    ("rollout", ("n_samples_per_prompt",)),
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
        """Raise `ConfigError` where nothing is left to do, `CheckpointError` where `config` has other prompts."""
        self.require_same_data_order(config)
        if self.rollouts_done >= config.num_rollout:
            raise ConfigError(
                f"{self.path} has {self.rollouts_done} rollouts done and --num-rollout is {config.num_rollout}: nothing"
                " is left to do. Raise --num-rollout, the number of rollouts in all."
            )

    def other_reference(self, config: RunConfig) -> str | None:
        """A warning where KL would be taken to another model's weights than in the saved run; else None.

        A reference that the checkpoint itself holds (a renewed one) is the same whatever is stated.
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

    def require_same_data_order(self, config: RunConfig) -> None:
        """Raise `CheckpointError` when `config` would continue with other prompts than the saved run's.

        Of the prompt files the content counts, not their place.  Raises `DataError` when it cannot be read.
        """
        different = list(_differences(self.data_order, data_order(config)))
        if different:
            raise CheckpointError(
                f"{self.path} was saved by a run with another data order, so its place in the data means nothing here: "
                f"{'; '.join(different)}. Use the saved values, or start a new run from its weights with "
                f"--initial-megatron-checkpoint."
            )


def data_order(config: RunConfig) -> dict[str, Any]:
    """What decides which prompt comes when, JSON-ready: settings, the prompt files' content, the data source's options.

    Reads the prompt files: see `slime.data.content`.  Raises `DataError` when one cannot be read.
    """
    order = {name: getattr(getattr(config, section), name) for section, names in _DATA_ORDER for name in names}
    order[_PROMPT_FILES] = [
        {"path": str(source), "weight": str(source.weight), "sha256": content_digest(source)}
        for source in parse_sources(config.data.prompt_data)
    ]
    # As on a command line: `5` in a run file and the word "5" after a flag are the same option.
    options = config.component_options.get("datasource", {})
    order |= {f"datasource.{k}": v if isinstance(v, str) else json.dumps(v) for k, v in options.items()}
    return order


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each part of the data order that is another now."""
    for name in dict.fromkeys((*saved, *now)):
        was, is_now = saved.get(name), now.get(name)
        if name == _PROMPT_FILES and len(was or ()) == len(is_now or ()):
            yield from _different_files(was or (), is_now or ())
        elif was != is_now:
            yield f"--{name.replace('_', '-')}: was {was!r}, is {is_now!r}"


def _different_files(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """One sentence for each prompt file with other rows or another weight."""
    for was, is_now in zip(before, after, strict=True):
        if was["sha256"] != is_now["sha256"]:
            yield (
                f"--prompt-data: {is_now['path']} does not hold what {was['path']} held then (sha256"
                f" {is_now['sha256'][:12]}, was {was['sha256'][:12]})"
            )
        elif was["weight"] != is_now["weight"]:
            yield f"--prompt-data: {is_now['path']} has another weight: was {was['weight']}, is {is_now['weight']}"


class CheckpointWriter:
    """Saves under `--save`."""

    def __init__(self, root: Path, config: RunConfig, plugins: dict[str, Any]) -> None:
        """Reads the prompt files once, to know them again.  Raises `DataError` when it cannot be read."""
        self._root = root
        self._config = config
        self._plugins = plugins
        self._data_order = data_order(config)

    def begin(self, rollouts_done: int) -> Path:
        """A temporary folder for the parts of trainer ranks and rollout process.  Raises `CheckpointError`."""
        temporary = self._root / f".rollout_{rollouts_done:06d}.partial"
        with _writing(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / TRAINER_PART).mkdir(parents=True)
        return temporary

    def commit(
        self, temporary: Path, *, rollouts_done: int, weight_version: int, trained_at: Mapping[int, int]
    ) -> Path:
        """Add the kernel's part, make the checkpoint visible under its name and point `latest` at it.

        Raises `CheckpointError`; `latest` then names the checkpoint before.
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
            _write(temporary / "state.json", json.dumps(state, indent=1))
            _write(temporary / "plugins.json", json.dumps(self._plugins, indent=1))
            _write(temporary / "config.toml", self._config.to_toml())
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            pointer = self._root / ".latest.partial"
            _write(pointer, final.name + "\n")
            pointer.replace(self._root / "latest")
        return final


@contextmanager
def _writing(checkpoint: Path) -> Iterator[None]:
    """What the disk refuses is told with the checkpoint's name, not as a bug."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint {checkpoint} could not be written: {error}") from error


def _write(path: Path, text: str) -> None:
    """Write and flush to disk: a checkpoint must not become visible before its bytes are."""
    with path.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint at `folder`: itself a checkpoint, or a `--save` folder whose `latest` names one.

    Raises `CheckpointError` when there is none, it is incomplete, or of another format.
    """
    path = folder
    if not (folder / "state.json").is_file():
        pointer = folder / "latest"
        if not pointer.is_file():
            saved = sorted(p.name for p in folder.glob("rollout_*")) if folder.is_dir() else []
            raise CheckpointError(
                f"no checkpoint in {folder}: expected `latest` or `state.json` there. "
                + (f"Folders found: {', '.join(saved)}; name one of them." if saved else "Was it written by --save?")
            )
        path = folder / pointer.read_text(encoding="utf-8").strip()
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
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
