"""A checkpoint of somebody else: its configuration runs no code, and its damage is reported before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Loop, Slime
from tests.support.hostile_checkpoints import ATTACKS

from slime.config import load_config
from slime.registry.plugin_set import load_plugins
from slime.run.checkpoint.save import CheckpointWriter

#: what a checkpoint's configuration may not decide on its own -> flags of the run that saved it
DANGEROUS = {
    "custom_rm_path": ["--custom-rm-path", "{code}:reward"],
    "custom_generate_function_path": ["--custom-generate-function-path", "{code}:generate"],
    "ray_address": ["--ray-address", "127.0.0.1:1"],
    "trust_remote_code": ["--trust-remote-code"],
    "custom_weight_loader": ["--sglang-custom-weight-loader", "package.module.function"],
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A Python file that leaves a trace when it is imported."""
    path = tmp_path / "theirs.py"
    path.write_text(
        f"open({str(tmp_path / 'canary')!r}, 'w').close()\n"
        "def reward(sample): return 1.0\n"
        "async def generate(args, sample, sampling_params): return sample\n"
    )
    return path


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path, base_words: Sequence[str], prompts: Path) -> Save:
    """A function that saves a checkpoint of a run with more flags, as its folder of checkpoints."""

    def saved(*words: str, rollouts_done: int = 2) -> Path:
        own = [*base_words, "--eval-prompt-data", "own", str(prompts), "--eval-interval", "1"]
        plain = load_config(own)
        if "--custom-rm-path" in words:
            at = own.index("--reward")
            del own[at : at + 2]
        config = load_config([*own, *words])
        writer = CheckpointWriter(tmp_path / "saved", config, load_plugins(config.plugins).provenance(plain))
        temporary = writer.begin(rollouts_done)
        (temporary / "megatron" / "__0_0.distcp").write_bytes(b"weights")
        writer.commit(temporary, {}, rollouts_done=rollouts_done, weight_version=3, trained_at={3: 2})
        return tmp_path / "saved"

    return saved


@pytest.mark.slow
@pytest.mark.parametrize("setting", DANGEROUS)
def test_settings_that_could_run_code_must_be_repeated(
    slime: Slime,
    loop: Loop,
    save: Save,
    code: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
) -> None:
    asked: list[str] = []

    def ask(_config: object, _models: object, options: Mapping[str, Any]) -> list[str]:
        """In place of SGLang, which would import its loader: finds no problem."""
        asked.extend(options)
        return []

    monkeypatch.setattr("slime.cli.preflight_engine._asked", ask)
    flags = [word.format(code=code) for word in DANGEROUS[setting]]
    folder = save(*flags)
    for more in ([], ["--dry-run"]):
        ended = slime("eval", str(folder), *more)
        assert (ended.code, loop.calls) == (2, [])
        assert f"{setting} = " in ended.err and "repeat them as flags" in ended.err and "Traceback" not in ended.err
    assert not (tmp_path / "canary").exists() and asked == []
    slime("eval", str(folder), "--dry-run", *flags)
    assert asked == ([setting] if setting == "custom_weight_loader" else [])
    assert (tmp_path / "canary").exists() == (str(code) in flags[-1]), "repeated flags are trusted"


def test_a_conversion_runs_none_of_a_checkpoints_functions(
    slime: Slime, loop: Loop, save: Save, code: Path, tmp_path: Path
) -> None:
    folder = save("--custom-rm-path", f"{code}:reward", "--custom-generate-function-path", f"{code}:generate")
    (folder / "rollout_000002" / "megatron" / "adapters.json").touch()
    ended = slime("convert", str(folder), "model", "--run-name", "e")
    assert (ended.code, [name for name, _ in loop.calls]) == (0, ["export"]), ended
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "eval", "convert"])
def test_a_damaged_checkpoint_is_refused_before_anything_starts(
    slime: Slime, loop: Loop, save: Save, base_words: Sequence[str], command: str
) -> None:
    save(rollouts_done=1)
    folder = save(rollouts_done=2)
    (folder / "rollout_000002" / "megatron" / "__0_0.distcp").write_bytes(b"wei")
    ended = {
        "train": lambda: slime("train", *base_words, "--num-rollout", "5", "--load", str(folder), "--dry-run"),
        "eval": lambda: slime("eval", str(folder), "--dry-run"),
        "convert": lambda: slime("convert", str(folder), "model"),
    }[command]()
    assert (ended.code, loop.calls) == (2, []) and "Traceback" not in ended.err
    assert f"{folder}/rollout_000002 is damaged: megatron/__0_0.distcp has 3 bytes, and had 7" in ended.err
    option = {"train": "--load {}", "eval": "slime eval {}", "convert": "slime convert {} DIR"}[command]
    intact = folder / "rollout_000001"
    assert f"The newest intact checkpoint is {intact}: {option.format(intact)}" in ended.err


