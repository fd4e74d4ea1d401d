"""A search tool over a file of passages: BM25 in memory, without a server or a prebuilt index.

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
#: k1: saturation of repeated words; b: penalty of long passages
_K1, _B = 1.2, 0.75

NOTHING_FOUND = "no passage has any of these words"


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.casefold())


class SearchIndex:
    """An immutable index: for each word, the passages that contain it and its score in each."""

    def __init__(self, passages: Sequence[str]) -> None:
        """Index N passages. Raises `DataError` if there are none."""
        if not passages:
            raise DataError("the search tool has no passages to search")
        self.passages = tuple(passages)
        counts = [Counter(words_of(text)) for text in self.passages]
        lengths = np.array([count.total() for count in counts], np.float64)
        penalty = _K1 * (1 - _B + _B * lengths / max(lengths.mean(), 1.0))  # [N]
        containing: dict[str, list[int]] = {}
        frequencies: dict[str, list[int]] = {}
        for index, count in enumerate(counts):
            for word, frequency in count.items():
                containing.setdefault(word, []).append(index)
                frequencies.setdefault(word, []).append(frequency)
        self._scores: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        for word, found in containing.items():
            indices, frequency_of = np.array(found, np.int64), np.array(frequencies[word], np.float64)
            rarity = np.log1p((len(counts) - len(found) + 0.5) / (len(found) + 0.5))
            self._scores[word] = indices, rarity * frequency_of * (_K1 + 1) / (frequency_of + penalty[indices])

    def scores(self, query: str) -> NDArray[np.float64]:
        """[N] BM25 score of every passage, 0 without a word of the query. Repeated words of the query count once."""
        total = np.zeros(len(self.passages))
        for word in dict.fromkeys(words_of(query)):
            if word in self._scores:
                indices, scores = self._scores[word]
                total[indices] += scores
        return total

    def best(self, query: str, results: int) -> list[int]:
        """Indices of the best passages, at most `results`: best first, those of equal score in file order."""
        scores = self.scores(query)
        found = np.flatnonzero(scores)
        if len(found) > results:
            least = np.partition(scores[found], -results)[-results]
            found = found[scores[found] >= least]
        order = np.argsort(-scores[found], kind="stable")[:results]
        return [int(index) for index in found[order]]


def read_passages(corpus: Path) -> list[str]:
    """Read passages from a file: JSONL rows with "text" and optionally "title", or one passage per line.

    Args:
        corpus: The file; JSONL if its name ends in `.jsonl`.

    Raises:
        DataError: The file or a row cannot be used. The message has file and line.
    """
    if not corpus.is_file():
        raise DataError(f"the search tool's corpus {corpus} is not a file; set --generator.search-corpus to one")
    try:
        lines = corpus.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028
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
    """Make a tool that returns at most `results` passages of `corpus`. Raises `DataError`."""
    return search_tool(SearchIndex(read_passages(corpus)), results)


def search_tool(index: SearchIndex, results: int) -> Callable[[str], str]:
    """Make a tool that returns at most `results` passages of an index."""

    def search(query: str) -> str:
        """Search a collection of passages and get those that match best.

        Args:
            query: words to look for
        """
        best = index.best(query, results)
        return "\n".join(f"[{n}] {index.passages[i]}" for n, i in enumerate(best, start=1)) or NOTHING_FOUND

    return search
