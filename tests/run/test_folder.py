"""Checkpoint folders are complete or absent."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.cli.checkpoint_choice import other_reference, require_continuable
from slime.cli.run_folders import require_export_folder, require_own_folder
from slime.config import RunConfig, load_config
from slime.errors import CheckpointError, ConfigError, DataError
from slime.run.checkpoint.read import Checkpoint, read_checkpoint
from slime.run.checkpoint.save import CheckpointWriter

Config = Callable[..., RunConfig]
Saved = Callable[..., Path]


@pytest.fixture
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n')
    return path


@pytest.fixture
def config(prompts: Path) -> Config:
    """The configuration of a run on `prompts`, with more words."""
    flags = ["--num-rollout", "4", "--rollout-batch-size", "2", "--hf-checkpoint", "m", "--loss-type", "sft_loss"]
    flags += ["--prompt-data", str(prompts), "--lr", "1e-4"]
    return lambda *words: load_config([*flags, *words])


def commit(writer: CheckpointWriter, temporary: Path, rollouts_done: int) -> Path:
    version = rollouts_done + 1
    return writer.commit(
        temporary, {}, rollouts_done=rollouts_done, weight_version=version, trained_at={1: 0, version: rollouts_done}
    )


@pytest.fixture
def saved(config: Config) -> Saved:
    """A function that saves a checkpoint in a folder."""

    def save(root: Path, rollouts_done: int, *words: str) -> Path:
        writer = CheckpointWriter(root, config(*words), {"plugins": []})
        temporary = writer.begin(rollouts_done)
        (temporary / "megatron" / "weights").write_text(f"after {rollouts_done}")
        path = commit(writer, temporary, rollouts_done)
        writer.close()
        return path

    return save


def test_latest_names_the_newest_checkpoint_which_reads_back_as_it_was_written(saved: Saved, tmp_path: Path) -> None:
    saved(tmp_path, 2)
    saved(tmp_path, 4)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path / "rollout_000004"
    assert (checkpoint.rollouts_done, checkpoint.weight_version, checkpoint.trained_at) == (4, 5, {1: 0, 5: 4})
    assert (checkpoint.trainer_part / "weights").read_text() == "after 4"


def test_an_older_checkpoint_can_be_chosen_by_its_folder(saved: Saved, tmp_path: Path) -> None:
    saved(tmp_path, 2)
    saved(tmp_path, 4)
    assert read_checkpoint(tmp_path / "rollout_000002").rollouts_done == 2


def test_a_replaced_checkpoint_is_put_back_if_the_new_one_cannot_take_its_name(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 4)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="the disk is full"):
        saved(tmp_path, 4)
    assert read_checkpoint(tmp_path).rollouts_done == 4


def test_a_folder_without_a_checkpoint_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected `latest` or `state.json`"):
        read_checkpoint(tmp_path)


def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(saved: Saved, tmp_path: Path) -> None:
    path = saved(tmp_path, 2) / "state.json"
    path.write_text(path.read_text().replace('"format": 4', '"format": 1'))
    with pytest.raises(CheckpointError, match=r"has format 1; this slime reads format 4\. .* --save-hf"):
        read_checkpoint(tmp_path)


def test_another_data_order_is_refused_with_both_values(saved: Saved, config: Config, tmp_path: Path) -> None:
    checkpoint: Checkpoint = read_checkpoint(saved(tmp_path, 2))
    require_continuable(checkpoint, config())
    with pytest.raises(CheckpointError, match=r"--rollout-seed: was 42, is 7"):
        require_continuable(checkpoint, config("--rollout-seed", "7"))


def test_a_prompt_file_may_move(saved: Saved, config: Config, prompts: Path, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(saved(tmp_path, 2))
    moved = prompts.rename(prompts.with_name("moved.jsonl"))
    require_continuable(checkpoint, config("--prompt-data", str(moved)))


def test_a_prompt_file_that_was_edited_is_refused_even_with_the_same_number_of_rows(
    saved: Saved, config: Config, prompts: Path, tmp_path: Path
) -> None:
    checkpoint = read_checkpoint(saved(tmp_path, 2))
    prompts.write_text(prompts.read_text().replace("1+1=", "1+2="))
    with pytest.raises(
        CheckpointError, match=r"--prompt-data: the content of (\S+) differs from that of \1 .* \(sha256 \w{12}, was"
    ):
        require_continuable(checkpoint, config())


def test_the_saved_digest_is_that_of_the_content_when_the_run_began(
    config: Config, prompts: Path, tmp_path: Path
) -> None:
    writer = CheckpointWriter(tmp_path, config(), {"plugins": []})
    prompts.write_text('{"prompt": "other", "label": "2"}\n')
    path = commit(writer, writer.begin(2), 2)
    with pytest.raises(CheckpointError, match="--prompt-data"):
        require_continuable(read_checkpoint(path), config())


def test_a_missing_prompt_file_is_named(saved: Saved, config: Config, prompts: Path, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(saved(tmp_path, 2))
    prompts.unlink()
    with pytest.raises(DataError, match=r"--prompt-data \S+prompts\.jsonl cannot be read: No such file"):
        require_continuable(checkpoint, config())


def test_other_options_of_the_data_source_are_refused_from_flags_and_run_files_alike(
    saved: Saved, config: Config, tmp_path: Path
) -> None:
    checkpoint = read_checkpoint(saved(tmp_path, 2, "--data-source.min-level", "5"))
    same = config().model_copy(update={"component_options": {"datasource": {"min_level": 5}}})  # as from a run file
    require_continuable(checkpoint, same)
    with pytest.raises(CheckpointError, match=r"--datasource\.min-level: was '5', is '6'"):
        require_continuable(checkpoint, config("--data-source.min-level", "6"))
    with pytest.raises(CheckpointError, match=r"--datasource\.min-level: was '5', is None"):
        require_continuable(checkpoint, config())


def test_a_failed_checkpoint_is_named_and_the_previous_one_stays_the_newest(
    saved: Saved, config: Config, tmp_path: Path
) -> None:
    saved(tmp_path, 2)
    writer = CheckpointWriter(tmp_path, config(), {"plugins": []})
    temporary = writer.begin(4)
    (temporary / "state.json").mkdir()  # so that the file cannot be written
    with pytest.raises(CheckpointError, match=r"rollout_000004 could not be written: .*state\.json"):
        commit(writer, temporary, 4)
    assert read_checkpoint(tmp_path).path == tmp_path / "rollout_000002"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"rollout_000004\.partial could not be written"):
        CheckpointWriter(tmp_path / "file", config(), {"plugins": []}).begin(4)


def test_a_different_reference_model_is_reported_unless_the_checkpoint_has_the_reference(
    prompts: Path, tmp_path: Path
) -> None:
    flags = "--num-rollout 4 --rollout-batch-size 2 --advantage-estimator e --reward r --lr 1e-4"
    kl = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--prompt-data", str(prompts)]

    def run(*words: str) -> RunConfig:
        return load_config([*flags.split(), *kl, *words])

    writer = CheckpointWriter(tmp_path, run("--hf-checkpoint", "m", "--ref-load", "before"), {"plugins": []})
    checkpoint = read_checkpoint(commit(writer, writer.begin(1), 1))
    assert other_reference(checkpoint, run("--hf-checkpoint", "m", "--ref-load", "before")) is None
    warning = other_reference(checkpoint, run("--hf-checkpoint", "m"))
    assert warning is not None and "has the weights of before; in this run it has those of m (--ref-load" in warning
    assert other_reference(checkpoint, run("--hf-checkpoint", "m", "--kl-loss-coef", "0", "--no-use-kl-loss")) is None
    (checkpoint.trainer_part / "reference").mkdir()
    assert other_reference(checkpoint, run("--hf-checkpoint", "m")) is None


def test_a_new_run_does_not_save_to_the_folder_of_another_run(saved: Saved, config: Config, tmp_path: Path) -> None:
    require_own_folder(config("--save", str(tmp_path)), tmp_path / "run")
    path = saved(tmp_path, 2)
    require_own_folder(config("--save", str(tmp_path), "--load", str(tmp_path)), tmp_path / "run")
    require_own_folder(config("--save", str(tmp_path), "--load", str(path)), tmp_path / "run")
    require_own_folder(config("--save", str(tmp_path / "other"), "--load", str(path)), tmp_path / "run")
    message = r"holds checkpoints of another run, up to rollout_000002\. Continue that run with --load"
    with pytest.raises(ConfigError, match=message):
        require_own_folder(config("--save", str(tmp_path)), tmp_path / "run")
    other = saved(tmp_path / "other", 4)
    with pytest.raises(ConfigError, match=message):
        require_own_folder(config("--save", str(tmp_path), "--load", str(other)), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.toml", r"is the folder of another run \(it has config\.toml\)"),
        ("state.json", "is a checkpoint"),
        ("config.json", "is a model folder"),
    ],
)
def test_checkpoints_do_not_go_into_a_folder_of_something_else(
    config: Config, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        require_own_folder(config("--save", str(tmp_path)), tmp_path / "run")
    if name == "config.toml":  # its own folder, when the run is continued
        require_own_folder(config("--save", str(tmp_path)), tmp_path)


@pytest.mark.parametrize("spelling", ["same", "relative", "link", "inside", "around", "reference"])
def test_an_export_does_not_replace_a_model_that_the_run_reads(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    model, elsewhere = tmp_path / "models" / "base", tmp_path / "elsewhere"
    for folder in (model, elsewhere):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    (tmp_path / "link").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    save = {
        "same": str(model),
        "relative": "models/../models/base",
        "link": "link",
        "inside": "models/base/trained",
        "around": "models",
        "reference": str(model),
    }[spelling]
    read = ["--ref-load", str(model)] if spelling == "reference" else ["--hf-checkpoint", str(model)]
    with pytest.raises(ConfigError, match=r"--save-hf \S+ (would overwrite|and) --(hf-checkpoint|ref-load)"):
        require_export_folder(config(*read, "--save-hf", save))
    require_export_folder(config(*read, "--save-hf", str(elsewhere)))  # an earlier export, for example


def test_an_export_replaces_no_folder_of_something_else(config: Config, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(ConfigError, match="is not empty and holds no model"):
        require_export_folder(config("--save-hf", str(tmp_path / "notes")))
    with pytest.raises(ConfigError, match="is a file"):
        require_export_folder(config("--save-hf", str(tmp_path / "notes" / "mine.txt")))
    require_export_folder(config("--save-hf", str(tmp_path / "{rollout}")))


def test_exports_of_intervals_replace_no_model(config: Config, tmp_path: Path) -> None:
    words = ("--save-hf", str(tmp_path / "step-{rollout}"), "--save-interval", "2", "--num-rollout", "5")
    for done in (1, 2, 4, 5, 6):
        (tmp_path / f"step-{done}").mkdir()
        (tmp_path / f"step-{done}" / "config.json").touch()
        if done in (2, 4, 5):
            with pytest.raises(ConfigError, match=rf"step-{done} holds a model already, and this run would replace it"):
                require_export_folder(config(*words))
            require_export_folder(config(*words, "--load", "saved"))
            with pytest.raises(ConfigError, match="would overwrite --hf-checkpoint"):
                require_export_folder(config(*words, "--hf-checkpoint", str(tmp_path / f"step-{done}")))
            (tmp_path / f"step-{done}" / "config.json").unlink()
        else:
            require_export_folder(config(*words))
