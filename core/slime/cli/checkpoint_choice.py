"""The checkpoint that a command starts from: which one, whether it may, and what is moved out of its way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.errors import CheckpointError, ConfigError
from slime.plugin.architecture import Architecture
from slime.run.checkpoint.files import (
    LATEST,
    make_folder,
    point_latest,
    read_description,
    sync_folder,
    writing_checkpoint,
)
from slime.run.checkpoint.read import (
    IS_CHECKPOINT,
    PROMPT_FILES,
    Checkpoint,
    checkpoints_in,
    data_order,
    describe_model,
    megatron_part,
    newest_intact,
    number_of,
)
from slime.shops import import_shop


def intact_checkpoint(folder: Path, command: str) -> Checkpoint:
    """Read the description of a checkpoint and compare all of its files with their hashes.

    Args:
        folder: As for `read_checkpoint`.
        command: How a user names a checkpoint here, with braces for its path: `--load {}`.

    Raises:
        CheckpointError: It is missing or damaged; the message names the file, and the newest checkpoint beside it that
            is intact.
    """
    problems: list[CheckpointError] = []
    if (checkpoint := newest_intact([folder], problems.append)) is not None:
        return checkpoint
    message = str(problems[0]).rstrip(".")
    end = "" if message.endswith("?") else "."
    raise CheckpointError(f"{message}{end}{_advice(folder, command)}") from problems[0]


def intact_or_before(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that `folder` is or names, or if it is damaged the newest intact one before it.

    Those after it are not looked at: a run may have been continued from an earlier one on purpose. If `latest` is
    damaged, so that nobody knows which is meant, it is the newest intact one of all.

    Returns:
        The checkpoint, and notes on those that were skipped: what is wrong with each, and what that costs.

    Raises:
        CheckpointError: None is intact; the message names what is wrong with the newest.
    """
    problems: list[CheckpointError] = []
    if (checkpoint := newest_intact([folder], problems.append)) is not None:
        return checkpoint, []
    named = IS_CHECKPOINT(folder.name)
    root = folder if named is None else folder.parent
    if named is None:
        with suppress(CheckpointError):
            named = IS_CHECKPOINT(read_description(root / LATEST).strip())
    candidates = [path for path in checkpoints_in(root) if named is None or number_of(path.name) <= int(named[1])]
    untried = [path for path in candidates if named is None or number_of(path.name) < int(named[1])]
    if (checkpoint := newest_intact(untried, problems.append)) is not None:
        first = int(named[1]) if named is not None else number_of(candidates[0].name)
        lost = first - checkpoint.rollouts_done
        cost = f"{lost} rollouts are lost, and are done again" if lost else "no rollout is lost"
        return checkpoint, [
            *(f"skipped: {problem}" for problem in problems),
            f"the run continues from {checkpoint.place}: {cost}",
        ]
    if len(candidates) < 2:
        raise problems[0]
    message = str(problems[0]).rstrip(".")
    raise CheckpointError(
        f"{message}. None of the {len(candidates)} checkpoints in {root} up to it is intact."
    ) from problems[0]


def _advice(damaged: Path, command: str) -> str:
    """The newest intact checkpoint of the same run, as the end of a message."""
    root = damaged.parent if IS_CHECKPOINT(damaged.name) else damaged
    found = checkpoints_in(root)
    if (checkpoint := newest_intact(found, lambda _: None)) is not None:
        return f" The newest intact checkpoint is {checkpoint.place}: {command.format(checkpoint.place)}"
    return f" None of the {len(found)} checkpoints in {root} is intact." if len(found) > 1 else ""


# --- whether a run may continue from it ---


