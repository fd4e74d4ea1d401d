"""Training on a batch, on one page: forward, advantages, loss, optimizer.

forward      what must be known of every token before the first step: log-probs of policy and reference, values
advantages   by the estimator, on every rank alike
loss         of each token, weighted so that it does not matter how the step is divided (`slime.train.loss`)
optimizer    one update for each step of the rollout (`TrainableModel.train`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slime.errors import TrainerError
from slime.kit.processes.pulse import PULSE
from slime.observe.timing import timed
from slime.plugin import Estimator, EstimatorSpec
from slime.rollout.train_batch import loss_weights
from slime.train.advantages import (
    advantage_metrics,
    check_agreement,
    check_finite,
    check_tokens,
    estimate,
    required,
    whiten,
)
from slime.train.features import Feature
from slime.train.loss import LossColumns, LossTerms, kl_per_token, micro_batch_loss, token_means
from slime.train.model import TrainableModel
from slime.train.reference import ReferenceWeights
from slime.train.schedule import LossFunction
from slime.train.token_record import TokenRecord

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.config.options import AlgorithmOptions
    from slime.observe.logged_tokens import LoggedTokens
    from slime.rollout.train_batch import TrainBatch
    from slime.train.critic import Critic


class ModelOutputs(NamedTuple):
    """What the models say of every response token before the rollout's first step, [sum of T_i] on the CPU."""

    old: Tensor | None  #: log-probs of the policy
    ref: Tensor | None  #: log-probs of the reference
    values: Tensor | None  #: values of the critic


