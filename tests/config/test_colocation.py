"""Engines on the trainer's devices: defaults, and what cannot be combined."""

from __future__ import annotations

import pytest
from tests.config.conftest import Load, Refused

from slime.cli.eval import read_request
from slime.config.flag_table import find_flag
from slime.config.sglang_options import engine_options


@pytest.mark.parametrize(
    ("words", "engines"),
    [
        ("", 1),
        ("--actor-num-gpus-per-node 4", 4),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 2", 2),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2", 4),
        ("--actor-num-gpus-per-node 5 --rollout-num-gpus-per-engine 2", 2),
    ],
)
def test_engines_use_all_training_devices_unless_told_otherwise(load: Load, words: str, engines: int) -> None:
    config = load("--colocate", *words.split())
    assert config.num_engines == engines
    assert load(*words.split()).num_engines == (2 if "--rollout-num-gpus 2" in words else 1)


def test_the_engines_share_of_the_memory_reaches_them(load: Load) -> None:
    config = load("--colocate", "--sglang-mem-fraction-static", "0.4")
    options = engine_options(config)
    assert options[options.index("--mem-fraction-static") + 1] == "0.4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--async", "asynchronous training does not support colocation, since it would need the same devices at the"),
        (
            "--rollout-num-gpus 3 --actor-num-gpus-per-node 2",
            "3 engines x 1 GPUs need 3 devices, and the trainer, whose devices they share, has 2 (--actor-num-nodes 1",
        ),
        ("--rollout-num-gpus-per-engine 2", "1 engines x 2 GPUs need 2 devices"),
        (
            "--actor-num-nodes 2 --actor-num-gpus-per-node 3 --rollout-num-gpus-per-engine 2",
            "--rollout-num-gpus-per-engine 2 neither divides --actor-num-gpus-per-node 3 nor",
        ),
        ("--loss-type sft_loss", "--colocate has no effect without --loss-type policy_loss"),
        ("--device cuda --update-weight-transport distributed", "NCCL refuses two processes on one device"),
        (
            "--device cuda --no-offload-train",
            "--no-offload-train on GPUs needs --sglang-mem-fraction-static: otherwise the engines, which start first,",
        ),
        ("--device cuda --no-offload-rollout", "--no-offload-rollout on GPUs needs --sglang-mem-fraction-static"),
    ],
)
def test_what_cannot_be_shared_is_refused(refused: Refused, words: str, message: str) -> None:
    assert message in refused("--colocate", *words.split())


def test_sides_that_keep_their_memory_divide_a_gpu_by_a_stated_share(load: Load) -> None:
    kept = ("--colocate", "--no-offload-train", "--no-offload-rollout")
    assert not load(*kept, "--device", "cuda", "--sglang-mem-fraction-static", "0.3").cluster.offload_train
    assert not load(*kept, "--device", "cpu").cluster.offload_rollout  # the CPU's cache has a budget of its own


def test_on_gpus_weights_are_handed_over_in_the_memory_that_both_see(load: Load, refused: Refused) -> None:
    assert load("--colocate", "--device", "cuda").sync.update_weight_transport == "tensor"
    nodes = ("--actor-num-nodes", "2")
    assert load("--colocate", "--device", "cuda", *nodes).sync.update_weight_transport == "tensor"
    disk = ("--update-weight-transport", "disk", *nodes)
    assert load("--colocate", "--device", "cuda", *disk).sync.update_weight_transport == "disk"
    assert load("--colocate", "--device", "cpu").sync.update_weight_transport == "distributed"
    assert load("--device", "cuda").sync.update_weight_transport == "distributed"
    assert "share the devices with --colocate" in refused("--device", "cuda", "--update-weight-transport", "tensor")


def test_on_one_machine_without_gpus_weights_go_through_shared_memory(load: Load) -> None:
    assert load("--device", "cpu").sync.update_weight_transport == "tensor"
    nodes = ("--ray-address", "10.0.0.1:6379", "--actor-num-nodes", "2")
    assert load("--device", "cpu", *nodes).sync.update_weight_transport == "distributed"


def test_the_help_names_no_transport_as_the_default_of_all_runs() -> None:
    flag = find_flag("update-weight-transport")
    assert flag is not None and flag.default == ""
    assert "Default: tensor on one machine without GPUs unless --colocate is set, and on GPUs if it is" in flag.help


def test_an_evaluation_has_no_trainer_to_share_devices_with() -> None:
    words = ["--hf-checkpoint", "model", "--colocate", "--eval-prompt-data", "held", "data.jsonl", "--reward", "some"]
    assert not read_request(words, "name").config.cluster.colocate


def test_engines_are_not_restarted_alone_but_the_run_is_on_request(load: Load, refused: Refused) -> None:
    assert load().restarts_engines and not load("--colocate").restarts_engines
    assert load("--colocate", "--use-fault-tolerance", "--max-restarts", "5").restarts_run
    assert "no effect without --use-fault-tolerance: nothing is restarted" in refused(
        "--colocate", "--max-restarts", "5"
    )
