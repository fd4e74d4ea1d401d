"""A question, its answers and their rewards, small enough to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.types import Group, Sample


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One sample for the terminal.  Cheap to send between processes."""

    group: int
    question: str
    label: str | None
    answer: str
    reward: float | None
    status: str
    failure: str | None = None


def question_text(prompt: str | list[dict[str, object]]) -> str:
    """The prompt for people: the text itself, or the last message that is not the assistant's."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message.get("role") != "assistant":
            return str(message.get("content", ""))
    return ""


def excerpt_of(sample: Sample) -> Excerpt:
    """What of `sample` the terminal shows."""
    return Excerpt(
        group=-1 if sample.group_index is None else sample.group_index,
        question=question_text(sample.prompt),
        label=sample.label,
        answer=sample.response,
        reward=sample.reward_value,
        status=sample.status.value,
        failure=sample.failure,
    )


def excerpts_of(groups: Sequence[Group], rollout: int) -> list[Excerpt]:
    """The best and the worst answer to one question, or one answer where all scored the same.

    Which group is shown depends on the rollout number alone, so that it changes over a run and repeats
    with it.  Groups with answers of different worth say most, so one of them is taken where there is one.
    """
    scored = [
        sorted(with_reward, key=lambda sample: sample.reward_value or 0.0)
        for group in groups
        if (with_reward := [sample for sample in group.samples if sample.reward is not None])
    ]
    if not scored:
        return []
    mixed = [ranked for ranked in scored if ranked[0].reward_value != ranked[-1].reward_value]
    if mixed:
        ranked = mixed[rollout % len(mixed)]
        return [excerpt_of(ranked[-1]), excerpt_of(ranked[0])]
    return [excerpt_of(scored[rollout % len(scored)][0])]
