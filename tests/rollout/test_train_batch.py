"""The training batch: which samples, in which optimizer step, with which mask."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data import Group, Sample, Status
from slime.errors import PluginContractError
from slime.rollout.train_batch import Ragged, RoutedExperts, TrainBatch


def sample(group: int, index: int, **change: object) -> Sample:
    values = {"tokens": [1, 2, 3, 4], "response_length": 2, "reward": 1.0, "status": Status.COMPLETED}
    return Sample(group_index=group, index=index, **{**values, **change})


def groups_of(*sizes: int) -> list[Group]:
    index = iter(range(sum(sizes)))
    return [Group(g, [sample(g, next(index)) for _ in range(size)]) for g, size in enumerate(sizes)]


def test_columns_keep_group_order_and_exact_tokens() -> None:
    groups = [
        Group(7, [sample(7, 0, tokens=[5, 6, 7], response_length=1, reward=0.5, loss_mask=[0])]),
        Group(9, [sample(9, 1, rollout_id=1), sample(9, 2, rollout_id=1, reward={"score": 2.0, "fmt": 1.0})]),
    ]
    batch = TrainBatch.from_groups(groups, rollout=3, num_steps=1)
    assert batch.rollout == 3
    assert [t.tolist() for t in batch.tokens] == [[5, 6, 7], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert batch.tokens[0].dtype == np.int32
    assert batch.response_lengths.tolist() == [1, 2, 2]
    assert [m.tolist() for m in batch.loss_masks] == [[0.0], [1.0, 1.0], [1.0, 1.0]]
    assert batch.rewards.tolist() == [0.5, 1.0, 2.0]
    assert batch.group_ids.tolist() == [7, 9, 9]
    assert batch.rollout_ids.tolist() == [0, 1, 1]


def test_errors_name_samples_by_their_index_and_those_without_one_by_minus_one() -> None:
    group = Group(0, [sample(0, 4), sample(0, 0), sample(0, 1, rollout_id=9)])
    group.samples[2].index = None
    assert TrainBatch.from_groups([group], rollout=0, num_steps=1).sample_ids.tolist() == [4, 0, -1]


def test_parts_of_rewards_and_metadata_are_columns() -> None:
    rewards = [0.5, {"score": 2.0, "fmt": 1.0}, {"score": 1.0, "len": -0.5, "fmt": 0.0}]
    group = Group(0, [sample(0, n, reward=reward, metadata={"level": n}) for n, reward in enumerate(rewards)])
    batch = TrainBatch.from_groups([group], rollout=0, num_steps=1)
    assert {name: part.tolist()[1:] for name, part in batch.reward_parts.items()} == {
        "fmt": [1.0, 0.0],
        "len": [pytest.approx(np.nan, nan_ok=True), -0.5],
    }
    assert all(np.isnan(part[0]) and part.dtype == np.float32 for part in batch.reward_parts.values())
    assert batch.metadata == [{"level": 0}, {"level": 1}, {"level": 2}]


def routed(tokens: int, kind: type = np.uint8, most: int = 7) -> np.ndarray:
    return np.full((tokens - 1, 3, 2), most, dtype=kind)


def test_routed_experts_are_a_column_of_one_type() -> None:
    for kinds, most, expected in (
        ((np.uint8, np.uint8), 7, np.uint8),
        ((np.uint8, np.int32), 7, np.uint8),
        ((np.uint8, np.int16), 300, np.int16),
    ):
        arrays = [routed(4, kinds[0]), routed(4, kinds[1], most)]
        group = Group(0, [sample(0, n, rollout_routed_experts=one) for n, one in enumerate(arrays)])
        batch = TrainBatch.from_groups([group], rollout=0, num_steps=1, routed_experts=True)
        assert batch.routed_experts is not None
        found = [one for [[one]] in batch.routed_experts.parts]
        assert [one.dtype for one in found] == [expected] * 2
        assert all(np.array_equal(one, array) for one, array in zip(found, arrays, strict=True))
        assert TrainBatch.from_groups([group], rollout=0, num_steps=1).routed_experts is None


def same(one: Any, other: Any) -> bool:
    """Whether two fields of a batch are equal, type and bits."""
    if isinstance(one, RoutedExperts):
        return same(vars(one), vars(other))
    if isinstance(one, Ragged):
        return same(one.flat, other.flat) and same(one.offsets, other.offsets)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def many(count: int, lengths: Sequence[int]) -> list[Group]:
    """Samples that have everything that a sample can have."""
    samples = [
        sample(
            n // 8,
            n,
            tokens=list(range(n, n + 2 + length)),
            response_length=length,
            reward={"score": 1.0, "fmt": float(n)},
            rollout_log_probs=[-0.5] * length,
            rollout_routed_experts=routed(2 + length),
            columns={"values": [float(n)] * length} if n % 2 else {},
            metadata={"level": n},
        )
        for n, length in zip(range(count), cycle(lengths))
    ]
    return [Group(g, samples[8 * g : 8 * g + 8]) for g in range(-(-count // 8))]


@given(st.integers(0, 40), st.lists(st.integers(1, 5), min_size=1, max_size=8), st.booleans())
def test_a_batch_is_the_same_in_another_process(count: int, lengths: list[int], with_experts: bool) -> None:
    batch = TrainBatch.from_groups(many(count, lengths), rollout=3, num_steps=1, routed_experts=with_experts)
    buffers: list[pickle.PickleBuffer] = []
    there = pickle.loads(pickle.dumps(batch, 5, buffer_callback=buffers.append), buffers=buffers)
    assert vars(there).keys() == vars(batch).keys()
    assert all(same(getattr(there, name), value) for name, value in vars(batch).items())


def test_a_batch_crosses_processes_in_few_buffers() -> None:
    counts = []
    for samples in (16, 512):
        buffers: list[pickle.PickleBuffer] = []
        batch = TrainBatch.from_groups(many(samples, [3]), rollout=0, num_steps=1)
        pickle.dumps(batch, 5, buffer_callback=buffers.append)
        counts.append(len(buffers))
    assert counts[0] == counts[1] < 30


def test_large_arrays_are_not_copied_to_cross_processes() -> None:
    group = Group(0, [sample(0, n, tokens=[1] * 40_000) for n in range(3)])
    buffers: list[pickle.PickleBuffer] = []
    batch = TrainBatch.from_groups([group], rollout=0, num_steps=1)
    pickle.dumps(batch, 5, buffer_callback=buffers.append)
    sent = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers if buffer.raw().nbytes]
    assert all(any(np.shares_memory(tokens, one) for one in sent) for tokens in batch.tokens)


def test_routed_experts_stay_the_arrays_that_came_from_the_engines() -> None:
    arrays = [routed(4), routed(4)]
    group = Group(0, [sample(0, n, rollout_routed_experts=one) for n, one in enumerate(arrays)])
    batch = TrainBatch.from_groups([group], rollout=0, num_steps=1, routed_experts=True)
    assert batch.routed_experts is not None
    assert all(one is array for [[one]], array in zip(batch.routed_experts.parts, arrays, strict=True))


def test_routed_experts_are_stored_by_sets_of_layers_and_fetched_for_some_samples() -> None:
    arrays = [np.arange(tokens * 6, dtype=np.uint8).reshape(tokens, 3, 2) for tokens in (4, 5, 6)]
    stored: list[list[np.ndarray]] = []
    fetched: list[int] = []

    def put(part: list[np.ndarray]) -> int:
        stored.append(part)
        return len(stored) - 1

    def fetch(numbers: list[int]) -> list[list[np.ndarray]]:
        fetched.extend(numbers)
        return [stored[number] for number in numbers]

    whole = RoutedExperts.whole(arrays)
    divided = whole.divided([(0, 2), (1,), (0, 2), ()], put, fetch)
    assert divided.shapes == [(4, 3, 2), (5, 3, 2), (6, 3, 2)] and divided.layers == [(0, 2), (1,)]
    assert sum(one.nbytes for [one] in stored) == sum(one.nbytes for one in arrays), "each number once"
    for layers in ((0, 2), (1,)):
        for column in (whole, divided):
            found = column.take([2, 0], layers)
            assert all(np.array_equal(one, arrays[i][:, layers]) for i, one in zip((2, 0), found, strict=True))
    assert fetched == [4, 0, 5, 1], "of the samples and layers that were asked for"


@pytest.mark.parametrize(("most", "blocks", "fetched"), [(10, 5, [4, 0, 1]), (6, 3, [2, 0]), (2, 1, [0]), (1, 1, [0])])
def test_samples_share_parts_where_there_would_be_too_many(most: int, blocks: int, fetched: list[int]) -> None:
    arrays = [np.arange(tokens * 6, dtype=np.uint8).reshape(tokens, 3, 2) for tokens in (4, 5, 6, 3, 2)]
    asked: list[int] = []
    stored: list[list[np.ndarray]] = []

    def put(part: list[np.ndarray]) -> int:
        stored.append(part)
        return (len(stored) - 1) // 2

    def fetch(numbers: list[int]) -> list[list[np.ndarray]]:
        asked.extend(numbers)
        return [stored[number * 2] for number in numbers]

    divided = RoutedExperts.whole(arrays).divided([(0, 2), (1,)], put, fetch, stored=most)
    assert len(divided.parts) == blocks and len(stored) == 2 * blocks
    found = divided.take([4, 0, 1], (0, 2))
    assert all(np.array_equal(one, arrays[i][:, (0, 2)]) for i, one in zip((4, 0, 1), found, strict=True))
    assert asked == fetched, "each block once"


def test_missing_routed_experts_are_an_error_that_names_the_sample() -> None:
    group = Group(5, [sample(5, 8, rollout_routed_experts=routed(4)), sample(5, 9)])
    with pytest.raises(PluginContractError, match="sample 9 of group 5 has no rollout_routed_experts"):
        TrainBatch.from_groups([group], rollout=0, num_steps=1, routed_experts=True)


def test_routed_experts_of_other_tokens_are_an_error() -> None:
    group = Group(5, [sample(5, 8, rollout_routed_experts=routed(5))])
    with pytest.raises(ValueError, match=r"sample 8 .* shape \[4, 3, 2\], expected .* \[3, layers"):
        TrainBatch.from_groups([group], rollout=0, num_steps=1, routed_experts=True)


def test_only_trainable_samples_are_in_the_batch() -> None:
    group = Group(0, [sample(0, i, status=status) for i, status in enumerate(Status)])
    batch = TrainBatch.from_groups([group], rollout=0, num_steps=1)
    assert batch.rollout_ids.tolist() == [1, 2]  # COMPLETED and TRUNCATED


def test_removed_samples_count_in_statistics_but_not_in_the_loss() -> None:
    group = Group(0, [sample(0, 0), sample(0, 1, remove_sample=True, reward=5.0)])
    batch = TrainBatch.from_groups([group], rollout=0, num_steps=1)
    assert batch.rewards.tolist() == [1.0, 5.0]
    assert [m.tolist() for m in batch.loss_masks] == [[1.0, 1.0], [0.0, 0.0]]


def test_log_probs_are_present_if_every_sample_has_them() -> None:
    with_them = [sample(0, 0, rollout_log_probs=[-0.5, -1.0]), sample(0, 1, rollout_log_probs=[0.0, -2.0])]
    batch = TrainBatch.from_groups([Group(0, with_them)], rollout=0, num_steps=1)
    assert batch.rollout_log_probs is not None
    assert [x.tolist() for x in batch.rollout_log_probs] == [[-0.5, -1.0], [0.0, -2.0]]
    one_without = [*with_them, sample(0, 2)]
    assert TrainBatch.from_groups([Group(0, one_without)], rollout=0, num_steps=1).rollout_log_probs is None


def test_groups_stay_whole_if_the_steps_divide_them() -> None:
    batch = TrainBatch.from_groups(groups_of(2, 3, 1, 4), rollout=0, num_steps=2)
    assert batch.step_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_equal_groups_give_steps_of_the_global_batch_size_even_when_groups_must_split() -> None:
    batch = TrainBatch.from_groups(groups_of(4, 4, 4), rollout=0, num_steps=2)
    assert batch.step_ids.tolist() == [0] * 6 + [1] * 6


def test_a_rollout_is_never_split() -> None:
    rollouts = [0, 0, 0, 1, 2, 3]
    group = Group(0, [sample(0, i, rollout_id=r) for i, r in enumerate(rollouts)])
    batch = TrainBatch.from_groups([group], rollout=0, num_steps=2)
    assert batch.step_ids.tolist() == [0, 0, 0, 0, 1, 1]


def test_losing_a_sample_does_not_move_others_to_another_step() -> None:
    groups = groups_of(2, 2, 2, 2)
    for lost in groups[0].samples:
        lost.status = Status.FAILED
    batch = TrainBatch.from_groups(groups, rollout=0, num_steps=4)
    assert batch.step_ids.tolist() == [1, 1, 2, 2, 3, 3]


def test_supervised_samples_need_no_reward() -> None:
    batch = TrainBatch.from_groups([Group(0, [sample(0, 0, reward=None)])], rollout=0, num_steps=1)
    assert batch.rewards.tolist() == [0.0]


def test_nothing_trainable_gives_an_empty_batch() -> None:
    batch = TrainBatch.from_groups([Group(0, [sample(0, 0, status=Status.ABORTED)])], rollout=0, num_steps=1)
    assert len(batch.tokens) == 0 and batch.step_ids.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1]}, "1 entries in loss_mask, expected response_length = 2"),
        ({"rollout_log_probs": [-1.0, -1.0, -1.0]}, "3 entries in rollout_log_probs"),
        ({"response_length": 4}, "at least one prompt token"),
        ({"response_length": 0}, "at least one response token"),
    ],
)
def test_columns_of_the_wrong_length_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainBatch.from_groups([Group(0, [sample(0, 0, **change)])], rollout=0, num_steps=1)


def test_number_of_steps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="num_steps is 0"):
        TrainBatch.from_groups(groups_of(1), rollout=0, num_steps=0)
