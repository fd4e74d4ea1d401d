"""The update of the weights without extensions: in parts, and with one norm of all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slime.train import optimizer
from slime.train.optimizer import GroupStepAdam, _l2_norm, clip_grads


def updated(at_once: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], list[int]]:
    """Parameters after three updates, and how many of them each call of torch's update got."""
    calls = []
    real = optimizer.adam
    monkeypatch.setattr(optimizer, "_BYTES_AT_ONCE", at_once)
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
    whole, [of_whole, *_] = updated(1 << 28, monkeypatch)
    parts, of_parts = updated(4 * 8, monkeypatch)
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


def test_the_norm_waits_for_no_device() -> None:
    nowhere = [torch.empty(3, device="meta"), torch.empty(5, device="meta")]
    assert _l2_norm(0, torch.zeros(1), [nowhere], False)[0].device.type == "meta"


def test_megatrons_gradient_norm_is_computed_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.randn(size) for size in (3, 1000, 70)]
    calls = []
    monkeypatch.setattr(optimizer, "_l2_norm", lambda *words: calls.append(words) or _l2_norm(*words))
    # As where neither TransformerEngine nor Apex is, and with one rank.
    monkeypatch.setattr(clip_grads, "l2_norm_impl", clip_grads.l2_norm_impl)
    monkeypatch.setattr(optimizer.megatron_optimizer, "USING_PYTORCH_OPTIMIZER", True)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    optimizer.install_adam()
    norm = clip_grads.get_grad_norm_fp32(gradients, 2)
    assert norm == pytest.approx(sum(one.double().square().sum() for one in gradients).sqrt().item(), rel=1e-6)
    assert [len(words[2][0]) for words in calls] == [3]
