"""An invented world: countries and cities with facts that nobody could know without looking them up.

A name is made of two of the syllables below.  Two worlds made of disjoint names share no fact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

SYLLABLES = tuple(f"{a}{b}{c}" for a in "bdfglmnprstvz" for b in "aeiou" for c in "lnr")[::2]
COUNTRY_FACTS = ("capital", "bird", "flower", "money")
CITY_FACTS = ("river", "tower", "market")


@dataclass(frozen=True, slots=True)
class Fact:
    """`field` of `subject` is `value`."""

    field: str
    subject: str
    value: str

    @property
    def text(self) -> str:
        """The fact as a passage."""
        return f"the {self.field} of {self.subject} is {self.value}."


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the facts that answer it in the order in which they are looked up: one, or two."""

    text: str
    facts: tuple[Fact, ...]

    @property
    def answer(self) -> str:
        """The name that is asked for."""
        return self.facts[-1].value


@dataclass(frozen=True, slots=True)
class Country:
    """A country's facts by field, and its capital's."""

    facts: dict[str, Fact]
    capital: dict[str, Fact]

    def questions(self) -> Iterator[Question]:
        """Of one fact: the bird of C; the river of M.  Of two: the river of the capital of C."""
        for fact in (*self.facts.values(), *self.capital.values()):
            yield Question(f"what is the {fact.field} of {fact.subject}?", (fact,))
        first = self.facts["capital"]
        for fact in self.capital.values():
            yield Question(f"what is the {fact.field} of the capital of {first.subject}?", (first, fact))


def all_names(rng: random.Random) -> list[str]:
    """All names there are, in random order."""
    names = [first + second for first in SYLLABLES for second in SYLLABLES]
    rng.shuffle(names)
    return names


def make_countries(count: int, names: Iterator[str]) -> list[Country]:
    """`count` countries; every name that occurs is drawn from `names` and means one thing only."""
    countries = []
    for _ in range(count):
        name = next(names)
        facts = {field: Fact(field, name, next(names)) for field in COUNTRY_FACTS}
        city = facts["capital"].value
        countries.append(Country(facts, {field: Fact(field, city, next(names)) for field in CITY_FACTS}))
    return countries


def passages(countries: list[Country]) -> list[str]:
    """Every fact as a passage."""
    return [fact.text for c in countries for fact in (*c.facts.values(), *c.capital.values())]
