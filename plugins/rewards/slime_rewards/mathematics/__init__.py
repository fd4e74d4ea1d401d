"""Answers read as mathematics, and compared: what the reward `math` consists of."""

from slime_rewards.mathematics.equality import equal
from slime_rewards.mathematics.reading import read
from slime_rewards.mathematics.values import Answer, Formula, Words

__all__ = ["Answer", "Formula", "Words", "equal", "read"]
