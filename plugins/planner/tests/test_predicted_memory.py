"""The memory that a dry run predicts is what the ranks of a real trainer hold."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.model_scripts import layouts
from tests.support.families import read_architecture
from tests.support.tiny_models import make_tiny_model
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.config import RunConfig
from slime_planner import memory_here, slime_plan_lines
from slime_planner.at_hand import checkpoint_at_hand, host_at_hand
from slime_planner.memory_here import memory_notes
from slime_planner.predicted_cache import engine_memory
from slime_planner.predicted_memory import logits_memory, rank_memory


def held(launcher: RankLauncher, config: Any) -> tuple[int, int, int]:
    """The bytes of this rank's weights, gradients and optimizer states after a step."""
    import torch

    rank = launcher.start(config, Centred())
    rank.train(make_batch(samples=8))
    # Latent attention without a query projection and the like have no other buffers that are weights.
    weights = [tensor for chunk in rank.policy.chunks for tensor in chunk.parameters()]
    biases = [
        tensor for chunk in rank.policy.chunks for name, tensor in chunk.named_buffers() if name.endswith("expert_bias")
    ]
    gradients = [weight.main_grad for weight in weights if weight.requires_grad]
    states: dict[int, torch.Tensor] = {}
    optimizer = rank.policy.optimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for weight, state in part.optimizer.state.items():
            states |= {id(value): value for value in state.values() if torch.is_tensor(value) and value.ndim}
            if config.megatron.get("bf16"):
                states[id(weight)] = weight  # the float32 copy that is optimized
    rank.close()
    return tuple(
        sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for tensors in ([*weights, *biases], gradients, states.values())
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "ranks", "megatron"),
    [
        (
            "deepseek_v3",
            False,
            4,
            {
                "bf16": True,
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
            },
        ),
        ("qwen3", True, 2, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}),
        ("qwen3_moe", False, 2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}),
        ("qwen2", False, 2, {"bf16": True, "tensor_model_parallel_size": 2, "lora_rank": 4}),
    ],
    ids=["tensor, expert and data parallel, bfloat16", "uneven pipeline, tied", "experts, whole optimizer", "adapters"],
)
def test_the_prediction_is_what_ranks_hold(
    tmp_path: Path, family: str, tied: bool, ranks: int, megatron: dict[str, Any]
) -> None:
    megatron = dict(megatron)
    folder = make_tiny_model(tmp_path, family, seed=3, tied=tied)
    lora = {name: megatron.pop(name) for name in list(megatron) if name == "lora_rank"}
    config = make_config(folder, world_size=ranks, megatron=megatron, **lora)
    real = run_ranks(held, ranks, config)
    stages = rank_memory(config, read_architecture(folder))
    for number, (weights, gradients, _) in enumerate(real):
        stage = stages[number * len(stages) // ranks]
        assert (weights, gradients) == (stage.weights, stage.gradients)
    # A rank's share of the states begins and ends anywhere, so that only their sum is exact.
    assert sum(states for *_, states in real) == sum(stage.optimizer for stage in stages) * ranks / len(stages)


def config_of(layout: str = "", **options: Any) -> RunConfig:
    """A run with Megatron's `layout` and other options."""
    from slime.config import read_config

    return read_config(
        [*layout.split(), *(word for key, value in options.items() for word in (f"--{key}", str(value)))]
    )


def test_adam_in_bfloat16_takes_18_bytes_a_number() -> None:
    model = layouts.architecture(layouts.published("qwen3-8B"))
    numbers = sum(map(math.prod, model.shapes.values()))
    [alone] = rank_memory(config_of("--bf16"), model)
    assert (alone.weights, alone.gradients, alone.optimizer) == (2 * numbers, 4 * numbers, 12 * numbers)
    [eight] = rank_memory(config_of("--bf16 --actor-num-gpus-per-node 8"), model)
    assert (eight.weights, eight.gradients, eight.optimizer) == (2 * numbers, 4 * numbers, 12 * numbers / 8)
    [sgd] = rank_memory(config_of("--optimizer sgd --sgd-momentum 0"), model)
    assert (sgd.weights, sgd.gradients, sgd.optimizer) == (4 * numbers, 4 * numbers, 0)


def test_the_memory_of_a_nodes_host_is_that_of_its_processes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", seed=0)
    numbers = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    two = f"--hf-checkpoint {folder} --actor-num-gpus-per-node 2 --rollout-num-gpus 2"
    # Two ranks with weights and gradients, and half of Adam's moments each, and two engines with weights.
    assert host_at_hand(config_of(f"{two} --device cpu")) == (2 * (4 + 4 + 8 / 2) * numbers + 2 * 4 * numbers, 0)
    # What the ranks give up for the engines, weights and optimizer, in memory that is rounded up.
    assert host_at_hand(config_of(f"{two} --device cuda --bf16 --colocate")) == (2 * 2 * (2 + 12 / 2) * numbers, 0)
    assert host_at_hand(config_of("--hf-checkpoint /no/such/folder --device cpu")) == (0, 0)


@pytest.mark.parametrize("option", ["--moe-expert-capacity-factor 1.5", "--overlap-moe-expert-parallel-comm"])
def test_what_changes_activations_alone_keeps_no_prediction_from_hosts_and_checkpoints(
    tmp_path: Path, option: str
) -> None:
    words = f"--hf-checkpoint {make_tiny_model(tmp_path, 'qwen3', seed=0)} --device cuda --bf16 --colocate"
    for at_hand in (host_at_hand, checkpoint_at_hand):
        assert at_hand(config_of(f"{words} {option}")) == at_hand(config_of(words)) != at_hand(config_of())
        assert at_hand(config_of(f"{words} --fp4 e2m1")) == at_hand(config_of())


def test_adapters_alone_have_gradients() -> None:
    model = layouts.architecture(layouts.published("qwen3-8B"))
    numbers = sum(map(math.prod, model.shapes.values()))
    [memory] = rank_memory(config_of("--bf16 --lora-rank 16 --lora-alpha 32"), model)
    adapters = memory.gradients / 4
    assert 0 < adapters < 0.01 * numbers
    assert (memory.weights, memory.optimizer) == (2 * (numbers + adapters), 12 * adapters)


def test_an_adapter_of_one_layer_is_predicted_although_other_layers_are_alike() -> None:
    model = layouts.architecture(layouts.published("qwen3-8B"))
    [memory] = rank_memory(config_of("--lora-rank 16 --lora-targets model.layers.3.self_attn.q_proj"), model)
    # A for the query projection, and B for all of what Megatron joins with it.
    assert memory.gradients == 4 * 16 * (4096 + 4096 + 2 * 1024)


def test_a_critic_takes_nearly_as_much_as_the_policy() -> None:
    model = layouts.architecture(layouts.published("qwen3-8B"))
    config = config_of("--bf16")
    [policy], [both] = rank_memory(config, model), rank_memory(config, model, critic=True)
    assert 1.9 * policy.total < both.total < 2 * policy.total


def test_logits_need_more_for_a_larger_micro_batch_up_to_a_bound() -> None:
    """A chunk of logits with its gradient, and its pieces in float32."""
    model = layouts.architecture(layouts.published("qwen3-8B"))
    row, chunk, piece = 151_936, 1 << 26, 1 << 24
    bound = {"float32": 2 * 4 * chunk + 3 * 4 * piece, "bfloat16": 2 * 2 * chunk + 4 * 4 * piece}
    assert logits_memory(config_of(), model) == bound["float32"]
    assert logits_memory(config_of("--bf16", **{"rollout-max-response-len": 32768}), model) == bound["bfloat16"]
    few = {"rollout-max-response-len": 50, "micro-batch-size": 2}
    assert logits_memory(config_of("--bf16", **few), model) == (2 * 2 + 4 * 4) * 100 * row
    divided = config_of("--bf16 --tensor-model-parallel-size 8 --actor-num-gpus-per-node 8", **few)
    assert logits_memory(divided, model) == (2 * 2 + 4 * 4) * 100 * row / 8


def test_an_engine_copies_key_and_value_heads_that_are_fewer_than_its_devices() -> None:
    model = layouts.architecture(layouts.published("qwen3-30B-A3B"))  # 4 key-value heads of 128
    one, four, eight = (
        engine_memory(config_of("--device cuda", **{"rollout-num-gpus-per-engine": n}), model) for n in (1, 4, 8)
    )
    key_value = 48 * 2 * 4 * 128 * 2048 * 2
    whole = 4 * four - one  # what every device has, three times
    assert one == 2 * 30_532_122_624
    assert 8 * eight == pytest.approx(one + key_value + whole / 3 * 7)


def test_what_cannot_be_predicted_is_said() -> None:
    model = layouts.architecture(layouts.published("qwen3-0.6B"))
    for device in ("cpu", "cuda"):
        lines = slime_plan_lines(config_of(f"--fp4 e2m1 --device {device}"), model, False, True, None)
        assert lines["memory"] == ["not predicted with --fp4"] and lines.keys() == {"memory", "notes"}


def test_a_run_that_does_not_fit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layouts.architecture(layouts.published("qwen3-0.6B"))
    need = 596_049_920 * (16 + 4)  # the trainer's 16 bytes a number in float32, the engine's 4
    for have, noted in ((need, False), (need - 1, True)):
        monkeypatch.setattr(memory_here.psutil, "virtual_memory", lambda have=have: SimpleNamespace(total=have))
        notes = [*memory_notes(config_of("--device cpu"), model, critic=False, with_engines=True)]
        assert bool(notes) == noted
    assert notes == [
        "weights, gradients and optimizer need 11.1 GiB, and this machine has 11.1 GiB: use a smaller model or fewer"
        " ranks and engines"
    ]


@pytest.mark.slow
def test_the_table_of_the_scripts_is_current() -> None:
    page = layouts.PAGE.read_text(encoding="utf-8")
    assert layouts.written(page) == page, "run `python -m tests.model_scripts.layouts`"
