"""From flags and a model folder to Megatron's dataclasses: corrections and refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.train.harness import make_config

from slime.errors import ConfigError
from slime.plugin.architecture import Architecture
from slime.train.optimizer import build_scheduler
from slime.train.settings import TrainSettings, merge_architecture, train_settings

FOLDER = Architecture(
    "none",
    {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 128,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
    },
    {
        "vocab_size": 100,
        "max_sequence_length": 512,
        "rotary_base": 10000.0,
        "share_embeddings_and_output_weights": True,
    },
    (),
)


def settings(world_size: int = 1, **megatron: Any) -> TrainSettings:
    return train_settings(make_config(None, world_size=world_size, megatron=megatron), FOLDER)


def test_settings_that_are_always_set() -> None:
    built = settings()
    transformer = built.transformer
    assert (transformer.hidden_dropout, transformer.attention_dropout) == (0.0, 0.0)
    assert transformer.calculate_per_token_loss and transformer.variable_seq_lengths
    assert built.optimizer.use_distributed_optimizer and built.ddp.use_distributed_optimizer
    assert transformer.activation_func is F.silu
    assert built.optimizer.lr == 1e-2 and built.optimizer.min_lr == 0.0


def test_flags_unsupported_on_cpu_are_off() -> None:
    built = settings(bias_dropout_fusion=True, masked_softmax_fusion=True, cuda_graph_impl="local")
    assert not built.transformer.bias_dropout_fusion
    assert not built.transformer.masked_softmax_fusion
    assert built.transformer.cuda_graph_impl == "none"


def test_bf16_reaches_model_pipeline_and_optimizer() -> None:
    built = settings(bf16=True)
    assert built.transformer.bf16 and built.optimizer.bf16
    for dtype in (
        built.transformer.params_dtype,
        built.transformer.pipeline_dtype,
        built.optimizer.params_dtype,
    ):
        assert dtype is torch.bfloat16
    assert built.ddp.grad_reduce_in_fp32


def test_types_that_a_file_cannot_hold_are_restored() -> None:
    from megatron.core.transformer.enums import AttnBackend

    built = settings(attention_backend="flash", exp_avg_dtype="fp32")
    assert built.transformer.attention_backend is AttnBackend.flash
    assert built.optimizer.exp_avg_dtype is torch.float32


def test_plain_gradient_descent_runs_without_the_distributed_optimizer() -> None:
    built = settings(optimizer="sgd")
    assert not built.optimizer.use_distributed_optimizer and not built.ddp.use_distributed_optimizer


def test_recompute_activations_is_selective() -> None:
    assert settings(recompute_activations=True).transformer.recompute_granularity == "selective"


def test_sequence_parallel_without_tensor_parallel_is_dropped() -> None:
    assert not settings(sequence_parallel=True).transformer.sequence_parallel


def test_virtual_stages_by_layers_use_unbatched_exchange() -> None:
    transformer = settings(2, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1).transformer
    assert transformer.virtual_pipeline_model_parallel_size == 2
    assert transformer.overlap_p2p_comm and not transformer.batch_p2p_comm


def test_the_vocabulary_is_padded_to_what_the_layout_needs() -> None:
    built = settings(2, tensor_model_parallel_size=2, make_vocab_size_divisible_by=64)
    assert (built.vocab_size, built.gpt["vocab_size"]) == (100, 128)


@pytest.mark.parametrize(
    ("world_size", "flags", "message"),
    [
        (1, {"hidden_size": 128}, "--hidden-size says 128, and config.json of --hf-checkpoint says 64"),
        (
            1,
            {"untie_embeddings_and_output_weights": True},
            "--untie-embeddings-and-output-weights says True, and .* says False",
        ),
        (1, {"rotary_base": 1e6}, "--rotary-base says 1000000.0, and .* says 10000.0"),
        (1, {"squared_relu": True}, r"--squared-relu or --quick-geglu\) says 'squared_relu'"),
        (1, {"rotary_interleaved": True}, "--rotary-interleaved says True, and .* says False"),
        (8, {"tensor_model_parallel_size": 8}, "size 8 does not divide the model's 4 attention heads"),
        (
            2,
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
            "not a multiple",
        ),
        (1, {"num_moe_experts": 8}, "--num-experts says 8, and config.json of --hf-checkpoint says None"),
        (1, {"moe_aux_loss_coeff": 0.1}, "--moe-aux-loss-coeff 0.1: the model has no experts"),
        (1, {"use_megatron_fsdp": True}, "--use-megatron-fsdp True is not supported"),
        (1, {"optimizer": "sgd", "use_distributed_optimizer": True}, "only Adam"),
        (1, {"optimizer": "muon"}, "--optimizer 'muon' is not one of adam, sgd"),
        (1, {"recompute_granularity": "everything"}, "Megatron's TransformerConfig refuses"),
        (
            1,
            {"cuda_graph_scope": "atn"},
            "Megatron's TransformerConfig refuses these options: 'atn' is no name that it knows",
        ),
    ],
)
def test_unsupported_settings_are_refused(world_size: int, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(world_size, **flags)


def test_prompts_cannot_be_shared_in_a_model_that_does_not_know_how() -> None:
    """Unstated they are not shared there, without a word; stated it is refused."""
    experts = replace(FOLDER, transformer=FOLDER.transformer | {"num_moe_experts": 8, "moe_ffn_hidden_size": 32})
    with pytest.raises(ConfigError, match="--share-prompts has no effect: the model has experts"):
        train_settings(make_config(None, share_prompts=True), experts)
    with pytest.raises(ConfigError, match="--share-prompts has no effect: the model's family has modules of its own"):
        train_settings(make_config(None, share_prompts=True), FOLDER, layer_specs=print)
    for share in (None, False):
        train_settings(make_config(None, share_prompts=share), experts, layer_specs=print)
    train_settings(make_config(None, share_prompts=True), FOLDER)


def test_agreeing_flags_are_accepted() -> None:
    built = settings(
        num_layers=4,
        swiglu=True,
        group_query_attention=True,
        num_query_groups=2,
        vocab_size=100,
        rotary_base=10000,
    )
    assert built.transformer.num_layers == 4


def test_flags_alone_describe_a_model() -> None:
    transformer, gpt = merge_architecture(
        None, {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64, "swiglu": True}
    )
    assert transformer["activation_func"] == "silu" and gpt["vocab_size"] == 64
    assert not gpt["share_embeddings_and_output_weights"]


def test_missing_architecture_flags_are_listed() -> None:
    with pytest.raises(ConfigError, match="--hidden-size, --num-attention-heads, --vocab-size"):
        merge_architecture(None, {"num_layers": 2})


def learning_rates(steps: int, **flags: Any) -> list[float]:
    """The learning rate of each optimizer step."""
    config = make_config(None, megatron={"lr": 1.0} | flags, num_rollout=5, steps=2)
    optimizer = SimpleNamespace(param_groups=[{}])
    scheduler = build_scheduler(config, train_settings(config, FOLDER), optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return rates


def test_learning_rate_is_constant_by_default() -> None:
    assert learning_rates(4) == [1.0] * 4


def test_learning_rate_warms_up_and_decays_over_the_run_in_optimizer_steps() -> None:
    rates = learning_rates(11, lr_decay_style="linear", lr_warmup_iters=2, min_lr=0.2)
    assert rates == pytest.approx([0, 0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lr_warmup_iters": 10}, "warm up for 10 steps of 10"),
        ({"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, "exclude each other"),
        ({"min_lr": 2.0}, "--min-lr 2.0 is not between 0 and --lr 1.0"),
    ],
)
def test_an_inconsistent_schedule_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learning_rates(1, **flags)


EXPERTS = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_score_function": "sigmoid",
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "rope_type": "rope",
}


def settings_of(extra: dict[str, Any], world_size: int = 1, **megatron: Any) -> TrainSettings:
    folder = replace(FOLDER, transformer=FOLDER.transformer | extra, gpt=FOLDER.gpt | {"rotary_base": 5e4})
    return train_settings(make_config(None, world_size=world_size, megatron=megatron), folder)


@pytest.mark.parametrize(
    "flags",
    [
        {"moe_layer_freq": [0, 1, 1, 1], "num_moe_experts": 8},
        {"moe_router_num_groups": 1, "moe_router_group_topk": 1},
        {"moe_router_pre_softmax": True},
        {"moe_router_topk_scaling_factor": 1.0},
        {"mscale": 2.0, "mscale_all_dim": 3.0, "beta_fast": 5.0, "rotary_scaling_factor": 1.0},
    ],
    ids=str,
)
def test_flags_that_mean_the_same_model_are_accepted(flags: dict[str, Any]) -> None:
    plain, stated = (settings_of(EXPERTS | LATENT, **more).transformer for more in ({}, flags))
    assert stated.moe_layer_freq == plain.moe_layer_freq == [0, 1, 1, 1]
    assert stated.rotary_scaling_factor == 1.0, "it would scale attention although there is no YaRN"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"moe_layer_freq": 1}, "--moe-layer-freq says 1"),
        ({"moe_router_num_groups": 2}, "--moe-router-num-groups says 2"),
        ({"moe_router_score_function": "softmax"}, "--moe-router-score-function says 'softmax'"),
        ({"kv_lora_rank": 64}, "--kv-lora-rank says 64"),
        ({"rotary_scaling_factor": 40.0}, "--rotary-scaling-factor says 40.0"),
    ],
    ids=str,
)
def test_flags_that_contradict_the_folder_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(EXPERTS | LATENT, **flags)


def test_layers_for_multi_token_prediction_are_not_built() -> None:
    """The command line compares their number with the folder's; the trainer carries them."""
    assert settings_of({}, mtp_num_layers=1).transformer.mtp_num_layers is None


