"""Fused layers compute what slime's own do: against formulas in float64, with gradients, compiled and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime.train import layers as own
from slime.train.output_layer import Softmax, log_probs_and_entropy
from slime_fused import layers
from slime_fused.layers import FusedNorm, FusedSoftmax

#: of the largest number of a result: sums of a hundred float32 numbers; one rounding to bfloat16 of what was exact
TOLERANCE = {torch.float32: 16 * torch.finfo(torch.float32).eps, torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2}
COMPILED = pytest.param("default", marks=pytest.mark.nightly, id="compiled")


@pytest.fixture(params=[pytest.param("force_eager", id="formula"), COMPILED])
def stance(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether functions are compiled, or run as they are written."""
    with torch.compiler.set_stance(request.param):
        yield request.param


def types(stance: str) -> list[torch.dtype]:
    """Only what is compiled does without rounding between its operations."""
    return [torch.float32] if stance == "force_eager" else [torch.float32, torch.bfloat16]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(neighbours: bool) -> Callable[..., Tensor]:
    def turn(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(a, b) -> (a cos - b sin, b cos + a sin), where the table of sines has the sign of a's."""
        if neighbours:
            a, b = t[..., ::2], t[..., 1::2]
            swapped = torch.stack((b, a), dim=-1).flatten(-2)
        else:
            half = t.size(-1) // 2
            swapped = torch.cat((t[..., half:], t[..., :half]), dim=-1)
        return t * cos + swapped * sin

    return turn


#: fused function, formula, shapes of what it gets, how many of these have gradients
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]], int]] = {
    "rms norm": (lambda x, w: layers.rms_norm(x, w, 1e-6), rms_norm, [(7, 1, 64), (64,)], 2),
    "rms norm of heads": (lambda x, w: layers.rms_norm(x, w, 1e-6), rms_norm, [(7, 4, 16), (16,)], 2),
    "halves turned": (
        lambda *given: layers.turn(*given, False),
        turned(False),
        [(7, 4, 16), (7, 1, 16), (7, 1, 16)],
        1,
    ),
    "neighbours turned": (
        lambda *given: layers.turn(*given, True),
        turned(True),
        [(7, 4, 16), (7, 1, 16), (7, 1, 16)],
        1,
    ),
    "swiglu": (layers.swiglu, lambda x: F.silu(x[..., :48]) * x[..., 48:], [(7, 1, 96)], 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_and_its_gradients_are_those_of_the_formula(name: str, stance: str) -> None:
    fused, formula, shapes, differentiable = FUNCTIONS[name]
    for dtype in types(stance):
        generator = torch.Generator().manual_seed(4)
        given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        exact = [one.double() for one in given]
        for one in [*given[:differentiable], *exact[:differentiable]]:
            one.requires_grad_()
        out, expected = fused(*given), formula(*exact)
        assert out.dtype == dtype
        factors = torch.randn(expected.shape, generator=generator).to(dtype)
        pairs = [(out, expected)]
        if differentiable:
            found = torch.autograd.grad(out, given[:differentiable], factors)
            pairs += zip(found, torch.autograd.grad(expected, exact[:differentiable], factors.double()), strict=True)
        for one, other in pairs:
            assert one.dtype == dtype
            assert (one.double() - other).abs().max() <= TOLERANCE[dtype] * other.abs().max(), dtype


def test_the_gradient_of_swiglu_is_the_formulas(stance: str) -> None:
    for dtype in types(stance):
        gate_up = torch.randn(7, 1, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
        grad = torch.randn(7, 1, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
        exact = gate_up.double().requires_grad_()
        (F.silu(exact[..., :48]) * exact[..., 48:]).backward(grad.double())
        assert exact.grad is not None
        found = layers.swiglu_back(grad, gate_up)
        assert found.dtype == dtype
        assert (found.double() - exact.grad).abs().max() <= TOLERANCE[dtype] * exact.grad.abs().max()


def test_turning_is_what_slimes_own_layers_do(stance: str) -> None:
    """With their tables, for both orders of partners, to rounding errors."""
    t = torch.randn(7, 4, 16)
    for neighbours in (False, True):
        cos, sin = own._rotary_tables(torch.randn(9, 1, 1, 16), torch.arange(7), neighbours, 1.0, t.dtype)
        found, expected = layers.turn(t, cos, sin, neighbours), own.turn(t, cos, sin, neighbours)
        assert (found - expected).abs().max() < 1e-6, stance


class _Config:
    normalization, layernorm_zero_centered_gamma = "RMSNorm", False
    params_dtype, sequence_parallel = torch.float32, False


@pytest.mark.parametrize("change", [{}, {"layernorm_zero_centered_gamma": True}, {"normalization": "LayerNorm"}])
def test_a_norm_is_slimes_own_for_every_setting(change: dict[str, object], stance: str) -> None:
    config = type("Config", (_Config,), change)
    norms = [kind(config, 64, eps=1e-5) for kind in (FusedNorm, own.Norm)]
    weight, x = torch.randn(64), torch.randn(7, 1, 64)
    for norm in norms:
        norm.weight.data.copy_(weight)
    found, expected = (norm(x) for norm in norms)
    assert (found - expected).abs().max() < 5e-6, stance
    assert [name for name, _ in norms[0].named_parameters()] == [name for name, _ in norms[1].named_parameters()]


@pytest.mark.parametrize("needed", ["both", "log-probs", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_are_those_of_log_softmax(temperature: float, needed: str, stance: str) -> None:
    """With columns that pad the vocabulary, and gradients in each of the results or in both."""
    rows, columns, vocabulary = 9, 53, 47
    for dtype in types(stance):
        generator = torch.Generator().manual_seed(3)
        logits = (3 * torch.randn(rows, columns, generator=generator)).to(dtype).requires_grad_()
        targets = torch.randint(0, vocabulary, (rows,), generator=generator)
        factors = torch.randn(2, rows, generator=generator)
        factors[0] *= needed != "entropy"
        factors[1] *= needed != "log-probs"
        found = log_probs_and_entropy(
            logits, targets, temperature=temperature, vocab_size=vocabulary, softmax=FusedSoftmax
        )
        used = {"both": slice(0, 2), "log-probs": slice(0, 1), "entropy": slice(1, 2)}[needed]
        (torch.stack(found)[used] * factors[used]).sum().backward()
        exact = logits.detach().double().requires_grad_()
        log_p = (exact[:, :vocabulary] / temperature).log_softmax(-1)
        expected = log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
        (torch.stack(expected) * factors).sum().backward()
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.float32
            assert (one - other).abs().max() < 5e-6
        assert logits.grad is not None and exact.grad is not None and logits.grad.dtype == dtype
        assert (logits.grad - exact.grad).abs().max() <= 4 * TOLERANCE[dtype] * exact.grad.abs().max()


@pytest.mark.parametrize("first", [0, 20, 40])
def test_sums_of_a_part_of_the_vocabulary_are_slimes_own(first: int, stance: str) -> None:
    """Of a tensor-parallel rank, whose columns may all be padding and may not have the target."""
    generator = torch.Generator().manual_seed(3)
    logits, targets = torch.randn(5, 20, generator=generator), torch.tensor([0, 19, 20, 33, 39])
    sums = []
    for kind in (FusedSoftmax, Softmax):
        softmax = kind(
            (targets - first).clamp(0, 19), (targets // 20 == first // 20), 40 - first, 0.8, None, piece_elements=40
        )
        sums.append(torch.empty(4, 5))
        softmax.add_sums(logits, slice(0, 5), sums[-1])
    mine = targets // 20 == first // 20
    assert (sums[0][:3] - sums[1][:3]).abs().max() < 1e-5, stance
    assert (sums[0][3] - sums[1][3])[mine].abs().sum() < 1e-5