@dataclass
class Learner:
    """The models of a rank and what trains them."""

    config: RunConfig
    #: turns rewards into advantages, and what it declares; None: supervised
    estimator: Estimator | None
    spec: EstimatorSpec | None
    policy: TrainableModel
    reference: ReferenceWeights | None
    critic: Critic | None
    features: Sequence[Feature]
    vocab_size: int
    device: torch.device
    #: what the last `train` computed of the tokens that are logged
    logged: LoggedTokens | None = field(default=None, init=False)
    _rollouts_seen: int = field(default=0, init=False)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """See `MegatronRank.train`."""
        if not len(batch.tokens):
            raise TrainerError(f"rollout {batch.rollout} has no trainable sample: there is nothing to train on.")
        check_tokens(batch, self.vocab_size)
        algorithm = self.config.algorithm
        seconds: dict[str, float] = {}
        steps, skipped = steps_of(batch)
        critic_only = self.critic is not None and batch.rollout < algorithm.num_critic_only_steps
        policy_steps = [] if critic_only else steps
        metrics: dict[str, float] = {"skipped_steps": len(skipped)} if skipped else {}

        columns = self._weighted(batch)
        if self.estimator is not None and steps:
            check_finite(batch)
            outputs = self._forward(batch, seconds, steps=len(policy_steps))
            columns, of_advantages = self._advantages(batch, columns, outputs, seconds)
            metrics |= of_advantages
        if self.critic is not None:
            if columns.returns is not None:
                metrics |= self.critic.train(batch, steps, columns, seconds)
            self.critic.model.skip(len(skipped))
        if not critic_only:
            loss: LossFunction = partial(micro_batch_loss, LossTerms(algorithm, self.estimator, self.spec), columns)
            for feature in self.features:
                loss = feature.loss(loss, columns)
            sums, grad_norm, lr = self.policy.train(batch, policy_steps, loss, seconds)
            self.policy.skip(len(skipped))
            metrics |= self.policy.routing_metrics(steps=len(policy_steps))
            metrics |= token_means(sums, steps=max(1, len(steps))) | {"grad_norm": grad_norm, "lr": lr}
        self.logged = None if columns.record is None else columns.record.collect(batch, columns, self.config.run)
        self._rollouts_seen += 1
        every = algorithm.ref_update_interval
        if self.reference is not None and every is not None and (batch.rollout + 1) % every == 0:
            self.policy.finish_param_gather()
            self.reference.renew()
        return metrics | seconds

    def _weighted(self, batch: TrainBatch) -> LossColumns:
        """What the batch alone says of every token: how much it counts."""
        algorithm, logs = self.config.algorithm, self.config.run.log_token_columns
        weights = loss_weights(
            batch, per_token=algorithm.calculate_per_token_loss, constant_length=algorithm.loss_constant_length
        )
        return LossColumns(
            weights=torch.tensor(weights.flat, device=self.device),
            mask=torch.tensor(batch.loss_masks.flat, device=self.device),
            record=None if logs == "none" else TokenRecord(len(batch.loss_masks.flat), self.device),
        )

    def _forward(self, batch: TrainBatch, seconds: dict[str, float], *, steps: int) -> ModelOutputs:
        """What must be known before the first of the policy's `steps`."""
        algorithm, exact = self.config.algorithm, self.config.algorithm.true_on_policy_mode
        old = ref = values = None
        # In a single step the policy does not move before its tokens are used: the training pass gives old log-probs.
        if (steps > 1 and not algorithm.use_rollout_logprobs) or kl_in_reward(algorithm, self.spec) or exact:
            with timed(seconds, "time/old_log_probs"):
                old = self.policy.forward(batch)
        if exact and old is not None:
            check_agreement(batch, old, algorithm.true_on_policy_tolerance)
        if self.reference is not None and (steps or kl_in_reward(algorithm, self.spec)):
            self.policy.finish_param_gather()  # else weights still being gathered would be exchanged
            with timed(seconds, "time/ref_log_probs"), self.reference.in_model():
                # The engine's choice of experts is the policy's; another model has its own.
                ref = self.policy.forward(batch.without_routes())
        if self.critic is not None:
            with timed(seconds, "time/values"):
                values = self.critic.values(batch)
        return ModelOutputs(old, ref, values)

    def _advantages(
        self, batch: TrainBatch, columns: LossColumns, outputs: ModelOutputs, seconds: dict[str, float]
    ) -> tuple[LossColumns, dict[str, float]]:
        """Everything that the losses read, and metrics of the advantages."""
        algorithm, old, ref = self.config.algorithm, outputs.old, outputs.ref
        mask = torch.tensor(batch.loss_masks.flat)
        assert self.estimator is not None
        with timed(seconds, "time/advantages"):
            kl = None
            if kl_in_reward(algorithm, self.spec) and ref is not None and old is not None:
                kl = kl_per_token(old, ref, algorithm.kl_reward_type)
            passive = self._rollouts_seen < self.config.rollout.passive_checks
            with PULSE.inside(f"estimator {algorithm.advantage_estimator}"):
                needs = () if self.spec is None else self.spec.columns
                estimated = estimate(self.estimator, batch, kl, outputs.values, needs=needs, passive=passive)
            advantages = torch.cat(estimated.advantages)
            if algorithm.normalize_advantages:
                advantages = whiten(advantages, mask)
        if algorithm.use_rollout_logprobs:
            old = required(
                batch,
                "--use-rollout-logprobs (the default with --async, filters and over-sampling; --no-use-rollout-logprobs"
                " turns it off)",
            )
        if algorithm.off_policy_correction is not None:
            required(batch, "--off-policy-correction (or --use-tis)")
        if algorithm.off_policy_sequence_delta is not None:
            required(batch, "--off-policy-sequence-delta")
        engine = None if batch.rollout_log_probs is None else torch.tensor(batch.rollout_log_probs.flat)
        returns = None if outputs.values is None or estimated.returns is None else torch.cat(estimated.returns)
        columns = dataclasses.replace(
            columns,
            advantages=self._on_device(advantages),
            old_log_probs=self._on_device(old),
            old_by_engine=bool(algorithm.use_rollout_logprobs),
            ref_log_probs=self._on_device(ref),
            rollout_log_probs=self._on_device(engine),
            values=self._on_device(outputs.values),
            returns=self._on_device(returns),
        )
        return columns, advantage_metrics(advantages, mask)

    def _on_device(self, column: Tensor | None) -> Tensor | None:
        return None if column is None else column.to(self.device)


def kl_in_reward(options: AlgorithmOptions, spec: EstimatorSpec | None) -> bool:
    """Whether the estimator gets the KL to the reference."""
    return options.kl_coef != 0 or (spec is not None and "reference" in spec.needs)


def steps_of(batch: TrainBatch) -> tuple[list[int], list[int]]:
    """The optimizer steps that train any token, and those that train none, in order."""
    trained = np.repeat(batch.step_ids, batch.response_lengths)[batch.loss_masks.flat != 0]
    with_tokens = set(np.unique(trained).tolist())
    steps = np.unique(batch.step_ids).tolist()
    return [step for step in steps if step in with_tokens], [step for step in steps if step not in with_tokens]
