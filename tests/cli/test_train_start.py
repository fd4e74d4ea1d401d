"""What `slime train` does between the checks and the loop."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from tests.cli.conftest import Loop, Slime, split

from slime.config import config_from_toml
from slime.config.run_config import SECTION_OF, SECTIONS
from slime.config.run_file import PATHS, with_absolute_paths
from slime.errors import EngineError, TerminatedInterrupt


@pytest.fixture
def train(slime: Slime, described_model: Path, prompts: Path) -> Slime:
    words = ["train", "--hf-checkpoint", str(described_model), "--prompt-data", str(prompts), "--device", "cpu"]
    words += split("--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8")
    words += split("--advantage-estimator grpo --reward exact_match --lr 1e-4")
    return lambda *more: slime(*words, *more)


def test_the_loop_gets_the_resolved_configuration_and_its_folder(train: Slime, loop: Loop) -> None:
    assert train("--run-name", "run").code == 0
    [(_, (config, run_dir, plugins, _begins))] = loop.calls
    assert run_dir == Path("outputs/run")
    assert config.rollout.global_batch_size == 8
    assert plugins.find("reward", "exact_match").name == "exact_match"


def test_the_saved_configuration_starts_the_same_run(train: Slime, slime: Slime, loop: Loop) -> None:
    assert train("--run-name", "run").code == 0
    saved = Path("outputs/run/config.toml")
    assert config_from_toml(saved.read_text()) == with_absolute_paths(loop.configs[0])
    assert slime("train", str(saved), "--run-name", "again").code == 0
    first, second = (config.model_dump(exclude={"run"}) for config in loop.configs)
    assert first == second


def test_the_saved_configuration_works_from_any_folder(
    train: Slime, slime: Slime, loop: Loop, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = os.path.relpath(prompts)
    held = ("--eval-prompt-data", "held", near, "--eval-interval", "1")
    assert train("--run-name", "run", "--prompt-data", f"{near}@[0:4]=1", *held).code == 0
    saved = tmp_path / "outputs" / "run" / "config.toml"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert slime("train", str(saved), "--run-name", "again").code == 0
    assert loop.folders[1] == tmp_path / "outputs" / "again"
    assert loop.configs[1].data.prompt_data == [f"{prompts}@[0:4]=1"]
    assert loop.configs[1].evaluation.eval_prompt_data == [("held", str(prompts))]


def test_every_option_that_names_a_path_is_made_absolute() -> None:
    # Functions by path are made absolute where they are found, and a name is no path.
    others = {"run_name", *(key for key in SECTION_OF if key.endswith("_path"))}
    paths = {
        (section, key)
        for section, options in SECTIONS.items()
        for key, field in options.model_fields.items()
        if "check_path" in repr((field.annotation, field.metadata)) and key not in others and section != "evaluation"
    }
    assert paths == {(section, key) for section, keys in PATHS.items() for key in keys}


def test_a_run_from_a_saved_configuration_saves_in_its_own_folder(train: Slime, slime: Slime, loop: Loop) -> None:
    assert train("--run-name", "run", "--save-interval", "5").code == 0
    assert slime("train", "outputs/run/config.toml", "--run-name", "again").code == 0
    first, again = (Path(config.checkpoint.save) for config in loop.configs)
    assert (first, again) == (Path("outputs/run/checkpoints"), Path("outputs/again/checkpoints").absolute())


def test_a_run_without_a_name_is_named_by_date_and_time(train: Slime, loop: Loop) -> None:
    assert train().code == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d{6}", loop.folders[0].name)


def test_an_empty_run_folder_is_used(train: Slime, loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    assert train("--run-name", "run").code == 0
    assert len(loop.calls) == 1


def test_a_refused_run_leaves_no_folder(train: Slime, loop: Loop, tmp_path: Path) -> None:
    assert train("--reward", "nope").code == 2
    assert not (tmp_path / "outputs").exists()
    assert loop.calls == []


def test_options_without_effect_are_noted_on_stderr_and_in_the_log(
    train: Slime, loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="slime")
    assert "slime: note: --eval-interval has no effect" in train("--eval-interval", "5").err
    assert any(line.startswith("note: --eval-interval has no effect") for line in caplog.messages)
    assert loop.configs[0].evaluation.eval_interval is None


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (EngineError("engine 0 died"), 1, "slime: error: engine 0 died\n"),
        (KeyboardInterrupt(), 130, "slime: interrupted\n"),
        (TerminatedInterrupt(), 143, "slime: ended by SIGTERM\n"),
    ],
)
def test_each_way_a_run_ends_has_an_exit_code_and_a_message(
    train: Slime, loop: Loop, outcome: BaseException, code: int, message: str
) -> None:
    loop.outcome = outcome
    ended = train()
    assert ended.code == code and ended.err.startswith(f"{message}slime: the run wrote no checkpoint")


def test_ctrl_c_says_that_it_saves_nothing_and_what_does(train: Slime, loop: Loop) -> None:
    told = "slime: Ctrl-C saves nothing; `kill PID` (SIGTERM) saves a checkpoint after the step, then ends\n"
    loop.outcome = KeyboardInterrupt()
    assert told in train("--save-interval", "1").err
    # SIGTERM saves nothing in a run without checkpoints, and did what it can in one with.
    loop.outcome = KeyboardInterrupt()
    assert told not in train("--run-name", "other").err
    loop.outcome = TerminatedInterrupt()
    assert told not in train("--run-name", "third", "--save-interval", "1").err


def test_a_bug_keeps_its_traceback(train: Slime, loop: Loop) -> None:
    loop.outcome = ZeroDivisionError("bug")
    with pytest.raises(ZeroDivisionError):
        train()


def test_errors_of_any_kind_say_how_to_continue(train: Slime, loop: Loop) -> None:
    loop.outcome = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")
    ended = train()
    assert ended.code == 1 and ended.err.endswith(
        "slime: the run wrote no checkpoint to continue from: --save-interval N writes one every N rollouts\n"
    )
    loop.outcome = ZeroDivisionError("a fault of slime itself")
    with pytest.raises(ZeroDivisionError) as raised:
        train("--run-name", "other")
    assert "to continue from" in raised.value.__notes__[0]
