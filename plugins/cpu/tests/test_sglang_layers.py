"""Layers in fewer operators have the same bits; what they do not cover is left to SGLang's own."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_cpu.sglang_layers import one_norm, short_rotation
from slime_cpu.sglang_patches import own_experts_only

HEAD = 16


def refuse(*_args: Any, **_kwargs: Any) -> Any:
    pytest.fail("SGLang's own was called")


def norm_layer(**others: Any) -> SimpleNamespace:
    layer: dict[str, Any] = {"weight": torch.rand(24) + 0.5, "hidden_size": 24, "variance_epsilon": 1e-5}
    return SimpleNamespace(**(layer | {"variance_size_override": None, "override_orig_dtype": None} | others))


@pytest.mark.parametrize("added", [True, False])
def test_a_norm_has_the_bits_of_its_formula(added: bool) -> None:
    layer, x, residual = norm_layer(), torch.randn(7, 24), torch.randn(7, 24)
    total = x + residual if added else x
    expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * layer.weight
    found = one_norm(refuse)(layer, x, residual if added else None, None)  # as SGLang's forward_cpu calls it
    assert torch.equal(found[0] if added else found, expected)
    if added:
        assert torch.equal(found[1], total)


@pytest.mark.parametrize(
    "others",
    [
        {"hidden_size": 12},
        {"variance_size_override": 12},
        {"override_orig_dtype": torch.half},
        {"weight": torch.ones(24).half()},
    ],
)
def test_other_norms_are_left_to_sglang(others: dict[str, Any]) -> None:
    assert one_norm(lambda *_: "its own")(norm_layer(**others), torch.randn(7, 24)) == "its own"


def test_a_second_addition_to_the_residual_is_left_to_sglang() -> None:
    one = torch.randn(7, 24)
    assert one_norm(lambda *_: "its own")(norm_layer(), one, one, one) == "its own"


def rotary_layer(**others: Any) -> SimpleNamespace:
    angles = torch.outer(torch.arange(50.0), 100.0 ** -torch.arange(0, 1, 2 / HEAD))
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    layer = {"is_neox_style": True, "rotary_dim": HEAD, "head_size": HEAD, "cos_sin_cache": cache}
    return SimpleNamespace(**(layer | others))


def test_a_rotation_has_the_bits_of_its_formula() -> None:
    layer, positions = rotary_layer(), torch.tensor([0, 3, 49, 7])
    query, key = torch.randn(4, 3 * HEAD), torch.randn(4, HEAD)

    def rotated(x: Tensor) -> Tensor:
        cos, sin = layer.cos_sin_cache[positions][:, None].chunk(2, -1)
        first, second = x.view(4, -1, HEAD).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).view(x.shape)

    found = short_rotation(refuse)(layer, positions, query, key)
    assert torch.equal(found[0], rotated(query)) and torch.equal(found[1], rotated(key))


@pytest.mark.parametrize(
    "others", [{"is_neox_style": False}, {"rotary_dim": HEAD // 2}, {"sin_cos_cache": torch.ones(4, HEAD)}]
)
def test_other_rotations_are_left_to_sglang(others: dict[str, Any]) -> None:
    forward, layer = short_rotation(lambda *_: ("its", "own")), rotary_layer(**others)
    assert forward(layer, torch.arange(4), torch.randn(4, HEAD), torch.randn(4, HEAD)) == ("its", "own")


def test_experts_of_other_ranks_add_nothing() -> None:
    chosen = namedtuple("chosen", "topk_weights topk_ids")
    factors = torch.tensor([2.0, 3.0])

    def compute(_layer: Any, rows: Tensor, found: Any, _config: Any) -> Tensor:
        return rows * (factors[found.topk_ids.long()] * found.topk_weights).sum(1, keepdim=True)

    rows, weights = torch.ones(3, 4), torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]])
    ids = torch.tensor([[0, -1], [-1, -1], [1, 0]])
    found = own_experts_only(compute)(None, rows, chosen(weights, ids), None)
    assert torch.allclose(found, torch.tensor([0.5, 0.0, 2.1])[:, None].expand(3, 4))
