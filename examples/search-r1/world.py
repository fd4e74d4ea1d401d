"""An invented world: countries and cities with facts that can only be looked up.

A name consists of two of the syllables below. Worlds without common names share no facts.
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
    """A question, and the one or two facts that answer it, in the order in which they must be looked up."""

    text: str
    facts: tuple[Fact, ...]

    @property
    def answer(self) -> str:
        """The name that answers the question."""
        return self.facts[-1].value


@dataclass(frozen=True, slots=True)
class Country:
    """The facts of a country and of its capital, by field."""

    facts: dict[str, Fact]
    capital: dict[str, Fact]

    def questions(self) -> Iterator[Question]:
        """Questions about one fact (the bird of C; the river of M) and about two (the river of the capital of C)."""
        for fact in (*self.facts.values(), *self.capital.values()):
            yield Question(f"what is the {fact.field} of {fact.subject}?", (fact,))
        first = self.facts["capital"]
        for fact in self.capital.values():
            yield Question(f"what is the {fact.field} of the capital of {first.subject}?", (first, fact))


def all_names(rng: random.Random) -> list[str]:
    """All possible names, in random order."""
    names = [first + second for first in SYLLABLES for second in SYLLABLES]
    rng.shuffle(names)
    return names


def make_countries(count: int, names: Iterator[str]) -> list[Country]:
    """`count` countries; all their names are taken from `names`, each used once."""
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
