"""What a call to a reward came to, in plain Python values that every process can read."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slime.contracts.rewards import check_reward, check_rewards
from slime.errors import PluginContractError
from slime.rollout.failures import Cause, Fault

#: of one sample: (value, parts), or what is wrong with its reward
Verdict: TypeAlias = tuple[float, dict[str, float]] | str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One verdict per sample, or the fault that left all of them without; and how long the call took."""

    verdicts: Sequence[Verdict] | Fault
    seconds: float

    def pack(self) -> bytes:
        """As bytes; `unpack` reverses it."""
        verdicts = self.verdicts
        told = (verdicts.cause.value, verdicts.reason) if isinstance(verdicts, Fault) else verdicts
        return pickle.dumps((self.seconds, told), protocol=5)

    @classmethod
    def unpack(cls, content: bytes) -> Outcome:
        """What `pack` made."""
        seconds, told = pickle.loads(content)
        return cls(told if isinstance(told, list) else Fault(Cause(told[0]), told[1]), seconds)


def verdicts_of(answer: object, count: int) -> list[Verdict]:
    """A reward's answer for `count` samples.  Raises `PluginContractError` where it is none for any of them."""
    verdicts: list[Verdict] = []
    for entry in check_rewards(answer, count):
        try:
            reward = check_reward(entry)
        except PluginContractError as error:
            verdicts.append(str(error))
        else:
            parts = {str(name): float(value) for name, value in reward.parts.items()} if reward.parts else {}
            verdicts.append((float(reward.value), parts))
    return verdicts


def no_answer(who: str, timeout_s: float) -> Fault:
    """The fault of a call that ran past its deadline."""
    return Fault(Cause.HUNG, f"{who}: no score after {timeout_s:g} s (timeout_s)")
