"""Samples, groups and estimator batches that look like those of a run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime.plugin import EstimatorBatch
from slime.testing.alphabet import encode
from slime.types import Group, Sample, Status

if TYPE_CHECKING:
    from torch import Tensor


def make_sample(prompt: str = "1+1=", response: str | None = "2", *, label: str | None = "2", **fields: Any) -> Sample:
    """A finished sample, with one token a character as `slime.testing.make_tokenizer` has them.

    response   None: a pending sample, which nobody has answered yet
    fields     other fields of `Sample`; they win over what follows from the texts
    """
    asked: dict[str, Any] = {"group_index": 0, "index": 0, "prompt": prompt, "tokens": encode(prompt), "label": label}
    if response is None:
        return Sample(**asked | fields)
    answer = encode(response)
    answered: dict[str, Any] = {
        "tokens": encode(prompt) + answer,
        "response": response,
        "response_length": len(answer),
        "loss_mask": [1] * len(answer),
        "rollout_log_probs": [-0.5] * len(answer),
        "weight_versions": ["1"],
        "finish_reason": "stop",
        "status": Status.COMPLETED,
        "rollout_id": fields.get("index", 0),
    }
    return Sample(**asked | answered | fields)


def make_group(rewards: Sequence[float | None] = (1.0, 0.0), *, index: int = 0, **fields: Any) -> Group:
    """Finished samples of one prompt with these rewards; `Sample.index` counts up from 1000 x `index`.

    fields   of every sample, as `make_sample` takes them
    """
    samples = []
    for number, reward in enumerate(rewards, start=1000 * index):
        own = {"group_index": index, "index": number, "rollout_id": number, "reward": reward}
        samples.append(make_sample(**{**fields, **own}))
    return Group(index, samples)


def make_batch(
    rewards: Sequence[Sequence[float]] = ((1.0, 0.0, 0.5), (2.0, 2.0)),
    *,
    masks: Sequence[Sequence[int]] | None = None,
    kl: Sequence[Sequence[float]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
    rollout_ids: Sequence[int] | None = None,
) -> EstimatorBatch:
    """An estimator's input with known numbers.

    rewards       of each group, of each of its samples; N samples in all, group after group
    masks         N x [T_i]; default: two trained tokens each
    kl, values    N x [T_i], where the estimator needs them
    rollout_ids   [N]; default: every sample is a rollout of its own
    """
    import torch

    def rows(column: Sequence[Sequence[float]]) -> list[Tensor]:
        return [torch.tensor(row, dtype=torch.float32) for row in column]

    flat = [reward for group in rewards for reward in group]
    return EstimatorBatch(
        rewards=torch.tensor(flat, dtype=torch.float32),
        group_ids=torch.tensor([index for index, group in enumerate(rewards) for _ in group], dtype=torch.int64),
        rollout_ids=torch.tensor(list(range(len(flat)) if rollout_ids is None else rollout_ids), dtype=torch.int64),
        loss_masks=rows(masks if masks is not None else [[1, 1]] * len(flat)),
        kl=None if kl is None else rows(kl),
        values=None if values is None else rows(values),
    )


def random_batch(
    sizes: Sequence[int],
    seed: int,
    *,
    equal_rewards: bool = False,
    siblings: bool = False,
    kl: bool = False,
    values: bool = False,
) -> EstimatorBatch:
    """An estimator's input as awkward as a run's: ragged, scattered, with holes in the masks.

    sizes           samples of each group; they lie shuffled in the batch, under arbitrary group and rollout numbers
    equal_rewards   one reward for all samples of a group
    siblings        some samples of a group come from one rollout, and then share its reward
    kl, values      whether there are any
    """
    dice = random.Random(seed)
    rows: list[tuple[int, int, float]] = []
    for group, size in zip(dice.sample(range(10_000), len(sizes)), sizes, strict=True):
        level = dice.choice([0.0, 1.0, dice.uniform(-3, 3)])
        rollouts = [dice.randrange(10**9) for _ in range((size + 1) // 2 if siblings else size)]
        scores = [level if equal_rewards else dice.uniform(-2, 2) for _ in rollouts]
        rows += [(group, rollouts[i % len(rollouts)], scores[i % len(rollouts)]) for i in range(size)]
    dice.shuffle(rows)
    masks = [[int(dice.random() < 0.8) for _ in range(dice.randint(1, 12))] for _ in rows]
    if len(masks) > 2:
        masks[0] = [0] * 5  # counts in statistics, and is kept out of the loss

    def noise(scale: float) -> list[list[float]]:
        return [[dice.gauss(0, scale) for _ in mask] for mask in masks]

    groups, rollout_ids, rewards = zip(*rows, strict=True)
    batch = make_batch(
        [rewards],
        masks=masks,
        kl=noise(0.1) if kl else None,
        values=noise(1.0) if values else None,
        rollout_ids=rollout_ids,
    )
    return replace(batch, group_ids=batch.group_ids.new_tensor(groups))
