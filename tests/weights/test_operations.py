"""What a layer computes for a token, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from slime.weights.operations import active_weights, layer_weights, mixtures, pair_operations

#: query 8x6, key and value 8x3 each, output 6x8: 144 numbers
GROUPED = {"hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 3}
#: of the compressed keys and values 8x(4+1), keys and values 4x2x(3+5), output 2x5x8
LATENT = {
    "multi_latent_attention": True, "hidden_size": 8, "num_attention_heads": 2, "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 1, "v_head_dim": 5, "kv_lora_rank": 4,
}  # fmt: skip
DENSE = {"ffn_hidden_size": 10, "gated_linear_unit": True}
#: two of six experts compute a token, and one that all tokens share; the router is 8x6
MIXTURE = {
    "num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 5, "moe_shared_expert_intermediate_size": 7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("attention", "numbers"),
    [
        (GROUPED, 48 + 24 + 24 + 48),
        (LATENT, 8 * 2 * 4 + 40 + 64 + 80),
        ({**LATENT, "q_lora_rank": 3}, 8 * 3 + 3 * 2 * 4 + 40 + 64 + 80),
    ],
)
def test_a_layer_multiplies_a_token_by_its_own_matrices(attention: dict[str, Any], numbers: int) -> None:
    sizes = {**attention, **DENSE, **MIXTURE}
    assert layer_weights(sizes, mixture=False) == numbers + 3 * 8 * 10
    assert layer_weights(sizes, mixture=True) == numbers + 3 * 8 * (2 * 5 + 7) + 8 * 6
    sizes = {**sizes, "gated_linear_unit": False, "moe_shared_expert_intermediate_size": None}
    assert layer_weights(sizes, mixture=False) == numbers + 2 * 8 * 10
    assert layer_weights(sizes, mixture=True) == numbers + 2 * 8 * 2 * 5 + 8 * 6


def test_each_layer_is_counted_as_what_it_is() -> None:
    sizes = {**GROUPED, **DENSE, **MIXTURE, "num_layers": 3, "moe_layer_freq": [0, 1, 1]}
    assert mixtures(sizes) == [False, True, True]
    assert active_weights(sizes) == 144 + 240 + 2 * (144 + 408 + 48)
    assert mixtures({**GROUPED, **DENSE, "num_layers": 2}) == [False, False]


def test_a_pair_is_a_score_and_a_part_of_the_sum_in_every_head() -> None:
    assert pair_operations(GROUPED) == 2 * 2 * (3 + 3)
    assert pair_operations(LATENT) == 2 * 2 * (3 + 1 + 5)
    assert pair_operations({"hidden_size": 8, "num_attention_heads": 2}) == 2 * 2 * (4 + 4)
