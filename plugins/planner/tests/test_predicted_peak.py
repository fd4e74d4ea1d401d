"""The activations and caches that a dry run predicts: worked by hand, and against real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.families import read_architecture
from tests.support.saved_tensors import NewTensors, SavedTensors
from tests.support.tiny_models import make_tiny_model
from tests.train.harness import RankLauncher, make_batch, make_config, run_ranks
from torch import Tensor

from slime.config import RunConfig, read_config
from slime.engine.server import EngineSpec, server_arguments
from slime.plugin.architecture import Architecture
from slime.train.experts import Products, _Experts
from slime_fused.experts import FusedProducts
from slime_planner.memory_here import memory_lines
from slime_planner.predicted_activations import Activations, MicroBatch, activation_memory, largest_micro_batch
from slime_planner.predicted_cache import cache_token_bytes, cache_tokens
from slime_planner.predicted_memory import not_predicted

TOKENS = 1000
DENSE = {
    "num_layers": 4,
    "hidden_size": 10,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 3,
    "ffn_hidden_size": 20,
    "gated_linear_unit": True,
    "activation_func": "silu",
}
EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 6,
    "moe_shared_expert_intermediate_size": 7,
    "moe_layer_freq": [0, 1, 1, 1],
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 5,
    "kv_lora_rank": 9,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 5,
}
#: of a dense layer, numbers of 4 bytes a token: two norms with a scale; inputs of the projections and of the network
#: (10 each); queries 12, keys 6, the whole projection 24, result 12; 4 sums of scores; gate and up 40, their product 20
LAYER = 2 * (10 + 1) + 2 * 10 + (12 + 6 + 24 + 12) + 4 + 60
#: after the layers: the last norm, the rows of the output layer, and the token's number (8 bytes)
END = (10 + 1) + 10 + 2


def model_of(**sizes: Any) -> Architecture:
    """An architecture without tensors."""
    return Architecture(family="some", transformer=DENSE | sizes, gpt={"vocab_size": 100}, rules=())


def config_of(words: str = "") -> RunConfig:
    """A run on a CPU, unless the words say otherwise."""
    return read_config([*("" if "--device" in words else "--device cpu").split(), *words.split()])


def numbers(words: str = "", *, stages: tuple[int, ...] = (0,) * 4, **sizes: Any) -> list[float]:
    """Kept for a token, in units of 4 bytes, of a rank of each stage."""
    found = activation_memory(config_of(words), model_of(**sizes), stages, MicroBatch(TOKENS, TOKENS, ""))
    return [one.kept / TOKENS / 4 for one in found]


def test_a_dense_layer_keeps_what_its_operations_need() -> None:
    assert numbers() == [4 * LAYER + END]
    assert numbers(qk_layernorm=True) == [4 * (LAYER + 12 + 6 + 4 + 2) + END]
    # In half precision norms and sums stay float32.
    inexact = 2 * 10 + (12 + 6 + 24 + 12) + 60
    assert numbers("--bf16") == [4 * (LAYER - inexact / 2) + END - 10 / 2]


def test_experts_keep_their_rows() -> None:
    # Two experts a token: rows of 10, gate and up of 6; router 8 * 9 + 2 * 24 bytes; shared experts 3 * 7.
    mixed = LAYER - 60 + 2 * (10 + 12) + (8 * 9 + 2 * 24) / 4 + 21
    assert numbers(**EXPERTS) == [LAYER + 3 * mixed + END]


def test_latent_attention_keeps_scores_on_a_cpu_where_values_are_narrower_than_keys() -> None:
    # Two norms with their results; tables 4; queries and keys 4 x 5, values and result 4 x 5; 4 sums of scores.
    latent = (5 + 1 + 5) + (9 + 1 + 9) + 4 + 80 + 4
    assert numbers(**LATENT) == [4 * (LAYER - 54 - 4 + latent) + END]
    narrow = latent - 2 * 4 * 1 - 4 + 4 * TOKENS
    assert numbers(**LATENT | {"v_head_dim": 4}) == [4 * (LAYER - 54 - 4 + narrow) + END]


def test_tensor_parallel_ranks_divide_heads_and_the_network_and_with_sequence_parallelism_the_rest() -> None:
    words = "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2"
    whole = 2 * (10 + 1) + 2 * 10
    assert numbers(words) == [4 * (whole + (LAYER - whole) / 2) + END]
    assert numbers(f"{words} --sequence-parallel") == [4 * LAYER / 2 + 2 + (10 + 1 + 10) / 2]


def test_context_parallel_ranks_gather_keys_and_values_and_have_a_mask() -> None:
    words = "--actor-num-gpus-per-node 2 --context-parallel-size 2"
    # Whole keys and values (2 x 2 x 6) in place of the rank's own (6 + 24), and a mask of 1000 keys.
    assert numbers(words) == [4 * (LAYER - 30 + 24 + TOKENS) + END]


def test_earlier_pipeline_stages_have_more_micro_batches_in_flight() -> None:
    words = "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2"
    first, last = numbers(words, stages=(0, 0, 1, 1))
    assert first == 2 * (2 * LAYER + 2 + 10)
    assert last == 2 * LAYER + 2 + 10 + END - 2
    # Four chunks: two more forward passes per stage behind it, one group of micro-batches, and the running one.
    first, last = numbers(f"{words} --num-layers-per-virtual-pipeline-stage 1", stages=(0, 1, 0, 1))
    assert first == 5 / 2 * (2 * LAYER + 2 * (2 + 10))
    assert last == 3 / 2 * (2 * LAYER + 2 * (2 + 10)) + END - 2


def test_recomputation_keeps_inputs() -> None:
    def both(words: str) -> tuple[float, float]:
        [one] = activation_memory(
            config_of(f"--recompute-granularity {words}"), model_of(), (0,) * 4, MicroBatch(TOKENS, TOKENS, "")
        )
        return one.kept / TOKENS / 4, one.again / TOKENS / 4

    assert both("full --recompute-method uniform --recompute-num-layers 2") == (2 * 10 + END, 2 * LAYER)
    assert both("full --recompute-method block --recompute-num-layers 3") == (3 * 10 + LAYER + END, 0)
    assert both("selective --recompute-modules mlp") == (4 * (LAYER - 60) + END, 60)
    assert both("selective --recompute-modules core_attn") == (4 * (LAYER - 4) + END, 4)
    # Norms: their input of 10 stays, in place of 11 and the result of 10.
    assert both("selective --recompute-modules layernorm") == (4 * (LAYER - 2 * 11) + END, 42)


def test_logits_are_gone_when_layers_are_computed_again() -> None:
    activations = Activations(kept=100, again=20, gradients=15)
    assert activations.peak(logits=50) == 150
    assert activations.peak(logits=30) == 135


@pytest.mark.parametrize(
    ("words", "prompt", "tokens", "text"),
    [
        ("--rollout-max-response-len 100", None, 8192, "8,192 tokens of shorter sequences; a guess: prompts are not"),
        ("--rollout-max-response-len 100", 50, 8192, "8,192 tokens, at most"),
        ("--rollout-max-context-len 9000", 50, 8192, "8,192 tokens of shorter sequences; a guess: the context"),
        ("--rollout-max-response-len 10000", 96, 10096, "10,096 tokens, the longest"),
        ("--micro-batch-size 4", 100, 4496, "4 x 1,124 tokens, at most"),
        ("--micro-batch-size 4", None, 4096, "4 x 1,024 tokens; a guess: prompts are not counted"),
        ("--micro-batch-size 4 --rollout-max-context-len 2000", 900, 7696, "4 x 1,924 tokens; a guess: the context"),
        ("--micro-batch-size 4 --rollout-max-context-len 1100", 900, 4400, "4 x 1,100 tokens, at most"),
    ],
)
def test_the_largest_micro_batch_is_a_bound_or_a_guess(words: str, prompt: int | None, tokens: int, text: str) -> None:
    limit = "" if prompt is None else f" --rollout-max-prompt-len {prompt}"
    found = largest_micro_batch(config_of(words + limit))
    assert found.tokens == tokens
    assert found.text.startswith(text)


def test_options_without_a_prediction_are_named() -> None:
    assert not_predicted(config_of("--cpu-offloading")) == "--cpu-offloading"
    words = "--recompute-granularity selective --recompute-modules other"
    assert not_predicted(config_of(words)) == "--recompute-modules other"
    assert not_predicted(config_of()) is None


def saved(launcher: RankLauncher, config: Any, tokens: int) -> int:
    """The bytes that a real rank keeps for its backward passes, at most."""
    rank = launcher.start(config)
    batch = make_batch(samples=1, prompt=(tokens - 15, tokens - 15), response=(16, 16), masked=False)
    with SavedTensors(weight for chunk in rank.policy.chunks for weight in chunk.parameters()) as kept:
        rank.train(batch)
    rank.close()
    return kept.peak


@pytest.mark.parametrize(
    ("family", "megatron"),
    [
        ("qwen3", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
        pytest.param("glm4", {"bf16": True}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"context_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v3",
            {
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dense, recomputed", "experts", "latent", "post norms, bfloat16", "context parallel", "tensor parallel"],
)
def test_the_prediction_is_what_ranks_keep(tmp_path: Path, family: str, megatron: dict[str, Any]) -> None:
    tokens = 512
    folder = make_tiny_model(tmp_path, family, seed=3, max_position_embeddings=tokens + 8)
    ranks = 2 if any(name.endswith("_size") for name in megatron) else 1
    config = make_config(
        folder,
        world_size=ranks,
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        micro_batch_size=1,
        # See SavedTensors.
        megatron={**megatron, "gradient_accumulation_fusion": False},
    )
    context = megatron.get("context_parallel_size", 1)
    [one] = activation_memory(config, read_architecture(folder), (0,) * 3, MicroBatch(tokens // context, tokens, ""))
    for real in run_ranks(saved, ranks, config, tokens):
        assert one.kept + one.again == pytest.approx(real, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("backend", "products"), [("torch", Products), ("fused", FusedProducts)])
@pytest.mark.parametrize("adapters", [False, True])
def test_the_prediction_is_what_the_backward_pass_of_experts_needs(
    dtype: torch.dtype, backend: str, products: type[Products], adapters: bool
) -> None:
    """With adapters the experts' matrices have no gradients."""
    experts, chosen, hidden, inner, tokens = 8, 2, 64, 32, 100
    rows = tokens * chosen
    shapes = [(rows, hidden), *[(2 * inner, hidden)] * experts, *[(hidden, inner)] * experts]
    first, *matrices = (torch.randn(shape, dtype=dtype) for shape in shapes)
    leaves = [first, torch.rand(rows)] + (matrices if not adapters else [])
    for leaf in leaves:
        leaf.requires_grad_()
    sizes = torch.full((experts,), rows // experts)
    result: Tensor = _Experts.apply(first, leaves[1], products(sizes), [None] * 2 * experts, *matrices)  # type: ignore[no-untyped-call]  # torch does not type it
    there: Any = result.grad_fn
    grad = torch.randn_like(result)
    with NewTensors([*leaves, *matrices, *there.saved_tensors, result, grad]) as made:
        torch.autograd.grad(result, leaves, grad)

    words = f"--layer-backend {backend}{' --bf16' * (dtype == torch.bfloat16)}{' --lora-rank 4' * adapters}"
    sizes_of = {**EXPERTS, "num_moe_experts": experts, "moe_ffn_hidden_size": inner, "hidden_size": hidden}
    [one] = activation_memory(config_of(words), model_of(**sizes_of), (0,) * 4, MicroBatch(tokens, tokens, ""))
    outside = 2 * tokens * hidden * dtype.itemsize  # the gradient of the layer's own input and of its result
    given = grad.numel() * dtype.itemsize
    assert one.gradients - outside - given == pytest.approx(made.peak, rel=0.01)


def test_ranks_that_divide_experts_have_a_part_of_their_gradients() -> None:
    def of(words: str) -> float:
        model = model_of(**EXPERTS | {"moe_ffn_hidden_size": 600})
        [one] = activation_memory(config_of(words), model, (0,) * 4, MicroBatch(0, 0, ""))
        return one.gradients

    whole = 8 * (10 * 600) * 4  # no tokens: matrices alone
    assert of("") == 3 * whole
    assert of("--layer-backend fused") == 5 * whole
    assert of("--layer-backend fused --fp16") == 3 * whole / 2  # for which there is no such product
    words = "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2"
    assert of(f"{words} --expert-tensor-parallel-size 2") == 3 * whole / 4
    assert of(f"{words} --expert-tensor-parallel-size 1") == 3 * whole / 2


def test_a_cache_holds_keys_and_values_or_latents() -> None:
    model, latent = model_of(), model_of(**LATENT)
    # 4 layers, keys and values of 2 heads of 3; latents of 9 and 2.
    assert cache_token_bytes(config_of(), model) == 4 * (2 * 2 * 3) * 4
    assert cache_token_bytes(config_of(), latent) == 4 * (9 + 2) * 4
    gpu = "--device cuda --rollout-num-gpus-per-engine"
    assert cache_token_bytes(config_of(f"{gpu} 2"), model) == 4 * (2 * 1 * 3) * 2
    assert cache_token_bytes(config_of(f"{gpu} 4"), model) == 4 * (2 * 1 * 3) * 2  # a copy of a head
    assert cache_token_bytes(config_of(f"{gpu} 4"), latent) == 4 * (9 + 2) * 2
    assert cache_token_bytes(config_of("--sglang-kv-cache-dtype fp8_e5m2"), model) == 4 * (2 * 2 * 3)


def test_a_cpu_engine_gets_the_predicted_tokens(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    config = make_config(folder)
    words = server_arguments(EngineSpec(model_path=str(folder), log_path=tmp_path / "log", device="cpu"), 1)
    assert words[words.index("--max-total-tokens") + 1] == str(cache_tokens(config)) == "65536"
    assert cache_tokens(config_of("--sglang-max-total-tokens 4096")) == 4096


def test_the_lines_for_users(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    config = make_config(folder, micro_batch_size=2, rollout_max_context_len=300, rollout_max_response_len=250)
    config = config.with_options("rollout", rollout_max_prompt_len=50)
    rank, engine = memory_lines(config, read_architecture(folder), critic=False, with_engines=True)
    assert rank.endswith("(micro-batches of 2 x 300 tokens, at most) + 1.8 MiB in passing")
    assert engine.endswith("MiB; KV cache 96.0 MiB (65,536 tokens of 1.5 KiB, or what fits)")