@pytest.mark.slow
def test_damaged_checkpoints_are_skipped_on_request(
    slime: Slime, loop: Loop, save: Save, base_words: Sequence[str], prompts: Path
) -> None:
    for done in (1, 2, 3):
        folder = save(rollouts_done=done)
    for done in (2, 3):
        (folder / f"rollout_00000{done}" / "megatron" / "__0_0.distcp").write_bytes(b"wei")
    words = [*base_words, "--eval-prompt-data", "own", str(prompts), "--eval-interval", "1", "--num-rollout", "5"]
    words += ["--load", str(folder), "--save", str(folder)]
    refused = slime("train", *words)
    assert refused.code == 2
    assert f"{folder}/rollout_000001: --load {folder}/rollout_000001, or add --skip-damaged-checkpoints" in refused.err
    planned = " ".join(slime("train", *words, "--skip-damaged-checkpoints", "--dry-run").out.split())
    assert f"continue from {folder}/rollout_000001" in planned
    assert (folder / "latest").read_text() == "rollout_000003\n", "a dry run changes nothing"

    ended = slime("train", *words, "--skip-damaged-checkpoints")
    assert ended.code == 0, ended.err
    third, second, used, *_, left = (line for line in ended.err.splitlines() if "rollout_" in line)
    assert "(rollout_000002, rollout_000003): they are moved to a folder abandoned_N" in left
    damage = "is damaged: megatron/__0_0.distcp has 3 bytes, and had 7 when it was saved"
    assert f"note: skipped: checkpoint {folder}/rollout_000003 {damage}" in third
    assert f"note: skipped: checkpoint {folder}/rollout_000002 {damage}" in second
    assert used.endswith(f"continues from {folder}/rollout_000001: 2 rollouts are lost, and are done again")
    [(_, (config, *_))] = loop.calls
    assert config.checkpoint.load == f"{folder}/rollout_000001"
    assert (folder / "latest").read_text() == "rollout_000001\n", "it would name a damaged one until the next save"
    assert sorted(path.name for path in (folder / "abandoned_1").iterdir()) == ["rollout_000002", "rollout_000003"]
    assert slime("train", *words, "--run-name", "c").code == 0, "`latest` names an intact one now"


def test_a_damaged_checkpoint_of_another_runs_folder_is_skipped_there_and_nothing_is_changed(
    slime: Slime, loop: Loop, save: Save, base_words: Sequence[str], prompts: Path, tmp_path: Path
) -> None:
    for done in (1, 2):
        folder = save(rollouts_done=done)
    (folder / "rollout_000002" / "config.toml").unlink()
    words = [*base_words, "--eval-prompt-data", "own", str(prompts), "--eval-interval", "1", "--num-rollout", "5"]
    words += ["--load", str(folder), "--save", str(tmp_path / "other"), "--skip-damaged-checkpoints"]
    ended = slime("train", *words)
    assert (ended.code, len(loop.calls)) == (0, 1), ended.err
    assert (folder / "latest").read_text() == "rollout_000002\n"


def test_a_dry_run_unpickles_nothing(dry_run: Slime, save: Save, tmp_path: Path) -> None:
    folder = save()
    # Only the attack that needs no valid checkpoint; the others are in tests/train.
    ATTACKS["in_metadata"](folder / "rollout_000002" / "megatron", tmp_path / "canary")
    ended = dry_run("--load", str(folder), "--num-rollout", "5")
    assert ended.code == 0, ended.err
    assert not (tmp_path / "canary").exists()


def test_a_finished_run_exports_again_without_training(
    slime: Slime, loop: Loop, save: Save, base_words: Sequence[str], prompts: Path
) -> None:
    folder = save()
    words = [*base_words, "--eval-prompt-data", "own", str(prompts), "--eval-interval", "1", "--load", str(folder)]
    ended = slime("train", *words)
    assert ended.code == 2 and "nothing is left to do" in ended.err and "--save-hf" in ended.err
    planned = slime("train", *words, "--save-hf", "out/{rollout}", "--dry-run")
    assert f"nothing is left to train: {folder}/rollout_000002 is exported to out/2" in planned.out, planned
    assert loop.calls == []
    ended = slime("train", *words, "--save-hf", "out/{rollout}")
    assert ended.code == 0, ended.err
    [(name, (config, _, _, target))] = loop.calls
    assert (name, target) == ("export", Path("out/2"))
    assert config.checkpoint.initial_megatron_checkpoint == f"{folder}/rollout_000002"
    assert config.algorithm.loss_type == "sft_loss"  # nothing is generated, so no engines
    slime("train", *words, "--save-hf", "out/{rollout}", "--num-rollout", "3")
    assert loop.calls[-1][0] == "train", "one rollout is left to train"
