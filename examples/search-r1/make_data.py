"""A corpus to search, questions about it, and demonstrations by a teacher who often searches badly or not at all.

    python examples/search-r1/make_data.py FOLDER [SEED]

    corpus.jsonl     the facts of an invented world, one per passage, for the search tool
    train.jsonl      questions about most of its countries with their answers, for reinforcement learning
    held_out.jsonl   questions about its other countries, for evaluation only
    teacher.jsonl    conversations about another world, for the warm start: nothing in them answers these questions

A row of teacher.jsonl is one turn: its prompt is the conversation so far, its label the teacher's next message. The
results in it come from the real search tool.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from world import CITY_FACTS, COUNTRY_FACTS, Country, Question, all_names, make_countries, passages

from slime_generators.tools.search import make_search

COUNTRIES, HELD_OUT_COUNTRIES, TEACHER_COUNTRIES = 80, 24, 800
TEACHER_CONVERSATIONS = 12_000
#: passages that the tool returns; the same as in grpo.toml
RESULTS = 2

#: the teacher's answer without a search
UNKNOWN = "unknown"
#: how often the teacher does not search, searches for another field, and stops halfway to the answer
GIVES_UP, WRONG_FIELD, STOPS_HALFWAY = 0.45, 0.25, 0.3

Message = dict[str, str]


def tool_call(query: str) -> str:
    """The text with which a model calls the search tool."""
    call = {"name": "search", "arguments": {"query": query}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


class Teacher:
    """Answers questions about a world, often without searching or with a mistake."""

    def __init__(self, search: Callable[[str], str], rng: random.Random) -> None:
        self._search, self._rng = search, rng

    def turns(self, question: Question) -> Iterator[tuple[list[Message], str]]:
        """(conversation so far, the teacher's next message), until the answer."""
        messages: list[Message] = [{"role": "user", "content": question.text}]
        found = UNKNOWN
        for fact in () if self._rng.random() < GIVES_UP else question.facts:
            field = fact.field
            if self._rng.random() < WRONG_FIELD:
                fields = COUNTRY_FACTS if field in COUNTRY_FACTS else CITY_FACTS
                field = self._rng.choice([other for other in fields if other != field])
            call = tool_call(f"{field} {fact.subject}")
            yield list(messages), call
            result = self._search(f"{field} {fact.subject}")
            messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": result}]
            found = result.partition("\n")[0].rpartition(" ")[2].rstrip(".")
            if field != fact.field or self._rng.random() < STOPS_HALFWAY:
                break
        yield messages, f"answer: {found}"


def make_data(folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write the four files; returns the number of rows by file name."""
    rng = random.Random(seed)
    names = iter(all_names(rng))
    countries = make_countries(COUNTRIES, names)
    others = make_countries(TEACHER_COUNTRIES, names)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "corpus.jsonl": _write(folder / "corpus.jsonl", ({"text": text} for text in passages(countries))),
        "train.jsonl": _write(folder / "train.jsonl", _questions(countries[HELD_OUT_COUNTRIES:])),
        "held_out.jsonl": _write(folder / "held_out.jsonl", _questions(countries[:HELD_OUT_COUNTRIES])),
    }
    _write(folder / "teacher_corpus.jsonl", ({"text": text} for text in passages(others)))
    search = make_search(folder / "teacher_corpus.jsonl", RESULTS)
    rows["teacher.jsonl"] = _write(folder / "teacher.jsonl", _demonstrations(others, search, rng))
    return rows


def _questions(countries: list[Country]) -> Iterator[dict[str, Any]]:
    for country in countries:
        for question in country.questions():
            hops = len(question.facts)
            prompt = [{"role": "user", "content": question.text}]
            yield {"prompt": prompt, "label": question.answer, "metadata": {"hops": hops}}


def _demonstrations(
    countries: list[Country], search: Callable[[str], str], rng: random.Random
) -> Iterator[dict[str, Any]]:
    teacher = Teacher(search, rng)
    questions = [question for country in countries for question in country.questions()]
    for question in rng.choices(questions, k=TEACHER_CONVERSATIONS):
        for messages, turn in teacher.turns(question):
            yield {"prompt": messages, "label": turn}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    for name, count in make_data(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0).items():
        print(f"{sys.argv[1]}/{name}: {count} rows")
