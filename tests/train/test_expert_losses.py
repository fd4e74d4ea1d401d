"""Mixtures of experts beside a reference: who chooses which experts, and what auxiliary losses count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.train.expert_models import AUXILIARY, config_for, random_routes, with_routes
from tests.train.harness import Centred, RankLauncher, make_batch, run_ranks
from tests.train.whole_models import fill

from slime.plugin import Advantages, EstimatorBatch, EstimatorSpec
from slime.rollout.train_batch import TrainBatch
from slime.train.routing import routers_of


class Records(Centred):
    """Keeps the KL that it was given first; later calls check the contract, with the samples in another order."""

    kl: Any = None

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        self.kl = self.kl or batch.kl
        return super().advantages(batch)


NEEDS_REFERENCE = EstimatorSpec(name="records", factory="none:None", needs=frozenset({"reference"}))


def step_with_reference(launcher: RankLauncher, config: Any, batch: TrainBatch) -> dict[str, Any]:
    """A step with replayed routes: its z loss and the estimator's KL, and both from the log-probs and logits before."""
    estimator = Records()
    rank = launcher.start(config, estimator, NEEDS_REFERENCE)
    fill(rank.policy.chunks)
    rank.policy.optimizer.reload_model_params()
    rank.reference.renew()  # the same weights, so that only routes make a difference
    squares: list[torch.Tensor] = []
    for router in [router for chunk in rank.policy.chunks for router in routers_of(chunk)]:
        stock = router.routing

        def routing(logits: Any, padding_mask: Any = None, stock: Any = stock) -> Any:
            squares.append(logits.detach().double().logsumexp(-1).square().flatten())
            return stock(logits, padding_mask)

        router.routing = routing
    own = rank.policy.forward(batch.without_routes())
    squares.clear()
    replayed = rank.policy.forward(batch)
    z_loss = torch.cat(squares).mean().item()
    metrics = rank.train(batch)
    rank.close()
    kl = torch.from_numpy(np.concatenate(estimator.kl))
    return {"kl": kl, "own": own, "replayed": replayed, "z_loss": z_loss, "metrics": metrics}


@pytest.mark.slow
@pytest.mark.engine
def test_the_reference_chooses_its_own_experts_and_auxiliary_losses_count_every_token_once() -> None:
    """Without a coefficient of the KL too, if the estimator needs it; and where a rank pads its rows."""
    batch = make_batch(seed=1, samples=5, response=(4, 16), masked=False)
    batch = with_routes(batch, [random_routes(len(tokens) - 1, i) for i, tokens in enumerate(batch.tokens)])
    assert int((batch.tokens.lengths - 1).sum()) % 2, "tensor-parallel ranks would not pad"
    options: dict[str, Any] = {"megatron": AUXILIARY, "kl_reward_type": "k1"}
    [alone] = run_ranks(step_with_reference, 1, config_for("softmax", max_tokens_per_gpu=30, **options), batch)
    assert alone["metrics"]["micro_batches"] > 2
    assert (alone["replayed"] - alone["own"]).abs().max() > 0.01
    torch.testing.assert_close(alone["kl"], alone["replayed"] - alone["own"])
    assert alone["metrics"]["moe_z_loss"] == pytest.approx(alone["z_loss"], rel=1e-5)
    padded = config_for("softmax", "tensor 2", max_tokens_per_gpu=1000, **options)
    for found in run_ranks(step_with_reference, 2, padded, batch):
        assert found["metrics"]["moe_z_loss"] == pytest.approx(alone["z_loss"], rel=1e-5)
