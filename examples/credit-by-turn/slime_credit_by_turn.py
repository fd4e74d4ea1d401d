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
    """The reward is 1 if the last answer is the label, else 0. The column `credit` judges each turn by what it knew.

    A sample's metadata has the number at the start, `start`, and what is to be added to it step by step, `changes`:

    - turn k, while there are changes left: 1 if it calls a tool whose result is the last result plus `changes[k]`;
    - the turn after the last change: 1 if it answers with the last result;
    - everything else: 0.

    A wrong step is not held against the turns after it: they go on from its result. Every token of a turn has its
    credit; tokens between turns have none.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        """Nothing to set."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        facts = sample.metadata
        credits = _credits(facts.get("messages", ()), facts.get("start", 0), facts.get("changes", ()))
        column = [float("nan")] * sample.response_length
        source = sample.columns.get("source")
        written = [source is None or source[token] == 0 for token in range(sample.response_length)]
        for credit, turn in zip(credits, _runs(written), strict=False):
            for token in turn:
                column[token] = credit
        return Reward(float(sample.response.strip() == (sample.label or "").strip()), columns={"credit": column})


def _credits(messages: Sequence[dict[str, str]], total: int, changes: Sequence[int]) -> Iterator[float]:
    """The credit of each turn, in order."""
    turns: list[list[str]] = []  # what the policy wrote in a turn, then the results of its calls
    for message in messages:
        if message["role"] == "assistant":
            turns.append([])
        turns[-1].append(message["content"].strip())
    for number, (written, *results) in enumerate(turns):
        if number < len(changes):
            yield float(results == [str(total + changes[number])])
        else:
            yield float(written == str(total))
        if results and results[-1].lstrip("-").isdecimal():  # neither an error nor a fraction
            total = int(results[-1])


def _runs(flags: Sequence[bool]) -> list[list[int]]:
    """Positions of consecutive true flags, one list a run."""
    runs = itertools.groupby(range(len(flags)), key=lambda position: flags[position])
    return [list(positions) for flag, positions in runs if flag]


class ByTurn:
    """Every token gets the advantage of its turn. With the credits c of turn number k in a prompt's samples:

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
