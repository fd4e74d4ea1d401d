"""A search tool over a file of passages: BM25 in this process, no server and no index to build beforehand.

Okapi BM25 as in Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), equation 3.15,
with an inverse document frequency that is never negative, ln(1 + (N - n + 0.5) / (n + 0.5)).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slime.errors import DataError

_WORD = re.compile(r"\w+")
#: how fast more of the same word in a passage stops counting, and how much a long passage is held against it
_K1, _B = 1.2, 0.75

NOTHING_FOUND = "no passage has any of these words"


def words_of(text: str) -> list[str]:
    """What a passage is found by: its words, without regard to upper and lower case."""
    return _WORD.findall(text.casefold())


class SearchIndex:
    """Passages, and for each word the passages that have it with what it is worth there.  It never changes."""

    def __init__(self, passages: Sequence[str]) -> None:
        """N passages.  Raises `DataError` where there are none."""
        if not passages:
            raise DataError("the search tool has no passages to search")
        self.passages = tuple(passages)
        counts = [Counter(words_of(text)) for text in self.passages]
        lengths = np.array([count.total() for count in counts], np.float64)
        penalty = _K1 * (1 - _B + _B * lengths / max(lengths.mean(), 1.0))  # [N]
        places: dict[str, list[int]] = {}
        times: dict[str, list[int]] = {}
        for place, count in enumerate(counts):
            for word, number in count.items():
                places.setdefault(word, []).append(place)
                times.setdefault(word, []).append(number)
        self._worth: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        for word, found in places.items():
            where, often = np.array(found, np.int64), np.array(times[word], np.float64)
            rarity = np.log1p((len(counts) - len(found) + 0.5) / (len(found) + 0.5))
            self._worth[word] = where, rarity * often * (_K1 + 1) / (often + penalty[where])

    def scores(self, query: str) -> NDArray[np.float64]:
        """[N] BM25 of every passage, 0 where no word of the query is.  A word counts once, however often said."""
        total = np.zeros(len(self.passages))
        for word in dict.fromkeys(words_of(query)):
            if word in self._worth:
                where, worth = self._worth[word]
                total[where] += worth
        return total

    def best(self, query: str, results: int) -> list[int]:
        """At most `results` places of passages with a word of the query: best first, equals in the file's order."""
        scores = self.scores(query)
        found = np.flatnonzero(scores)
        if len(found) > results:
            least = np.partition(scores[found], -results)[-results]
            found = found[scores[found] >= least]
        order = np.argsort(-scores[found], kind="stable")[:results]
        return [int(place) for place in found[order]]


def read_passages(corpus: Path) -> list[str]:
    """The passages of a file: JSONL rows with "text" and perhaps "title", or, for any other ending, one passage a line.

    Raises `DataError` with the file, and the line where one is wrong.
    """
    if not corpus.is_file():
        raise DataError(f"the search tool's corpus {corpus} is not a file; set --generator.search-corpus to one")
    try:
        lines = corpus.read_text(encoding="utf-8").split("\n")  # not at U+2028 and the like, which stand in texts
    except UnicodeDecodeError as error:
        raise DataError(f"{corpus} is not UTF-8 text: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if corpus.suffix != ".jsonl":
        return [line.strip() for _, line in numbered]
    return [_passage(line, f"{corpus}:{number}") for number, line in numbered]


def _passage(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise DataError(f'{where}: got {line[:60]}, expected an object with a text under "text"')
    title = row.get("title")
    return f"{title}: {row['text']}" if title else row["text"]


def make_search(corpus: Path, results: int = 3) -> Callable[[str], str]:
    """The tool over the passages of `corpus`: at most `results` passages an answer.  Raises `DataError`."""
    index = SearchIndex(read_passages(corpus))

    def search(query: str) -> str:
        """Search a collection of passages and get those that match best.

        Args:
            query: words to look for
        """
        best = index.best(query, results)
        return "\n".join(f"[{n}] {index.passages[place]}" for n, place in enumerate(best, start=1)) or NOTHING_FOUND

    return search
