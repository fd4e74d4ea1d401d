"""The strategies draw inputs that a run may pass to a component."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from slime.plugin import EstimatorBatch, Group, Reward, Sample
from slime.plugins.contracts import Asked, check_generated, check_reward
from slime.testing import strategies

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(strategies.samples(index=7, group_index=2))
def test_samples_are_what_a_generator_may_return(sample: Sample) -> None:
    asked = Asked(group_index=2, index=7, prompt=sample.prompt, prompt_tokens=sample.tokens[: sample.prompt_length])
    assert check_generated([sample], asked) == [sample]
    assert sample.reward_value is not None
    check_reward(Reward(sample.reward_value))


@quick
@given(strategies.groups(index=3, max_size=4))
def test_groups_share_their_index_and_number_their_samples(group: Group) -> None:
    assert [sample.index for sample in group.samples] == list(range(3000, 3000 + len(group.samples)))
    assert {sample.group_index for sample in group.samples} == {group.index} == {3}


@quick
@given(strategies.estimator_batches(max_groups=3, max_group=4, kl=True, values=True))
def test_estimator_batches_are_consistent(batch: EstimatorBatch) -> None:
    assert batch.kl is not None and batch.values is not None
    shapes = [[part.shape for part in column] for column in (batch.loss_masks, batch.kl, batch.values)]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len(batch.rewards) == len(batch.group_ids) == len(batch.rollout_ids) == len(batch.loss_masks)
    for rollout in batch.rollout_ids.unique():
        assert len(batch.group_ids[batch.rollout_ids == rollout].unique()) == 1


@quick
@given(strategies.masks(max_length=5))
def test_masks_are_zeros_and_ones(mask: list[int]) -> None:
    assert 1 <= len(mask) <= 5 and set(mask) <= {0, 1}
