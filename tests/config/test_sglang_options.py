"""SGLang's flags: the scan of its source compared with the real parser, and the command line for the server."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from typing import Any, Literal

import pytest
from tests.config.conftest import Load, Refused

from slime.config import config_from_toml, config_notes, read_config
from slime.config.flag_table import find_flag, flags_of
from slime.config.sglang_options import sglang_argv
from slime.config.value_types import Arity
from slime.errors import ConfigError

_ASK_SGLANG = """
import argparse, json, sys
from slime.platform import platform_of
platform_of('cpu').make_sglang_importable()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
if len(sys.argv) > 1:
    parsed = parser.parse_args(["--model-path", "m", *sys.argv[1:]])
    print(json.dumps({k: v for k, v in vars(parsed).items()}, default=str))
else:
    print(json.dumps([
        {"flags": [o for o in a.option_strings if o.startswith("--")], "dest": a.dest, "nargs": a.nargs,
         "type": getattr(a.type, "__name__", "str"),
         "choices": None if a.choices is None else sorted(map(str, a.choices))}
        for a in parser._actions if a.dest != "help"
    ]))
"""
_ARITIES = {None: Arity.ONE, 0: Arity.SWITCH, "?": Arity.OPTIONAL, "+": Arity.SOME, "*": Arity.ANY}


def ask_sglang(*words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _ASK_SGLANG, *words], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_scan_finds_the_flags_of_the_real_parser() -> None:
    actions = ask_sglang()
    known = {name for action in actions for name in action["flags"]}
    assert len(actions) > 500
    for action in actions:
        for name in action["flags"]:
            found = find_flag(f"sglang-{name[2:]}")
            assert found is not None, name
            kind = found.type
            assert kind.arity is _ARITIES[action["nargs"]], name
            if action["type"] in ("int", "float") and action["choices"] is None:
                assert action["type"] in str(kind.annotation), name
            if typing.get_origin(kind.annotation) is Literal:
                assert sorted(map(str, typing.get_args(kind.annotation))) == action["choices"], name
    ours = {f"--{flag.name.removeprefix('sglang-')}" for flag in flags_of("sglang")}
    # Fields whose flag has another name are also found by the field's.
    fields = {f"--{flag.key.replace('_', '-')}" for flag in flags_of("sglang")}
    assert ours - known <= fields


@pytest.mark.slow
def test_the_real_parser_reads_a_rendered_command_line_identically() -> None:
    config = config_from_toml(
        """
        [sglang]
        mem-fraction-static = 0.8
        context-length = 8192
        log-level = "info"
        tp-size = 2
        disable-cuda-graph = true
        disable-radix-cache = false
        enable-tf32-matmul = false
        cuda-graph-bs-decode = [1, 2, 4]
        preferred-sampling-params = {temperature = 0.5, stop = ["a"]}
        fp8-gemm-backend = "auto"
        reasoning-parser = "qwen3"
        watchdog-timeout = 60
        served-model-name = "--odd"
        """
    )
    parsed = ask_sglang(*sglang_argv(config.sglang))
    for name, value in config.sglang.items():
        assert parsed[name] == value, name


@pytest.mark.row("N2")
def test_the_flags_of_the_manual_are_accepted(load: Load) -> None:
    words = "--sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO"
    config = load(*words.split(), "--sglang-disable-cuda-graph")
    assert config.sglang == {
        "mem_fraction_static": 0.8,
        "context_length": 8192,
        "log_level": "INFO",
        "disable_cuda_graph": True,
    }
    assert sglang_argv(config.sglang) == [
        "--mem-fraction-static", "0.8", "--context-length", "8192", "--log-level", "INFO", "--disable-cuda-graph"
    ]  # fmt: skip


@pytest.mark.parametrize(("word", "value"), [("8k", 8000), ("8Ki", 8192), ("1.5k", 1500), ("8192", 8192)])
def test_sizes_may_have_a_unit_as_in_sglang(word: str, value: int) -> None:
    assert read_config(["--sglang-context-length", word]).sglang == {"context_length": value}


def test_a_switch_with_two_forms_can_be_turned_off() -> None:
    for flag in ("--sglang-no-enable-tf32-matmul", "--no-sglang-enable-tf32-matmul"):
        config = read_config([flag])
        assert config.sglang == {"enable_tf32_matmul": False}
        assert sglang_argv(config.sglang) == ["--no-enable-tf32-matmul"]


def test_aliases_set_the_field() -> None:
    assert read_config(["--sglang-tensor-parallel-size", "2"]).sglang == {"tp_size": 2}


def test_json_values_work_in_flags_and_tables() -> None:
    from_words = read_config(["--sglang-preferred-sampling-params", '{"temperature": 0.5}'])
    from_table = config_from_toml("[sglang]\npreferred_sampling_params = {temperature = 0.5}\n")
    assert from_words.sglang == from_table.sglang == {"preferred_sampling_params": {"temperature": 0.5}}


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--sglang-api-key", "every run makes keys of its own"),
        ("--sglang-admin-api-key", "every run makes keys of its own"),
        ("--sglang-tokenizer-worker-num", "with one tokenizer process"),
        ("--sglang-grpc-port", "SGLang checks the keys of a run only there"),
        ("--sglang-ssl-keyfile-password", "without TLS"),
    ],
)
def test_options_that_would_open_the_engines_are_refused_without_their_value(
    flag: str, reason: str, refused: Refused
) -> None:
    message = refused(flag, "7777")
    assert f"{flag} is set by slime" in message and reason in message and "7777" not in message


def test_an_option_that_opens_an_engine_to_others_on_the_machine_is_noted() -> None:
    for words in (["--sglang-attn-dp-size", "2"], ["--sglang-enable-dp-attention"]):
        [note] = config_notes(read_config([*words, "--device", "cpu"]))
        assert words[0] in note and "any user of the machine can run code as you" in note
    assert config_notes(read_config(["--sglang-attn-dp-size", "1", "--device", "cpu"])) == []


def test_the_engine_size_may_be_set_by_the_flag_of_sglang(load: Load) -> None:
    config = load("--sglang-tp-size", "2")
    assert config.cluster.rollout_num_gpus_per_engine == 2
    assert config.num_engines == 1
    assert load("--sglang-tp-size", "2", "--rollout-num-gpus", "4").num_engines == 2
    assert load("--sglang-tp-size", "2", "--rollout-num-gpus-per-engine", "2").num_engines == 1


def test_two_engine_sizes_are_refused(refused: Refused) -> None:
    assert "--sglang-tp-size 2 contradicts --rollout-num-gpus-per-engine 4" in refused(
        "--sglang-tp-size", "2", "--rollout-num-gpus-per-engine", "4"
    )


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("--sglang-model-path m", "use --hf-checkpoint"),
        ("--sglang-model m", "use --hf-checkpoint"),
        ("--sglang-port 1", "use --engine-port"),
        ("--sglang-host h", "engines listen where slime can reach them"),
        ("--sglang-device cpu", "use --device"),
        ("--sglang-dist-init-addr h:1", "slime places the engines"),
        ("--sglang-nnodes 2", "slime places the engines"),
        ("--sglang-config f", "use the [sglang] table"),
        ("--sglang-pp-size 2", "one pipeline stage; use --rollout-num-gpus-per-engine"),
    ],
)
def test_options_that_slime_sets_are_refused_with_an_alternative(refused: Refused, words: str, instead: str) -> None:
    message = refused(*words.split())
    assert message.startswith(f"{words.split()[0]} is set by slime: ")
    assert instead in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sglang-tokenizer-mode fast", "--sglang-tokenizer-mode: got 'fast', expected one of"),
        ("--sglang-mem-fraction-static half", "--sglang-mem-fraction-static: got 'half', expected a number"),
        ("--sglang-dp-size 2", "--sglang-dp-size 2 would need 2 times the devices in one engine"),
    ],
)
def test_wrong_values_are_refused(refused: Refused, words: str, message: str) -> None:
    assert message in refused(*words.split())


def test_an_unknown_option_is_refused_for_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"no option 'mem_fraction_statc'\. Did you mean mem_fraction_static"):
        sglang_argv({"mem_fraction_statc": 1})
