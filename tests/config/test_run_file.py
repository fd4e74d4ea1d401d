"""Run files: tables, keys, top-level flags, components and error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config import config_from_toml, read_config
from slime.errors import ConfigError


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_toml(text, "run.toml")
    return str(caught.value)


def test_tables_are_sections_and_keys_are_flag_names() -> None:
    config = config_from_toml("[rollout]\nrollout-batch-size = 4\nn_samples_per_prompt = 2\nasync = true\n")
    assert config.rollout.rollout_batch_size == 4
    assert config.rollout.n_samples_per_prompt == 2
    assert config.rollout.async_mode is True


def test_any_flag_is_a_key_before_the_first_table() -> None:
    config = config_from_toml(
        'seed = 7\nnum-layers = 2\nsglang-log-level = "info"\nrm-type = "x"\nno-rope-fusion = true\n'
    )
    assert config.run.seed == 7
    assert config.megatron == {"num_layers": 2, "apply_rope_fusion": False}
    assert config.sglang == {"log_level": "info"}
    assert config.reward.reward == "x"


def test_engine_tables_accept_native_names() -> None:
    config = config_from_toml(
        "[megatron]\ntensor-model-parallel-size = 2\nnum_experts = 4\nno-masked-softmax-fusion = true\nswiglu = true\n"
        "[sglang]\ntp_size = 2\nmem-fraction-static = 0.5\nexpert-parallel-size = 2\n"
    )
    assert config.megatron == {
        "tensor_model_parallel_size": 2,
        "num_moe_experts": 4,
        "masked_softmax_fusion": False,
        "swiglu": True,
    }
    assert config.sglang == {"tp_size": 2, "mem_fraction_static": 0.5, "ep_size": 2}


def test_component_tables_choose_and_configure_components() -> None:
    config = config_from_toml(
        '[reward]\nname = "a"\ntimeout-s = 5.0\n[estimator]\nname = "b"\nflag = true\n'
        '[generator]\nname = "c"\n[datasource]\nname = "d"\npaths = ["x", "y"]\n'
    )
    assert config.reward.reward == "a"
    assert config.algorithm.advantage_estimator == "b"
    assert config.generator_name == "c"
    assert config.data.data_source == "d"
    assert config.component_options == {
        "reward": {"timeout_s": 5.0},
        "estimator": {"flag": True},
        "datasource": {"paths": ["x", "y"]},
    }


def test_plugin_options_have_a_table() -> None:
    config = config_from_toml('[plugins]\nallow = ["a"]\nautoload = false\nstrict = true\n')
    assert config.plugins.allow == ["a"]
    assert config.plugins.autoload is False
    assert config.plugins.strict is True


def test_plugin_options_have_flags() -> None:
    config = read_config(["--plugins.deny", "a", "b", "--strict-plugins", "--no-plugins.autoload"])
    assert config.plugins.deny == ["a", "b"]
    assert config.plugins.strict is True
    assert config.plugins.autoload is False


def test_a_data_set_without_labels_has_the_label_key_none() -> None:
    assert config_from_toml('[data]\nlabel_key = "none"\n').data.label_key is None
    assert read_config(["--label-key", "none"]).data.label_key is None


def test_evaluation_sets_are_pairs() -> None:
    config = config_from_toml('[evaluation]\neval_prompt_data = [["a", "a.jsonl"]]\n')
    assert config.evaluation.eval_prompt_data == [("a", "a.jsonl")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[rollout]\nrolout_batch_size = 4\n",
            "[rollout] rolout_batch_size: unknown key. Did you mean rollout_batch_size?",
        ),
        ("[data]\nrollout_batch_size = 4\n", "[data] rollout_batch_size: unknown key. It belongs in [rollout]."),
        ("[megatron]\nnum_layer = 4\n", "[megatron] num_layer: unknown key. Did you mean num_layers?"),
        ("[megatron]\nmicro_batch_size = 4\n", "[megatron] micro_batch_size: unknown key. It belongs in [algorithm]."),
        ("[sglang]\nmem_fraction = 4\n", "[sglang] mem_fraction: unknown key. Did you mean mem_fraction_static?"),
        ("[plugins]\nalow = []\n", "[plugins] alow: unknown key. Did you mean allow?"),
        ("[rolout]\nx = 4\n", "unknown table [rolout]. Did you mean [rollout]?"),
        ("sed = 4\n", "sed: unknown key. Did you mean seed?"),
        ('[run]\nseed = "x"\n', "[run] seed: got 'x', expected a whole number"),
        ("[run]\nseed = true\n", "[run] seed: got true, expected a whole number"),
        ("[run]\nrun_name = 5\n", "[run] run_name: got 5, expected a string"),
        ("[data]\napply_chat_template = 1\n", "[data] apply_chat_template: got 1, expected true or false"),
        ("[megatron]\nnum_layers = 1.5\n", "[megatron] num_layers: got 1.5, expected a whole number"),
        ("[megatron]\nnum_layers = true\n", "[megatron] num_layers: got true, expected a whole number"),
        ("[sglang]\ndisable_radix_cache = 1\n", "[sglang] disable_radix_cache: got 1, expected true or false"),
        ("[run]\nrun_name = 2020-01-01\n", '[run] run_name: got "2020-01-01", expected a string'),
        ('[evaluation]\neval_prompt_data = [["a"]]\n', "[evaluation] eval_prompt_data"),
        ("[algorithm]\nallgather_cp = true\n", "[algorithm] allgather_cp is a flag of THUDM's slime"),
        ("allgather_cp = true\n", "allgather_cp is a flag of THUDM's slime"),
    ],
)
def test_a_wrong_key_is_reported_with_file_table_and_key(text: str, message: str) -> None:
    problem = refused(text)
    assert problem.startswith("run.toml: ")
    assert message in problem


@pytest.mark.parametrize("text", ["[rollout\n", "seed = 1\nseed = 2\n"])
def test_invalid_toml_is_refused_with_its_line(text: str) -> None:
    assert re.search(r"run file run\.toml is not valid TOML: .*line", refused(text))


def test_all_problems_of_a_file_are_reported_together() -> None:
    assert refused("[run]\nseed = true\nsed = 1\n[rolout]\nx = 1\n").startswith("3 problems:")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.exists, "cannot be read: No such file or directory"),
        (Path.mkdir, "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "run.toml"
    make(path)
    with pytest.raises(ConfigError, match=message):
        read_config([str(path)])


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("[rollout]\nnum-rollout = 1\nnum_rollout = 1\n", "[rollout] num-rollout", "[rollout] num_rollout"),
        ("num_rollout = 1\n[rollout]\nnum_rollout = 2\n", "num_rollout", "[rollout] num_rollout"),
        ('[reward]\nname = "a"\nreward = "b"\n', "[reward] name", "[reward] reward"),
        ("[reward]\ntimeout-s = 1\ntimeout_s = 2\n", "[reward] timeout-s", "[reward] timeout_s"),
        ("[megatron]\nnum-experts = 2\nnum_moe_experts = 2\n", "num-experts", "num_moe_experts"),
    ],
)
def test_one_option_in_two_spellings_is_an_error(text: str, first: str, second: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_toml(text, "run.toml")
    assert str(caught.value).splitlines()[-1].lstrip(" -").startswith("run.toml: ")
    assert f"{second} sets the same option as run.toml: " in str(caught.value)
    assert f"{first}. Keep one of them" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '[[reward.terms]]\nname = "a"\ntimeout-s = 1\ntimeout_s = 2\n',
        '[[evaluation.sets]]\nname = "a"\npath = "b"\nn-samples = 1\nn_samples = 2\n',
    ],
)
def test_one_key_of_a_nested_table_in_two_spellings_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(\w+)_(\w+) and \1-\2 are the same key. Keep one of them"):
        config_from_toml(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
        (b"x = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"[reward]\nx = " + b"[" * 60 + b"]" * 60, "nested more than 50 levels deep"),
        (b'run-name = "a\\u0000"', "contains a NUL character"),
        (b"num-rollout = " + b"9" * 5000, "is not valid TOML: Exceeds the limit"),
        (b"[reward]\nscale = inf", r"\[reward\] scale: got Infinity, expected a finite number"),
        (b'[[reward.terms]]\nname = "math"\noptions = "x"', r"terms\[0\].options: got 'x', expected a table"),
        (b"run-name = '" + b"a" * 300 + b"'", "run-name: a name in the path has 300 bytes, expected at most 255"),
    ],
)
def test_an_odd_run_file_is_refused_with_a_message(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config([str(path)])


def test_a_run_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfnum-rollout = 3\n")
    assert read_config([str(path)]).rollout.num_rollout == 3


def test_a_run_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, message in (
        ("pipe", "is not a file, but a pipe, a device or a socket"),
        ("loop", "Too many levels of symbolic links"),
        (".", "Is a directory"),
        ("none", "No such file"),
        ("a\0b", "contains a NUL character"),
        ("a" * 300, "a name in the path has"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config([f"{tmp_path}/{name}"])
