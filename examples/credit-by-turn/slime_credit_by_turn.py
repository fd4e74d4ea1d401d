"""Credit by turn, as a package of one file: a reward that judges each turn, and an estimator that uses its column."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from slime.plugin import (
    Advantages,
    Context,
    EstimatorBatch,
    EstimatorSpec,
    NoOptions,
    Reward,
    RewardSpec,
    Sample,
    hookimpl,
)

slime_api = 1


@hookimpl
def slime_register_rewards() -> list[RewardSpec]:
    """The reward of this package."""
    return [
        RewardSpec(
            name="judged_turns",
            factory="slime_credit_by_turn:JudgedTurns",
            summary="1 for a correct last answer; the column `credit` judges each turn",
            isolation="none",
        )
    ]


@hookimpl
def slime_register_estimators() -> list[EstimatorSpec]:
    """The estimator of this package."""
    return [
        EstimatorSpec(
            name="by_turn",
            factory="slime_credit_by_turn:ByTurn",
            summary="the credit of a turn relative to the same turn of the prompt's other samples",
            needs=frozenset({"group"}),
            columns=frozenset({"credit"}),
        )
    ]


class JudgedTurns:
    """The reward is 1 if the last answer is the label, else 0. The column `credit` judges what each turn could know:

    - a turn that calls a tool: 1 if the tool's result is the label, else 0;
    - the last answer: 1 if it is the label, or repeats what the last tool said, else 0.

    Every token of a turn has its credit; tokens between turns have none.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        """Nothing to set."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        label = sample.label or ""
        credits = list(_credits(sample.metadata.get("messages", ()), sample.response, label))
        column = [float("nan")] * sample.response_length
        source = sample.columns.get("source")
        written = [source is None or source[token] == 0 for token in range(sample.response_length)]
        for credit, turn in zip(credits, _runs(written), strict=False):
            for token in turn:
                column[token] = credit
        return Reward(float(sample.response.strip() == label.strip()), columns={"credit": column})


def _credits(messages: Sequence[dict[str, str]], response: str, label: str) -> Iterator[float]:
    """The credit of each turn, in order; the last message is the last answer."""
    heard: list[str] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and number:
            yield float(heard[-1:] == [label.strip()])
        elif message["role"] == "tool":
            heard.append(message["content"].strip())
    yield float(response.strip() in (label.strip(), *heard[-1:]))


def _runs(flags: Sequence[bool]) -> list[list[int]]:
    """Positions of consecutive true flags, one list a run."""
    runs = itertools.groupby(range(len(flags)), key=lambda position: flags[position])
    return [list(positions) for flag, positions in runs if flag]


class ByTurn:
    """The advantage of a token is that of its turn. With the credits c of turn number k in a prompt's samples:

        A = (c - mean(c)) / (std(c) + 1e-6)      std unbiased

    It is 0 if all credits are equal, if only one sample has a turn k, and for tokens without credit.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        """Nothing to set."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        values = [mask.new_zeros(mask.shape).float() for mask in batch.loss_masks]
        same_turn: dict[tuple[int, int], list[tuple[int, list[int]]]] = defaultdict(list)
        for index, group in enumerate(batch.group_ids.tolist()):
            known = (~batch.columns["credit"][index].isnan()).tolist()
            for number, turn in enumerate(_runs(known)):
                same_turn[group, number].append((index, turn))
        for turns in same_turn.values():
            credit = batch.rewards.new_tensor([float(batch.columns["credit"][i][turn].mean()) for i, turn in turns])
            above = credit.double() - credit.double().min()
            if len(turns) < 2 or not above.any():
                continue
            relative = (above - above.mean()) / (above.std() + 1e-6)
            for (index, turn), value in zip(turns, relative.tolist(), strict=True):
                values[index][turn] = value
        return Advantages([value * mask.float() for value, mask in zip(values, batch.loss_masks, strict=True)])
