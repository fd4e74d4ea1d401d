from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from slime.engine.server import EnginePart, EngineSpec, server_arguments, server_environment
from slime.kit.processes import COLLECT_AFTER


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
    assert "--sleep-on-idle" in arguments and "--enable-deterministic-inference" in arguments


@pytest.mark.parametrize("given", [["--dtype", "bfloat16"], ["--dtype=bfloat16"]])
def test_user_settings_replace_defaults(given: list[str]) -> None:
    arguments = server_arguments(spec(extra_args=given), 1234)
    assert "float32" not in arguments
    assert arguments[-len(given) :] == given


def test_routed_experts_are_recorded_on_request() -> None:
    flag = "--enable-return-routed-experts"
    for device in ("cpu", "cuda"):
        assert flag in server_arguments(spec(device=device, routed_experts=True), 1)
        assert flag not in server_arguments(spec(device=device), 1)


def test_engines_whose_weights_are_compared_store_shared_experts_by_themselves() -> None:
    flag = "--disable-shared-experts-fusion"
    assert flag in server_arguments(spec(device="cuda", compared=True), 1)
    assert flag not in server_arguments(spec(device="cuda"), 1)


def test_an_engine_on_gpus_that_shares_them_can_release_its_memory() -> None:
    flags = {"--enable-memory-saver", "--enable-draft-weights-cpu-backup"}
    assert flags <= set(server_arguments(spec(device="cuda", releases_memory=True), 1))
    assert not flags & set(server_arguments(spec(device="cuda"), 1))
    assert not flags & set(server_arguments(spec(releases_memory=True), 1))  # slime_cpu.sglang_memory does it
    assert server_environment(spec(device="cuda", devices=("2", "3", "0")))["CUDA_VISIBLE_DEVICES"] == "2,3,0"
    assert "CUDA_VISIBLE_DEVICES" not in server_environment(spec(device="cuda"))


def test_the_memory_saver_of_an_engine_on_gpus_covers_cuda_graphs() -> None:
    name = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    assert server_environment(spec(device="cuda", releases_memory=True))[name] == "1"
    assert name not in server_environment(spec(device="cuda"))
    assert name not in server_environment(spec(releases_memory=True))
    [folder] = find_spec("sglang").submodule_search_locations  # without importing it
    assert f" {name} = " in Path(folder, "srt/environ.py").read_text()  # SGLang knows it


def test_engines_are_told_to_look_for_garbage_seldom() -> None:
    for device in ("cpu", "cuda"):
        assert value_of("--gc-threshold", server_arguments(spec(device=device), 1)) == [str(COLLECT_AFTER)]
    assert value_of("--gc-threshold", server_arguments(spec(extra_args=["--gc-threshold", "700", "10"]), 1)) == ["700"]


def test_a_gpu_engine_keeps_sglangs_own_defaults() -> None:
    arguments = server_arguments(spec(device="cuda"), 1)
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


def test_a_cpu_engine_has_the_stated_threads_and_they_do_not_spin_for_long() -> None:
    environment = server_environment(spec(threads=3))
    assert (environment["OMP_NUM_THREADS"], environment["GOMP_SPINCOUNT"]) == ("3", "2000")


def test_health_never_generates_on_any_machine() -> None:
    for device in ("cpu", "cuda"):
        assert server_environment(spec(device=device))["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_tensor_parallel_on_cpu_names_a_core_per_rank() -> None:
    assert server_environment(spec(tp_size=3))["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2"


def test_the_seed_is_passed_on() -> None:
    assert value_of("--random-seed", server_arguments(spec(random_seed=7), 1)) == ["7"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (1, 65536),  # 8 KiB a token: 512 MiB would hold more than the maximum
        (4, 16384),
        (128, 8192),  # a MiB a token: 512 MiB hold less than the minimum
    ],
)
def test_the_cpu_cache_has_a_budget(tmp_path: Path, layers: int, expected: int) -> None:
    config = {"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = server_arguments(spec(model_path=str(tmp_path)), 1)
    assert value_of("--max-total-tokens", arguments) == [str(expected)]


@pytest.mark.row("N7")
def test_a_server_of_an_engine_over_several_nodes_knows_its_place_and_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime.engine.server.on_interface_of", lambda host: {"GLOO_SOCKET_IFNAME": f"that of {host}"})
    place = {"host": "fd77::2", "tp_size": 16, "device": "cuda"}
    server = spec(part=EnginePart(rank=1, nodes=2, meeting="[fd77::1]:20000", timeout_s=600.5), **place)
    arguments = server_arguments(server, 30000)
    expected = {"--nnodes": "2", "--node-rank": "1", "--tp-size": "16", "--dist-init-addr": "[fd77::1]:20000"}
    expected["--dist-timeout"] = "601"
    assert {flag: value_of(flag, arguments) for flag in expected} == {flag: [value] for flag, value in expected.items()}
    assert "--watchdog-timeout" not in arguments  # SGLang's: a first batch may compile for minutes
    patient = server_arguments(replace(server, extra_args=["--dist-timeout", "900"]), 30000)
    assert value_of("--dist-timeout", patient) == ["900"]
    environment = server_environment(server)
    assert (environment["SGLANG_HOST_IP"], environment["GLOO_SOCKET_IFNAME"]) == ("fd77::2", "that of fd77::2")
    alone = spec(**place)
    assert "SGLANG_HOST_IP" not in server_environment(alone)
    assert not expected.keys() - {"--tp-size"} & {*server_arguments(alone, 30000)}
