"""The update of the weights without extensions: in parts, and with one norm of all gradients."""

from __future__ import annotations

import pytest
import torch

from slime.train import optimizer
from slime.train.optimizer import GroupStepAdam, _l2_norm


def updated(at_once: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], list[int]]:
    """Parameters after three updates, and how many of them each call of torch's update got."""
    calls = []
    real = optimizer.adam
    monkeypatch.setattr(optimizer, "_AT_ONCE", at_once)
    monkeypatch.setattr(
        optimizer, "adam", lambda part, *rest, **options: calls.append(len(part)) or real(part, *rest, **options)
    )
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in (5, 3, 40, 2, 2)]
    frozen = torch.nn.Parameter(torch.randn(7))
    adam = GroupStepAdam([*parameters, frozen], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        adam.step()
    monkeypatch.setattr(optimizer, "adam", real)
    return [parameter.detach() for parameter in parameters], calls


def test_an_update_in_parts_is_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch copies what it updates at once: of all parameters together, four bytes for each number of the model."""
    whole, [of_whole, *_] = updated(1 << 26, monkeypatch)
    parts, of_parts = updated(8, monkeypatch)
    assert of_whole == 5
    assert of_parts == 3 * [2, 1, 2]  # 5 + 3 numbers, 40 alone, 2 + 2
    assert all(map(torch.equal, whole, parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_of_all_gradients(dtype: torch.dtype) -> None:
    gradients = [torch.randn(size).to(dtype) for size in (3, 1000, 70)]
    norm, _ = _l2_norm(0, torch.zeros(1), [gradients], False)
    assert norm.shape == (1,) and norm.dtype == torch.float32
    exact = sum(one.double().square().sum() for one in gradients).sqrt()
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)


def test_the_norm_is_megatrons_and_waits_for_no_device() -> None:
    from megatron.core.utils import local_multi_tensor_l2_norm

    gradients = [torch.randn(size) for size in (3, 1000, 70)]
    theirs = torch.norm(torch.tensor([torch.norm(one) for one in gradients]))  # theirs puts it on a GPU by name
    assert local_multi_tensor_l2_norm.__doc__
    assert torch.equal(_l2_norm(0, torch.zeros(1), [gradients], False)[0], theirs.view(1))
    nowhere = [torch.empty(3, device="meta"), torch.empty(5, device="meta")]
    assert _l2_norm(0, torch.zeros(1), [nowhere], False)[0].device.type == "meta"
