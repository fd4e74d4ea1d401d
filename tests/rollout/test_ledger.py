"""The states of groups, and errors if the counts are wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.rollout.collecting import SAMPLES, CountingSource, indices

from slime.errors import CheckpointError, PluginContractError, SlimeError
from slime.rollout.boundaries import CheckedSource
from slime.rollout.ledger import GroupState, PromptLedger
from slime.types import Group, Sample, Status


def ledger(source: CountingSource | None = None) -> PromptLedger:
    return PromptLedger(CheckedSource(source or CountingSource(), "data source counting", SAMPLES))


def finish(groups: list[Group]) -> list[Group]:
    """Generates in place: tokens and metadata change, and the second sample becomes two."""
    for group in groups:
        for sample in group.samples:
            sample.tokens.append(99)
            sample.metadata["turns"] = 3
            sample.response_length, sample.status, sample.reward = 1, Status.COMPLETED, 0.1 + 0.2
            sample.rollout_log_probs = [-1 / 3]
            sample.rollout_id = sample.index
        other = Sample(**vars(group.samples[1]))
        group.samples.append(other)
    return groups


def through_a_checkpoint(state: dict[str, Any]) -> PromptLedger:
    resumed = ledger()
    resumed.load(json.loads(json.dumps(state)))
    return resumed


def test_groups_in_flight_at_a_checkpoint_are_taken_first() -> None:
    run = ledger()
    finish(run.take(3))  # partly generated: the ledger does not know
    resumed = through_a_checkpoint(run.state(0))
    assert resumed.take(4) == ledger().take(4)
    resumed.check()


def test_a_source_is_asked_only_for_what_the_waiting_groups_lack() -> None:
    class Watched(CountingSource):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[int] = []

        def take(self, count: int) -> list[Group]:
            self.asked.append(count)
            return super().take(count)

    source = Watched()
    run = ledger(source)
    for group in run.take(2):
        run.give_back(group.index, [None] * SAMPLES)
    assert indices(run.take(2)) == [0, 1]
    run.give_back(1, [None] * SAMPLES)
    assert indices(run.take(3)) == [1, 2, 3]
    assert source.asked == [2, 2]


def test_the_experts_of_waiting_and_finished_samples_survive_a_checkpoint() -> None:
    run, experts = ledger(), np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    continued, finished = run.take(2)
    for group in (continued, finished):
        for sample in group.samples:
            sample.rollout_routed_experts = experts
    run.give_back(continued.index, [[sample] for sample in continued.samples])
    run.finish([finished], rollout=0)
    resumed = through_a_checkpoint(run.state(0))
    for group in (resumed.take(1)[0], resumed.buffered(1)[0]):
        for sample in group.samples:
            assert sample.rollout_routed_experts is not None
            assert sample.rollout_routed_experts.dtype == np.uint8
            assert np.array_equal(sample.rollout_routed_experts, experts)


def test_a_saved_group_does_not_share_state_with_the_generator() -> None:
    class Chats(CountingSource):
        def take(self, n: int) -> list[Group]:
            groups = super().take(n)
            for sample in (sample for group in groups for sample in group.samples):
                sample.prompt, sample.metadata = [{"role": "user", "content": "?"}], {"tools": ["a"]}
                sample.loss_mask, sample.rollout_log_probs = [1], [-0.5]
            return groups

    run = ledger(Chats())
    [group] = run.take(1)
    before = [sample.to_dict() for sample in group.samples]
    for sample in group.samples:
        assert isinstance(sample.prompt, list)
        sample.prompt[0]["content"] = "!"
        sample.metadata["tools"].append("b")
        for values in (sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample.weight_versions):
            values.append(0)  # type: ignore[union-attr, arg-type]  # none is None, one is of texts
        sample.spec_info.spec_verify_ct += 1
    [again] = through_a_checkpoint(run.state(0)).take(1)
    assert [sample.to_dict() for sample in again.samples] == before


def test_a_source_whose_groups_cannot_be_copied_is_named() -> None:
    class Odd(CountingSource):
        def take(self, n: int) -> list[Group]:
            groups = super().take(n)
            groups[-1].samples[0].metadata["tool"] = lambda: None
            return groups

    with pytest.raises(
        PluginContractError, match=r"^data source counting gave group 1 something that cannot be copied"
    ):
        ledger(Odd()).take(2)


def test_finished_groups_are_restored_exactly() -> None:
    run = ledger()
    groups = finish(run.take(3))
    run.finish(groups, rollout=5)
    resumed = through_a_checkpoint(run.state(5))
    assert resumed.buffered(5) == run.buffered(5) == groups
    assert [group.age for group in resumed.buffered(7)] == [2, 2, 2]
    assert indices(resumed.take(1)) == [3]


def test_an_untrained_batch_is_first_in_the_saved_buffer() -> None:
    run = ledger()
    run.finish(run.take(6), rollout=0)
    buffered = run.buffered(0)
    run.choose(buffered[:2], 0)
    run.choose(buffered[2:4], 1)
    state = run.state(done=1)
    assert (state["taken"], state["trained"]) == (6, 2)
    assert indices(through_a_checkpoint(state).buffered(1)) == [2, 3, 4, 5]


def test_dropped_and_trained_groups_are_only_counted() -> None:
    run = ledger()
    run.finish(run.take(4), rollout=0)
    run.drop({1: "dull", 2: "dull", 0: "stale"})
    run.choose(run.buffered(0), 0)
    resumed = through_a_checkpoint(run.state(done=1))
    state = resumed.state(done=1)
    assert (state["taken"], state["trained"], state["dropped"]) == (4, 1, {"dull": 2, "stale": 1})
    assert state["groups"] == []


def test_a_lost_group_is_reported_with_the_counts() -> None:
    run = ledger()
    run.finish(run.take(4), rollout=0)
    del run._in[GroupState.BUFFERED][2]
    with pytest.raises(
        SlimeError, match=r"do not add up: 4 taken, but 0 trained on .* \+ 3 buffered .* = 3\. .* error in slime"
    ):
        run.check()


def test_a_group_trained_on_twice_is_reported() -> None:
    run = ledger()
    groups = run.take(2)
    run.finish(groups, rollout=0)
    run.choose(groups, 0)
    with pytest.raises(SlimeError, match=r"group 0 is in a batch, expected buffered\. This is an error in slime"):
        run.choose(groups[:1], 1)
    run.trained(1)
    with pytest.raises(SlimeError, match=r"group 0 is not in any state, expected in flight"):
        run.finish(groups[:1], rollout=1)


def test_an_aborted_group_comes_before_new_ones_with_its_tokens() -> None:
    run = ledger()
    first, second = run.take(2)
    finish([first, second])
    half = Sample(group_index=0, index=0, prompt="0", tokens=[0, 5], response_length=1, rollout_log_probs=[-0.5])
    run.give_back(0, [[half], first.samples[1:]])
    run.give_back(1, [None, None])
    run.check()
    assert run.metrics()["ledger/waiting"] == run.metrics()["ledger/given_back"] == 2
    for source in (through_a_checkpoint(run.state(0)), run):
        again = source.take(3)
        assert indices(again) == [0, 1, 2]
        assert again[0].samples == [half, *first.samples[1:]]
        assert again[1:] == ledger().take(3)[1:]
        source.check()


def test_groups_are_trained_on_again_as_often_as_allowed_and_counted_once() -> None:
    run = PromptLedger(CheckedSource(CountingSource(), "data source counting", SAMPLES), max_reuse=2)
    run.finish(run.take(2), rollout=0)
    for rollout in range(3):
        assert [group.uses for group in run.buffered(rollout)] == [rollout, rollout]
        run.choose(run.buffered(rollout), rollout)
        run.trained(rollout + 1)
        run.check()
    metrics = run.metrics()
    assert (metrics["ledger/trained"], metrics["ledger/reused"], metrics["ledger/buffered"]) == (2, 4, 0)


def test_uses_are_saved_and_a_dropped_used_group_counts_as_trained() -> None:
    run = PromptLedger(CheckedSource(CountingSource(), "data source counting", SAMPLES), max_reuse=5)
    run.finish(run.take(3), rollout=0)
    run.choose(run.buffered(0)[:2], 0)
    state = json.loads(json.dumps(run.state(1)))
    resumed = PromptLedger(CheckedSource(CountingSource(), "data source counting", SAMPLES), max_reuse=5)
    resumed.load(state)
    assert [group.uses for group in resumed.buffered(1)] == [1, 1, 0]
    resumed.drop({0: "stale", 2: "dull"})
    assert resumed.state(1)["dropped"] == {"dull": 1}
    assert (resumed.metrics()["ledger/trained"], resumed.metrics()["ledger/dropped"]) == (1, 1)


def test_a_saved_state_that_lost_a_group_is_refused() -> None:
    run = ledger()
    run.finish(run.take(4), rollout=0)
    state = run.state(0)
    del state["groups"][0]
    with pytest.raises(CheckpointError, match=r"saved rollout state is incomplete: .* 4 taken"):
        through_a_checkpoint(state)


@pytest.mark.parametrize("place", ["in flight", "buffered", "in a batch", "restored"])
def test_a_duplicate_index_is_refused_with_the_sources_name(place: str) -> None:
    source = CountingSource()
    run = ledger(source)
    groups = run.take(2)
    if place != "in flight":
        run.finish(groups, rollout=0)
    if place == "in a batch":
        run.choose(groups, 0)
    if place == "restored":
        state = run.state(0)
        run = ledger(source)
        run.load(json.loads(json.dumps(state)))
    source.next = 1
    with pytest.raises(PluginContractError, match=r"^data source counting gave group 1 with samples 2, 3, but one"):
        run.take(2)


def test_an_index_may_be_reused_once_its_group_is_finished() -> None:
    source = CountingSource()
    run = ledger(source)
    run.finish(run.take(2), rollout=0)
    run.choose(run.buffered(0), 0)
    run.trained(1)
    source.next = 0
    assert indices(run.take(2)) == [0, 1]
    run.check()


def test_taking_groups_does_not_change_a_state_being_written() -> None:
    run = ledger()
    [group] = run.take(1)
    for sample in group.samples:
        sample.tokens, sample.response_length = [*sample.tokens, 7], 1
    run.give_back(0, [[sample] for sample in group.samples])
    state = run.state(0)
    [again] = run.take(1)
    again.samples[0].tokens.append(8)
    again.samples[0].metadata["turns"] = 2
    assert state["groups"][0]["samples"][0]["tokens"] == [0, 7]
    assert state["groups"][0]["samples"][0]["metadata"] == {}