def require_continuable(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that a run with `config` can continue from a checkpoint, with the prompts that come next in the saved run.

    Prompt files are compared by content; they may have moved.

    Raises:
        CheckpointError: The order of the prompts differs.
        ConfigError: Every rollout is done already.
        DataError: A prompt file cannot be read.
    """
    if checkpoint.rollouts_done == 0 and not checkpoint.rollout_part.is_dir():
        raise CheckpointError(
            f"{checkpoint.path} holds the weights of a model and no run (slime convert --to-megatron wrote it). Start a"
            f" run from them with --initial-megatron-checkpoint {checkpoint.path}"
        )
    different = list(differences(checkpoint.data_order, data_order(config)))
    if different:
        raise CheckpointError(
            f"{checkpoint.path} was saved by a run with another data order, so its position in the data means nothing"
            f" here: {'; '.join(different)}. Use the saved values, or start a new run from its weights with"
            " --initial-megatron-checkpoint."
        )
    if checkpoint.is_last(config):
        raise ConfigError(
            f"{checkpoint.path} was saved after {checkpoint.rollouts_done} rollouts and --num-rollout is"
            f" {config.num_rollout}: nothing is left to do. Raise --num-rollout, the total number of rollouts,"
            " or export the model with --save-hf."
        )


def require_initial(folder: Path, config: RunConfig, model: tuple[Architecture, Path] | None) -> None:
    """Check that a new run can take its first weights from a checkpoint of slime, or of Megatron-LM.

    Args:
        folder: The folder of --initial-megatron-checkpoint.
        config: The run.
        model: What it trains, and the model's folder; None if that is not known.

    Raises:
        CheckpointError: They are damaged, or another model's.
        ConfigError: The run trains adapters.
    """
    flag = "--initial-megatron-checkpoint"
    part = megatron_part(folder)
    if part is None:
        checkpoint = intact_checkpoint(folder, f"{flag} {{}}")
        if model is not None:
            require_model(checkpoint, *model)
        return
    if config.lora.asked:
        raise ConfigError(
            f"{flag} {folder}: a checkpoint of Megatron-LM has no adapters, and a run with --lora-rank reads nothing"
            " else. The weights under them are those of --hf-checkpoint"
        )
    if model is not None:
        import_shop("slime_planner.checkpoint_weights", flag).CheckpointWeights(part, model[0])


def require_model(checkpoint: Checkpoint, model: Architecture, folder: Path) -> None:
    """Check that the weights belong to `model`, whose tensors have the same names and shapes.

    Args:
        checkpoint: Whose weights they are.
        model: The model that the run trains.
        folder: Its folder, for the message.

    Raises:
        CheckpointError: They are another model's; the message lists how the two differ.
    """
    described = describe_model(model)
    if checkpoint.model is None or checkpoint.model["tensors"] == described["tensors"]:
        return
    saved, ours = checkpoint.model["sizes"], described["sizes"]
    different = [
        f"{name} {saved.get(name)!r} / {ours.get(name)!r}"
        for name in sorted({*saved, *ours})
        if saved.get(name) != ours.get(name)
    ]
    raise CheckpointError(
        f"{checkpoint.path} holds the weights of another model than --hf-checkpoint {folder}:"
        f" {', '.join(different) or 'tensors have other names'}. Give the model folder that the saved run started"
        " from."
    )


def other_reference(checkpoint: Checkpoint, config: RunConfig) -> str | None:
    """A warning if the KL reference of `config` differs from the saved run's, otherwise None.

    A reference saved in the checkpoint itself (an updated one) is used whatever `config` says.
    """
    algorithm = config.algorithm
    if not (algorithm.use_kl_loss or algorithm.kl_coef) or (checkpoint.trainer_part / "reference").is_dir():
        return None
    try:
        was, now = (one.checkpoint.ref_load or one.checkpoint.hf_checkpoint for one in (checkpoint.config, config))
    except ConfigError:  # saved by another version of slime
        return None
    if was == now:
        return None
    return (
        f"{checkpoint.path} was saved by a run whose KL reference has the weights of {was}; in this run it has those of"
        f" {now} (--ref-load, else --hf-checkpoint)"
    )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One message for each part of the data order that differs."""
    for name in dict.fromkeys((*saved, *now)):
        was, is_now = saved.get(name), now.get(name)
        if name == PROMPT_FILES and len(was or ()) == len(is_now or ()):
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


# --- what was saved after it ---


def later_checkpoints(config: RunConfig, start: Checkpoint) -> list[Path]:
    """What was saved after `start` in its folder, newest first, if a run with `config` trains on and saves there."""
    save = None if start.is_last(config) else config.checkpoint.save
    for root in (start.place.parent, start.place.resolve().parent):  # --load may name a link
        if save is not None and Path(save).resolve() == root.resolve():
            return [path for path in checkpoints_in(root) if number_of(path.name) > start.rollouts_done]
    return []


def set_aside_later(config: RunConfig, start: Checkpoint) -> Path | None:
    """Move the checkpoints after `start` out of the way, if the run goes on from it and saves beside it.

    They are of a line that the run leaves, or damaged. `latest` names `start` then, so that nothing mixes the two.

    Returns:
        The folder with what was moved; None if nothing was.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    later = later_checkpoints(config, start)
    if not later:
        return None
    root = later[0].parent
    aside = next(folder for n in itertools.count(1) if not (folder := root / f"abandoned_{n}").exists())
    with writing_checkpoint(aside):
        # First, so that a run which is killed now does not go on from one of them.
        point_latest(root, start.place.name)
        make_folder(aside)
        for path in later:
            _move(path, aside)
            _move(path.with_name(f".{path.name}.replaced"), aside)
        sync_folder(aside)
        sync_folder(root)
    return aside


def _move(path: Path, folder: Path) -> None:
    """Move a checkpoint into a folder, if it is there. A link still leads where it did."""
    if path.is_symlink():
        (folder / path.name).symlink_to(path.parent.resolve() / path.readlink())
        path.unlink()
    elif path.exists():
        path.rename(folder / path.name)
