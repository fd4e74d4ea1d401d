"""A trainer whose memory goes to the host between two steps trains exactly as one that keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.critics import Gae
from tests.train.critics import start as with_critic
from tests.train.harness import RankLauncher, make_batch, make_config, run_ranks

from slime.engine.ports import LOOPBACK, ReservedPort
from slime.rollout.train_batch import TrainBatch
from slime.train import offload
from slime.train.offload import HostCopies, ModelMemory, optimizer_tensors, pieces_of


def kept_and_moved(launcher: RankLauncher, config: Any, batch: TrainBatch, port: int) -> list[tuple[Any, ...]]:
    """The metrics of three rollouts and the weights after them; the second time everything moves in between."""
    kept = trained(launcher, config, batch, moves=False)
    return [kept, trained(replace(launcher, port=port), config, batch, moves=True)]


def trained(launcher: RankLauncher, config: Any, batch: TrainBatch, *, moves: bool) -> tuple[Any, ...]:
    if moves:
        offload.on_device = lambda _: True  # a CPU's memory counts as that of the device
    rank, metrics = with_critic(launcher, config), []
    for number in range(3):
        metrics.append({k: v for k, v in rank.train(batch).items() if not k.startswith("time/")})
        if moves:
            rank.release_memory(["training"])
            if number == 1:  # the weights can be sent
                assert all(tensor.isfinite().all() for _, tensor in rank.named_hf_weights())
            rank.release_memory(["weights"])
            for model in (rank.policy, rank.critic.model):
                assert held(model.optimizer, model.chunks) == 0
            rank.restore_memory(["weights", "training"])
    weights = dict(rank.named_hf_weights())
    rank.close()
    return metrics, weights


def held(optimizer: Any, chunks: list[Any]) -> int:
    """Bytes of the weights, the optimizer's state and the gradient buffers."""
    tensors = [*optimizer_tensors(optimizer)]
    for chunk in chunks:
        tensors += [*chunk.parameters(), *chunk.buffers()]
        tensors += [one.main_grad for one in chunk.parameters() if hasattr(one, "main_grad")]
    return sum({offload.storage_of(one): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "megatron"),
    [
        (1, {"use_distributed_optimizer": False}),
        (1, {"bf16": True, "use_distributed_optimizer": False}),
        (2, {"bf16": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    ],
    ids=["plain", "plain-bf16", "distributed"],
)
def test_training_continues_to_the_bit(model_folder: Any, size: int, megatron: dict[str, Any]) -> None:
    folder: Path = model_folder("qwen3", tied=True)
    config = make_config(folder, world_size=size, steps=2, megatron=megatron, use_kl_loss=True, kl_loss_coef=0.1)
    port = ReservedPort(LOOPBACK)
    try:
        found = run_ranks(kept_and_moved, size, config, make_batch(samples=8, steps=2), port.number)
    finally:
        port.release()
    for (metrics, weights), (others, other_weights) in found:
        assert metrics == others
        assert weights.keys() == other_weights.keys()
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_views_keep_what_they_show_and_memory_is_shared_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "on_device", lambda _: True)
    whole = torch.arange(12.0)
    view, other, copies = whole[4:8].view(2, 2), torch.full((3,), 7.0), HostCopies()
    copies.take([view, whole, other])
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    copies.restore()
    assert torch.equal(whole, torch.arange(12.0)) and torch.equal(other, torch.full((3,), 7.0))
    view.zero_()
    assert whole[4:8].sum() == 0 and whole.sum() == 66 - 22
    copies.restore()  # nothing is held any more
    assert whole.sum() == 44


def test_what_is_moved_is_pinned_in_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    assert [*pieces_of(0)] == [0] and [*pieces_of(4 * mib)] == [4 * mib]
    assert [*pieces_of(43 * mib + 5)] == [32 * mib, 8 * mib, 3 * mib + 5]
    monkeypatch.setattr(offload, "on_device", lambda _: True)
    monkeypatch.setattr(offload, "_SMALL", 8)
    moved, copies = torch.arange(11, dtype=torch.int32), HostCopies()
    copies.take([moved])
    assert moved.untyped_storage().nbytes() == 0
    copies.restore()
    assert torch.equal(moved, torch.arange(11, dtype=torch.int32))


@pytest.mark.engine
def test_on_a_cpu_only_gradients_are_released(model_folder: Any) -> None:
    folder = model_folder("qwen3", tied=True)
    ((before, released, restored),) = run_ranks(sizes, 1, make_config(folder), make_batch())
    assert before == restored
    assert before - released == pytest.approx(before / 4, rel=0.1)  # of weights, gradients and two moments


def sizes(launcher: RankLauncher, config: Any, batch: TrainBatch) -> tuple[int, int, int]:
    rank = launcher.start(config, Gae())
    policy: Any = rank.policy
    assert isinstance(policy.memory, ModelMemory)
    policy.train(batch, [0], lambda _micro_batch, values, *_: (values.sum(), {"loss": values.sum().detach()}), {})
    found = [held(policy.optimizer, policy.chunks)]
    rank.release_memory(["training", "weights"])
    found.append(held(policy.optimizer, policy.chunks))
    rank.restore_memory(["weights", "training"])
    found.append(held(policy.optimizer, policy.chunks))
    rank.close()
    return found[0], found[1], found[2]
