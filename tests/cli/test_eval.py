"""`slime eval` up to the start of processes: its configuration, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Loop, Slime, split

from slime.config import RunConfig, config_from_toml
from slime.config.eval_sets import eval_sets
from slime.config.learning_rate import warmup_and_decay
from slime.run.checkpoint.read import Checkpoint
from slime.run.checkpoint.save import CheckpointWriter

Refused = Callable[..., str]


@pytest.fixture
def words(described_model: Path, prompts: Path) -> list[str]:
    """The arguments of a valid evaluation."""
    sets = ["--eval-prompt-data", "sums", str(prompts), "--n-samples-per-eval-prompt", "4", "--eval-temperature", "1"]
    return [str(described_model), *sets, *split("--reward exact_match --eval-max-response-len 8 --device cpu")]


@pytest.fixture
def refused(slime: Slime) -> Refused:
    """The error of an evaluation that is refused before anything starts."""

    def message(*words: str) -> str:
        ended = slime("eval", *words)
        assert (ended.code, ended.out) == (2, ""), ended
        assert "Traceback" not in ended.err and not Path("outputs").exists()
        return ended.err.removeprefix("slime: error: ")

    return message


@pytest.fixture
def checkpoint(tmp_path: Path, base_words: list[str], prompts: Path) -> Path:
    """A checkpoint folder of a run with these arguments, without weights."""
    from slime.config import load_config

    sets = ["--eval-prompt-data", "own", str(prompts), "--eval-interval", "1", "--save-hf", "hf", "--save", "saved"]
    writer = CheckpointWriter(tmp_path / "saved", load_config([*base_words, *sets]), {})
    writer.commit(writer.begin(2), {}, rollouts_done=2, weight_version=3, trained_at={3: 2})
    return tmp_path / "saved"


def test_a_dry_run_prints_what_would_be_evaluated(slime: Slime, words: list[str], described_model: Path) -> None:
    ended = slime("eval", *words, "--dry-run")
    assert (ended.code, ended.err) == (0, "")
    assert f"weights      {described_model}\n" in ended.out
    assert "sums: 4 responses a prompt at temperature 1, at most 8 tokens; pass@1, pass@2, pass@4 with reward 1" in (
        ended.out
    )
    assert "3 rows" in ended.out and "rewards/exact_match" in ended.out
    assert not Path("outputs").exists()


def test_engines_of_a_colocated_run_need_their_gpus_although_nothing_trains(
    refused: Refused, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("preflight", "preflight_machine"):
        monkeypatch.setattr(f"slime.cli.{module}.nvidia_devices", lambda: 1)
    words = [*words[: words.index("--device")], *split("--device cuda --colocate --rollout-num-gpus 2")]
    assert "the run needs 2 GPUs (2 engines x 1), and this machine has 1" in refused(*words)


def test_a_model_folder_is_evaluated_without_training_options(
    slime: Slime, words: list[str], loop: Loop, described_model: Path
) -> None:
    assert slime("eval", *words, "--run-name", "e").code == 0
    [(_, (config, run_dir, _plugins, checkpoint, _exporting))] = loop.calls
    assert (config.checkpoint.hf_checkpoint, checkpoint) == (str(described_model), None)
    assert (config.data.prompt_data, config.rollout.rollout_batch_size) == (RunConfig().data.prompt_data, None)
    assert run_dir == Path("outputs/e")
    assert eval_sets(config_from_toml((run_dir / "config.toml").read_text())) == eval_sets(config)


def test_ranks_that_write_a_model_have_no_schedule_that_could_contradict_their_only_step(
    slime: Slime, loop: Loop, checkpoint: Path
) -> None:
    schedule = split("--lr-warmup-iters 20 --lr-decay-iters 30 --lr-decay-style linear")
    assert slime("eval", str(checkpoint), *schedule, "--run-name", "e").code == 0
    [(_, (_config, _run_dir, _plugins, _saved, exporting))] = loop.calls
    assert warmup_and_decay(exporting) == (0, 1) and "lr_decay_style" not in exporting.megatron


def test_flags_override_the_options_saved_in_a_checkpoint(
    slime: Slime, loop: Loop, checkpoint: Path, prompts: Path
) -> None:
    assert slime("eval", str(checkpoint), "--eval-temperature", "0.5", "--run-name", "e").code == 0
    [(_, (config, run_dir, _plugins, saved, exporting))] = loop.calls
    assert isinstance(saved, Checkpoint)
    assert (saved.path, saved.rollouts_done) == (checkpoint / "rollout_000002", 2)
    [own] = eval_sets(config)
    assert (own.name, own.path, own.temperature, config.reward.reward) == ("own", str(prompts), 0.5, "exact_match")
    # No file of the training run is overwritten.
    for one in (config, exporting):
        assert (one.checkpoint.save, one.checkpoint.save_hf, one.checkpoint.load) == (None, None, None)
    assert run_dir == Path("outputs/e")


@pytest.mark.parametrize("command", [("eval",), ("convert", "exported")])
def test_engines_of_others_are_not_those_of_an_evaluation_or_conversion(
    slime: Slime, loop: Loop, tmp_path: Path, base_words: list[str], prompts: Path, command: tuple[str, ...]
) -> None:
    from slime.config import load_config

    # There is no such file, and nobody answers at the address.
    engines = ["--rollout-external-engine-addrs", "127.0.0.1:9", "--rollout-external-engine-keys", "keys.txt"]
    sets = ["--eval-prompt-data", "own", str(prompts), "--eval-interval", "1", "--save", "saved"]
    writer = CheckpointWriter(tmp_path / "saved", load_config([*base_words, *sets, *engines]), {})
    temporary, (name, *rest) = writer.begin(2), command
    if name == "convert":
        (temporary / "megatron" / "adapters.json").touch()  # so that training ranks merge them
    writer.commit(temporary, {}, rollouts_done=2, weight_version=3, trained_at={3: 2})
    ended = slime(name, "saved", *rest, "--run-name", "e")
    assert ended.code == 0, ended.err
    configs = [one for _, arguments in loop.calls for one in arguments if isinstance(one, RunConfig)]
    assert configs
    for used in configs:
        assert used.cluster.rollout_external_engine_addrs == [] and used.cluster.rollout_external_engine_keys is None
    refused = slime(name, "saved", *rest, *engines[:2])
    assert refused.code == 2 and "nothing is trained here that could be sent to these engines" in refused.err


def test_the_run_folder_of_the_checkpoint_is_left_unchanged(slime: Slime, loop: Loop, checkpoint: Path) -> None:
    assert slime("eval", str(checkpoint)).code == 0
    assert loop.folders[0].name.startswith("eval_")


def test_one_of_several_checkpoints_can_be_selected(slime: Slime, loop: Loop, checkpoint: Path) -> None:
    assert slime("eval", str(checkpoint / "rollout_000002")).code == 0
    assert loop.calls[0][1][3].path == checkpoint / "rollout_000002"


def test_a_supervised_run_can_be_evaluated(slime: Slime, loop: Loop, tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[algorithm]\nloss_type = "sft_loss"\n[generator]\nname = "supervised"\n')
    assert slime("eval", str(file), "--hf-checkpoint", *words).code == 0
    assert loop.configs[0].generator_name == "single_turn"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--eval-pass-k 1 8", "pass@8 needs at least 8 responses per prompt, got 4"),
        ("--eval-pass-threshold nan", "--eval-pass-threshold: got 'nan', expected a finite number"),
        ("--eval-pass-threshold high", "--eval-pass-threshold: got 'high', expected a number"),
        ("--eval-pass-k 0", "--eval-pass-k: got '0', expected at least 1"),
        ("--eval-prompt-data sums other.jsonl", "2 evaluation sets are called 'sums'"),
        ("--eval-prompt-data gone gone.jsonl", "gone.jsonl does not exist"),
        ("--eval-prompt-data empty empty.jsonl", "empty.jsonl has no rows"),
        ("--eval-prompt-data broken broken.jsonl", "broken.jsonl:2"),
        ("--reward nosuch", "nosuch"),
        ("--load nothing", "no checkpoint in nothing"),
        ("--nosuch 1", "unknown flag --nosuch"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    refused: Refused, words: list[str], tmp_path: Path, more: str, message: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": \n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    assert message in refused(*words, *split(more))


def test_all_missing_options_are_reported_together(refused: Refused) -> None:
    message = refused()
    assert "--hf-checkpoint is missing" in message and "--eval-prompt-data is missing" in message


def test_a_set_without_any_reward_is_refused(refused: Refused, described_model: Path, prompts: Path) -> None:
    message = refused(str(described_model), "--eval-prompt-data", "sums", str(prompts), "--eval-max-response-len", "8")
    assert "--eval-prompt-data sums needs --reward (or a reward of its own)" in message


def test_a_folder_that_is_neither_model_nor_checkpoint_is_refused(slime: Slime, tmp_path: Path) -> None:
    ended = slime("eval", str(tmp_path))
    assert ended.code in (1, 2) and "no checkpoint in" in ended.err


def test_help_lists_the_evaluation_options(slime: Slime) -> None:
    out = slime("eval", "--help").out
    assert "usage: slime eval" in out and "--eval-pass-k" in out and "[[evaluation.sets]]" in out
    assert "--eval-interval" not in out
    assert "eval " in slime("--help").out


def test_resume_is_said_to_be_an_option_of_training(slime: Slime, loop: Loop, checkpoint: Path) -> None:
    for words in (("--resume", "outputs/run"), (str(checkpoint), "--resume", "auto")):
        ended = slime("eval", *words)
        assert (ended.code, ended.out, loop.calls) == (2, "", [])
        assert ended.err == "slime: error: unknown flag --resume. It is an option of slime train.\n"
