"""Flags: names, forms, precedence and error messages."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.config.conftest import Load, Refused

import slime
from slime.config import load_config, read_config
from slime.config.installed import parse_source
from slime.errors import ConfigError


def test_a_value_may_follow_or_be_attached(load: Load) -> None:
    assert load("--rollout-temperature", "0.5").rollout.rollout_temperature == 0.5
    assert load("--rollout-temperature=0.5").rollout.rollout_temperature == 0.5


def test_an_attached_value_may_contain_equals_signs_and_dashes(load: Load) -> None:
    assert load("--run-name=--a=b").run.run_name == "--a=b"


def test_a_value_may_be_negative(load: Load) -> None:
    assert load("--rollout-top-k", "-1").rollout.rollout_top_k == -1


def test_the_last_value_of_a_repeated_flag_is_used(load: Load) -> None:
    assert load("--seed", "1", "--seed", "2").run.seed == 2


def test_evaluation_sets_accumulate(load: Load) -> None:
    config = load("--eval-prompt-data", "a", "a.jsonl", "b", "b.jsonl", "--eval-prompt-data", "c", "c.jsonl",
                  "--eval-interval", "5")  # fmt: skip
    assert config.evaluation.eval_prompt_data == [("a", "a.jsonl"), ("b", "b.jsonl"), ("c", "c.jsonl")]


def test_evaluation_sets_come_in_pairs(refused: Refused) -> None:
    assert "--eval-prompt-data needs pairs of a name and a file, got 3 words: a a.jsonl b" in refused(
        "--eval-prompt-data", "a", "a.jsonl", "b"
    )


def test_a_switch_is_turned_on_and_off(load: Load) -> None:
    assert load("--apply-chat-template").data.apply_chat_template is True
    assert load("--apply-chat-template", "--no-apply-chat-template").data.apply_chat_template is False
    assert load("--apply-chat-template=false").data.apply_chat_template is False


def test_a_switch_takes_no_value(refused: Refused) -> None:
    assert "unexpected 'true' after --apply-chat-template, which takes no value (write --apply-chat-template=true)" in (
        refused("--apply-chat-template", "true")
    )
    assert "--apply-chat-template: got 'yes', expected true or false" in refused("--apply-chat-template=yes")


def test_lists_take_all_arguments_up_to_the_next_flag(load: Load) -> None:
    config = load("--rollout-stop", "a", "b", "--rollout-stop-token-ids", "1", "2", "--seed", "3")
    assert config.rollout.rollout_stop == ["a", "b"]
    assert config.rollout.rollout_stop_token_ids == [1, 2]


def test_aliases_name_the_same_option(load: Load) -> None:
    assert load("--rm-type", "other").reward.reward == "other"


@pytest.mark.parametrize(
    ("flag", "slot", "option"),
    [
        ("--reward.timeout-s", "reward", "timeout_s"),
        ("--estimator.timeout_s", "estimator", "timeout_s"),
        ("--advantage-estimator.x", "estimator", "x"),
        ("--generator.x-y", "generator", "x_y"),
        ("--data-source.x", "datasource", "x"),
        ("--datasource.x", "datasource", "x"),
    ],
)
def test_component_options_are_passed_to_the_plugin_as_words(load: Load, flag: str, slot: str, option: str) -> None:
    assert load(flag, "5").component_options == {slot: {option: "5"}}
    assert load(f"{flag}=5").component_options == {slot: {option: "5"}}


def test_a_component_option_needs_a_value(refused: Refused) -> None:
    assert "--reward.strict needs a value (for a switch: true or false)" in refused("--reward.strict", "--seed", "1")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--rolout-batch-size", "--rollout-batch-size"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--sglang-mem-fraction-statc", "--sglang-mem-fraction-static"),
        ("--use-tiss", "--use-tis"),
        ("--rewrad.timeout-s", "--reward.timeout-s"),
        # names with further words: the fewest, and of those the first
        ("--temperature", "--rollout-temperature"),
        ("--top-p", "--rollout-top-p"),
        ("--batch-size", "--rollout-batch-size"),
        ("--hf", "--hf-checkpoint"),
        ("--max-response-len", "--rollout-max-response-len"),
        ("--n-samples", "--n-samples-per-prompt"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--sglang-tp", "--sglang-tp-size"),
        ("--sglang-dtyp", "--sglang-dtype"),
        ("--bf-16", "--bf16"),
        ("--seq-len", "--seq-length"),
        ("--dryrun", "--dry-run"),
        # slime's own before Megatron's
        ("--sync", "--async"),
        ("--eps", "--eps-clip"),
        ("--gpus", "--rollout-num-gpus"),
        # names of other frameworks
        ("--max-prompt-length", "--rollout-max-prompt-len"),
        ("--train-batch-size", "--rollout-batch-size"),
        ("--data.train_batch_size", "--rollout-batch-size"),
        ("--num_generations", "--n-samples-per-prompt"),
        ("--learning-rate", "--lr"),
        ("--model", "--hf-checkpoint"),
        ("--save-freq", "--save-interval"),
        ("--clip-ratio", "--eps-clip"),
        ("--vllm-tensor-parallel-size", "--rollout-num-gpus-per-engine"),
        ("--pretrain", "--hf-checkpoint"),
    ],
)
def test_a_misspelt_flag_is_refused_with_a_suggestion(refused: Refused, wrong: str, right: str) -> None:
    assert refused(wrong, "1") == f"unknown flag {wrong}. Did you mean {right}?"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--beta 0.1", "unknown flag --beta. It is beta of TRL. Here: `--use-kl-loss --kl-loss-coef`."),
        ("--save-steps 5", "unknown flag --save-steps. It is save_steps of TRL. Here: `--save-interval`, in rollouts."),
        ("--trainer.total_epochs 2", "It is trainer.total_epochs of verl. Here: `--num-rollout`: epochs x prompts /"),
        ("--micro-rollout-batch-size 8", "It is micro_rollout_batch_size of OpenRLHF. Here: engines batch requests"),
        ("data.train_batch_size=8", "options begin with two dashes. Did you mean --rollout-batch-size?"),
        (
            "+trainer.nnodes=1",
            "unexpected '+trainer.nnodes=1': options begin with two dashes. Did you mean --actor-num-",
        ),
    ],
)
def test_options_of_other_frameworks_are_refused_with_what_to_write(refused: Refused, words: str, message: str) -> None:
    assert message in refused(*words.split())


def test_abbreviations_are_not_accepted(refused: Refused) -> None:
    assert "unknown flag --rollout-temp." in refused("--rollout-temp", "0.5")


def test_a_single_dash_is_refused(refused: Refused) -> None:
    assert "unknown option -x: slime's options begin with two dashes" in refused("-x")


def test_a_missing_value_is_refused(refused: Refused) -> None:
    assert refused("--seed") == "--seed needs a value (a whole number)"
    assert refused("--seed", "--apply-chat-template") == (
        "--seed needs a value (a whole number), got the flag --apply-chat-template"
    )
    assert "--rollout-stop needs at least one value" in refused("--rollout-stop")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seed x", "--seed: got 'x', expected a whole number"),
        ("--seed 1.5", "--seed: got '1.5', expected a whole number"),
        ("--rollout-temperature warm", "--rollout-temperature: got 'warm', expected a number"),
        ("--rollout-temperature 0", "--rollout-temperature: got '0', expected at least 1e-06"),
        ("--rollout-top-p 1.5", "--rollout-top-p: got '1.5', expected at most 1.0"),
        ("--rollout-top-k 0", "--rollout-top-k: got 0, expected at least 1, or -1 for all tokens"),
        ("--rollout-top-k -2", "--rollout-top-k: got -2, expected at least 1, or -1 for all tokens"),
        ("--router-port 70000", "--router-port: got '70000', expected at most 65535"),
        ("--device tpu", "--device: got 'tpu', expected one of auto, cpu, cuda."),
        ("--kl-loss-type k33", "--kl-loss-type: got 'k33', expected one of k1, k2, k3, low_var_kl. Did you mean k3?"),
        ("--rollout-stop-token-ids 1 x", "--rollout-stop-token-ids: got 'x', expected a whole number"),
        ("--normalization Norm", "--normalization: got 'Norm', expected one of LayerNorm, RMSNorm."),
        ("--hidden-size x", "--hidden-size: got 'x', expected a whole number"),
        ("--sglang-max-running-requests x", "--sglang-max-running-requests: got 'x', expected a whole number"),
    ],
)
def test_a_wrong_value_is_reported_with_what_was_expected(refused: Refused, words: str, message: str) -> None:
    assert message in refused(*words.split())


def test_all_problems_are_reported_together(refused: Refused) -> None:
    message = refused("--seed", "x", "--eps-clip", "-1", "--no-such-flag")
    assert message.startswith("3 problems:\n")
    assert all(part in message for part in ("--seed: got", "--eps-clip: got", "unknown flag --no-such-flag"))


def test_flags_override_the_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nseed = 1\nrun_name = "file"\n[megatron]\nlr = 1.0\n')
    config = read_config([str(path), "--seed", "2", "--lr", "0.5"])
    assert (config.run.seed, config.run.run_name, config.megatron["lr"]) == (2, "file", 0.5)


def test_a_second_run_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"unexpected 'more\.toml': the run file is already"):
        read_config([str(path), "more.toml"])


def test_missing_required_options_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([])
    for flag in ("hf-checkpoint", "num-rollout", "prompt-data", "advantage-estimator", "reward",
                 "rollout-batch-size"):  # fmt: skip
        assert f"--{flag} is missing" in str(caught.value)


def test_supervised_training_needs_neither_estimator_nor_reward() -> None:
    words = "--hf-checkpoint m --prompt-data d --num-rollout 1 --rollout-batch-size 4 --lr 1 --loss-type sft_loss"
    config = load_config(words.split())
    assert config.generator_name == "supervised"
    assert config.world_size == 1


@pytest.mark.parametrize("name", ["--comet-project", "--use-comet", "--bogus", "--x", "--tp", "--tokenizer"])
def test_nothing_is_suggested_for_a_flag_that_is_not_near_any(refused: Refused, name: str) -> None:
    assert refused(name, "1") == f"unknown flag {name}."


@pytest.mark.parametrize("packed", ["bytecode", "zip"])
def test_options_are_found_where_their_source_is_not_on_disk(packed: str, tmp_path: Path) -> None:
    code = Path(slime.__file__).parent
    shutil.copytree(code, tmp_path / "slime", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path
    if packed == "zip":
        place = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "slime"))
        shutil.rmtree(tmp_path / "slime")
    else:
        compileall.compile_dir(tmp_path / "slime" / "config", quiet=2, legacy=True)
        for source in (tmp_path / "slime" / "config").glob("*.py"):
            source.unlink()
    script = """
from slime.config import run_config
from slime.config.flag_table import find_flag
print(run_config.__file__, find_flag("seed").key, find_flag("num-rollout").help, sep="|")
"""
    environment = {**os.environ, "PYTHONPATH": str(place)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    file, key, text = done.stdout.strip().split("|")
    assert file.startswith(str(place)) and key == "seed"
    assert bool(text) is (packed == "zip"), "a zip holds the source, bytecode does not"


def test_a_source_that_is_no_text_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "options.pyc").write_bytes(b"\xa7\r\r\n\0")
    with pytest.raises(ConfigError, match=r"cannot read the options of an installed package from .*options\.pyc"):
        parse_source(tmp_path / "options.pyc")