def test_norms_that_the_folder_does_not_have_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--post-mlp-layernorm says True, and config\.json of --hf-checkpoint says False"
    ):
        settings_of({}, post_mlp_layernorm=True)


def test_latent_attention_has_the_folders_rotary_base() -> None:
    transformer = settings_of(LATENT).transformer
    assert transformer.multi_latent_attention and transformer.v_head_dim == 12
    assert transformer.rotary_base == 5e4


@pytest.mark.parametrize("extra", [EXPERTS, LATENT], ids=["experts", "latent attention"])
def test_tensor_parallelism_brings_sequence_parallelism_where_it_must(extra: dict[str, Any]) -> None:
    assert settings_of(extra, 2, tensor_model_parallel_size=2).transformer.sequence_parallel
    assert not settings_of({}, 2, tensor_model_parallel_size=2).transformer.sequence_parallel
    with pytest.raises(ConfigError, match="--no-sequence-parallel: it is on by default"):
        settings_of(extra, 2, tensor_model_parallel_size=2, sequence_parallel=False)


def test_experts_are_dealt_evenly() -> None:
    assert settings_of(EXPERTS, 2, expert_model_parallel_size=2).transformer.expert_model_parallel_size == 2
    with pytest.raises(ConfigError, match="--expert-model-parallel-size 3 does not divide the model's 8 experts"):
        settings_of(EXPERTS, 3, expert_model_parallel_size=3)
    with pytest.raises(ConfigError, match="--expert-tensor-parallel-size 3 does not divide the experts' 32"):
        settings_of(EXPERTS, 3, expert_tensor_parallel_size=3)


def test_routers_compute_in_float32_and_keep_their_bias() -> None:
    transformer = settings_of(EXPERTS).transformer
    assert transformer.moe_router_dtype == "fp32" and transformer.moe_router_bias_update_rate == 0.0
    assert transformer.moe_aux_loss_coeff == 0.0
    assert settings_of(EXPERTS, moe_router_bias_update_rate=0.1).transformer.moe_router_bias_update_rate == 0.1
