from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.engine.server import EngineSpec, server_arguments, server_environment


def spec(**changes: object) -> EngineSpec:
    fields = {"model_path": "/model", "log_path": Path("log"), "device": "cpu", **changes}
    return EngineSpec(**fields)


def value_of(flag: str, arguments: list[str]) -> list[str]:
    """Every value given to `flag`, in order."""
    return [arguments[i + 1] for i, a in enumerate(arguments) if a == flag]


def test_a_cpu_engine_computes_in_float32_and_sleeps_when_idle() -> None:
    arguments = server_arguments(spec(), 1234)
    assert value_of("--dtype", arguments) == ["float32"]
    assert value_of("--port", arguments) == ["1234"]
    assert "--sleep-on-idle" in arguments


@pytest.mark.parametrize("given", [["--dtype", "bfloat16"], ["--dtype=bfloat16"]])
def test_user_settings_replace_defaults(given: list[str]) -> None:
    arguments = server_arguments(spec(extra_args=given), 1234)
    assert "float32" not in arguments
    assert arguments[-len(given) :] == given


def test_an_alias_counts_as_set() -> None:
    arguments = server_arguments(spec(tp_size=2, extra_args=["--tensor-parallel-size", "2"]), 1)
    assert "--tp-size" not in arguments


def test_a_gpu_engine_keeps_sglangs_own_defaults() -> None:
    arguments = server_arguments(spec(device="cuda", base_gpu_id=4), 1)
    assert value_of("--base-gpu-id", arguments) == ["4"]
    cpu_only = {
        "--dtype",
        "--max-total-tokens",
        "--sleep-on-idle",
        "--attention-backend",
        "--enable-deterministic-inference",
    }
    assert not cpu_only & set(arguments)
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(spec(device="cuda"))
    assert "OMP_NUM_THREADS" not in server_environment(spec(device="cuda"))


def test_health_never_generates_on_any_machine() -> None:
    for device in ("cpu", "cuda"):
        assert server_environment(spec(device=device))["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_the_users_environment_takes_precedence() -> None:
    assert server_environment(spec(env={"OMP_NUM_THREADS": "3"}))["OMP_NUM_THREADS"] == "3"


def test_tensor_parallel_on_cpu_names_a_core_per_rank() -> None:
    assert server_environment(spec(tp_size=3))["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2"


def test_seeded_sampling_can_be_turned_off_on_cpu() -> None:
    assert "--enable-deterministic-inference" in server_arguments(spec(), 1)
    assert "--enable-deterministic-inference" not in server_arguments(spec(seeded_sampling=False), 1)


def test_seed_and_context_length_are_passed_on() -> None:
    arguments = server_arguments(spec(random_seed=7, context_length=100), 1)
    assert value_of("--random-seed", arguments) == ["7"]
    assert value_of("--context-length", arguments) == ["100"]


@pytest.mark.parametrize(
    ("layers", "context", "expected"),
    [
        (1, None, 65536),  # 8 KiB a token: 512 MiB would hold more than the most allowed
        (128, None, 512),  # a MiB a token: less than the least allowed
        (128, 20_000, 512),  # the context must fit
        (8, None, 8192),
    ],
)
def test_the_cpu_cache_has_a_budget(tmp_path: Path, layers: int, context: int | None, expected: int) -> None:
    config = {"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = server_arguments(spec(model_path=str(tmp_path), context_length=context), 1)
    assert value_of("--max-total-tokens", arguments) == [str(max(expected, 8192, context or 0))]
