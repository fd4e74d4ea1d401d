"""The search tool ranks by BM25, numbers its results, and refuses an invalid corpus."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import DataError
from slime.kit.chat import tool_of
from slime_generators.tools.search import NOTHING_FOUND, SearchIndex, make_search, read_passages, words_of


def plainly(passages: list[str], query: str) -> list[float]:
    """BM25 term by term from the formula, with k1 = 1.2 and b = 0.75."""
    split = [words_of(text) for text in passages]
    average = max(sum(map(len, split)) / len(split), 1.0)
    scores = []
    for words in split:
        score = 0.0
        for term in set(words_of(query)):
            containing = sum(term in other for other in split)
            rarity = math.log(1 + (len(split) - containing + 0.5) / (containing + 0.5))
            often = words.count(term)
            score += rarity * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * len(words) / average))
        scores.append(score)
    return scores


TEXTS = st.lists(st.sampled_from(["ab", "cd", "ef", "gh", "ij", "kl"]), max_size=8).map(" ".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=12), TEXTS)
def test_scores_follow_the_formula(passages: list[str], query: str) -> None:
    assert SearchIndex(passages).scores(query) == pytest.approx(plainly(passages, query), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=12), TEXTS, st.integers(1, 5))
def test_results_are_sorted_by_score_then_file_order(passages: list[str], query: str, results: int) -> None:
    index = SearchIndex(passages)
    scores = index.scores(query)
    everything = sorted((place for place in range(len(passages)) if scores[place] > 0), key=lambda n: (-scores[n], n))
    assert index.best(query, results) == everything[:results]


def test_a_rare_word_counts_more_than_a_common_one() -> None:
    index = SearchIndex(["the river of mirel", "the river of zorlan", "the capital of tovan", "the river of belgar"])
    assert index.best("river tovan", 1) == [2]


def test_case_and_punctuation_do_not_matter_and_other_scripts_are_words() -> None:
    index = SearchIndex(["The capital of Zürich-Land: “Mirel”!", "北京 是 首都"])
    assert index.best("ZÜRICH mirel?", 3) == [0]
    assert index.best("首都", 3) == [1]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": "a red\u2028bird"}, {"title": "Birds", "text": "some are blue"}, {"text": "a fish"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    return path


def test_results_are_numbered_passages_with_titles(corpus: Path) -> None:
    search = make_search(corpus, 2)
    assert search("blue") == "[1] Birds: some are blue"
    assert search("a bird") == "[1] a red\u2028bird\n[2] a fish"


@pytest.mark.parametrize("query", ["", "  ", "?!", "whale"])
def test_a_query_without_matches_returns_a_note(corpus: Path, query: str) -> None:
    assert make_search(corpus)(query) == NOTHING_FOUND


def test_search_has_one_argument(corpus: Path) -> None:
    function = tool_of(make_search(corpus)).schema["function"]
    assert function["name"] == "search"
    assert function["parameters"]["required"] == ["query"]
    assert function["parameters"]["properties"]["query"] == {"type": "string", "description": "words to look for"}


def test_a_text_file_has_one_passage_per_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("  one passage \n\nanother\r\n", encoding="utf-8")
    assert read_passages(path) == ["one passage", "another"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "good"}\n{"text": ', r"corpus\.jsonl:2: not JSON"),
        (b'{"text": "good"}\n{"body": "no text"}', r"corpus\.jsonl:2: got .*expected an object"),
        (b'\n["text"]', r"corpus\.jsonl:2: got .*expected an object"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b"\n\n", "no passages"),
    ],
)
def test_a_bad_corpus_is_refused_with_file_and_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        make_search(path)


def test_a_missing_corpus_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl is not a file; set --generator\.search-corpus"):
        make_search(tmp_path / "nothing.jsonl")
