"""The tables of answers, in every combination of the options that say where the answer is and how it is compared."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.tables import choice_denials, choices, math_answers, math_responses, words
from tests.support.rewards import ask, build

from slime.testing import make_sample
from slime_rewards.extraction import last_fenced, without_thinking

#: every combination of the options that say where the answer is
PLACES = [
    {"after": after, "tag": tag, "boxed": boxed}
    for after, tag, boxed in itertools.product((None, "####"), (None, "answer"), (False, True))
]


def responses(answer: str, place: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """The answer at its place, and responses that lack one of the markers; and whether the answer is to be found."""
    inner = rf"\boxed{{{answer}}}" if place["boxed"] else answer
    tagged = f"<answer>{inner}</answer>" if place["tag"] else inner
    whole = f"Let me see: 1 + 1 = 2.\n#### {tagged}" if place["after"] else tagged
    yield whole, True
    if place["after"]:
        yield tagged, False
    if place["tag"]:
        yield whole.replace("</answer>", ""), False
    if place["boxed"]:
        yield whole.replace(r"\boxed{", "{"), False


def mismatches(name: str, rows: Any, verdict: Any, **options: Any) -> list[str]:
    """Rows of a table whose reward is not the table's, in all places of the answer."""
    rewards = [build(name, **{key: value for key, value in place.items() if value}, **options) for place in PLACES]
    wrong = []
    # Row by row, not place by place: what the library has parsed is then still in its cache.
    for all_places in itertools.zip_longest(*(rows(place) for place in PLACES)):
        for place, reward, row in zip(PLACES, rewards, all_places, strict=True):
            for response, found in [] if row is None else responses(row[1], place):
                expected = float(verdict(row)) if found else 0.0
                [got] = ask(reward, [make_sample("q", response, label=row[0])])
                if got.value != pytest.approx(expected):
                    wrong.append(f"{place} {options}: {response!r} for {row[0]!r} got {got.value}, expected {expected}")
    return wrong


def test_the_tables_are_long_and_have_right_and_wrong_answers() -> None:
    tables = {
        "math": [right for *_, right in math_answers.BOXED + math_responses.WHOLE],
        "multiple_choice": [row[2] for row in [*choices.BOXED, *choices.WHOLE, *choice_denials.WHOLE]],
        "f1": [row[2] == 1 for row in words.F1 + words.F1_BOXED],
        "exact_match": [row[4] for row in words.EXACT + words.EXACT_BOXED + words.EXACT_UNBOXED],
    }
    assert {name: len(table) for name, table in tables.items() if len(table) < 60} == {}
    assert {name for name, table in tables.items() if table.count(True) < 20 or table.count(False) < 20} == set()


def test_mathematics_in_a_whole_response() -> None:
    reward = build("math")
    got = [ask(reward, [make_sample("q", text, label=label)])[0].value for label, text, _ in math_responses.WHOLE]
    pairs = zip(math_responses.WHOLE, got, strict=True)
    assert [(row, value) for row, value in pairs if value != row[2]] == []


@pytest.mark.slow
def test_mathematics_as_a_person_reads_it() -> None:
    lines = (Path(__file__).parent / "tables" / "math_pairs.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    reward = build("math", boxed=True)
    wrong = []
    for verdict, label, box in rows:
        [got] = ask(reward, [make_sample("q", rf"\boxed{{{box}}}", label=label)])
        if got.value != float(verdict == "right"):
            wrong.append((verdict, label, box))
    assert wrong == []
    assert len(rows) >= 400
    assert min(sum(row[0] == verdict for row in rows) for verdict in ("right", "wrong")) >= 150


@pytest.mark.slow
@pytest.mark.parametrize(("strict", "more"), [(True, {}), (False, {"tail_chars": 300, "digits": 7})])
def test_mathematics_in_every_place(strict: bool, more: dict[str, int]) -> None:
    def rows(place: dict[str, Any]) -> list[tuple[str, str, bool]]:
        # Without a box, an answer that is more than a number may read differently: see WHOLE.
        boxed = math_answers.BOXED
        return boxed if place["boxed"] else [(label, rf"\boxed{{{answer}}}", right) for label, answer, right in boxed]

    assert mismatches("math", rows, lambda row: row[2], strict=strict, **more) == []


def test_mathematics_with_other_variables() -> None:
    for strict in (True, False):
        reward = build("math", strict=strict)
        table = math_answers.RENAMED
        got = [ask(reward, [make_sample("q", rf"\boxed{{{text}}}", label=label)])[0].value for label, text, _ in table]
        assert got == [not strict and right for *_, right in table]


def test_only_a_box_in_the_last_characters_counts() -> None:
    for boxed in (False, True):
        reward = build("math", boxed=boxed, tail_chars=50)
        near, far = r"\boxed{5}" + " " * 20 + "so", r"\boxed{5}" + " " * 60 + "so"
        got = ask(reward, [make_sample("q", text, label="5") for text in (near, far)])
        assert [one.value for one in got] == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("bare", [True, False])
def test_choices_in_every_place(bare: bool) -> None:
    def boxed(place: dict[str, Any]) -> list[tuple[str, str, bool]]:
        table = choices.BOXED
        return table if place["boxed"] else [(label, rf"\boxed{{{answer}}}", right) for label, answer, right in table]

    def whole(place: dict[str, Any]) -> list[tuple[str, str, bool, bool]]:
        return [] if place["boxed"] else [*choices.WHOLE, *choice_denials.WHOLE]

    assert mismatches("multiple_choice", boxed, lambda row: row[2], bare=bare) == []
    assert mismatches("multiple_choice", whole, lambda row: row[2 if bare else 3], bare=bare) == []


#: (response, what it says behind its thinking)
SAID: list[tuple[str, str]] = [
    ("B", "B"),
    ("<think>A</think>B", "B"),
    ("A</think>\nB", "B"),
    ("<think>A</think><think>C</think>B", "B"),
    ("<think>B", ""),
    ("<think>A</think>B<think>C", ""),
    ("<think>B</think>", ""),
    ("<THINK>A</Think>B", "B"),
    ("<Think>B", ""),
    ("A</think>C</think>B", "B"),
    ("<think>A</think>C<think>A</think>B", "B"),
    ("<think>A<think>C</think>B", "B"),
    ("", ""),
    # the prompt opened the thinking, which has quotation marks, comments and code of its own
    ("thinking: # the answer is A</think>\nB", "B"),
    ("Plan: # note A</think>\nB", "B"),
    ("# A</think>B", "B"),
    ('Use """ here. A\nfine</think>\nB', "B"),
    ("Use ''' here. A\nfine</think>\nB", "B"),
    ('Use """ here. I open <think> or so.\nA</think>\nB', "B"),
    ('It is 5" wide, so A</think> B', "B"),
    ('A 5" pipe</think>\nB', "B"),
    ("it's 5' long</think>B", "B"),
    ('She says: "A."</think>B', "B"),
    ('I weigh "A</think>\nB', "B"),
    ("Use `x` or `y</think>\nB", "B"),
    ("I write `<think>` and then A</think>B", "B"),
    ("I write <think> and </think> # A</think>B", "B"),
    ("I end with '</think>' A</think>B", "B"),
    ("<think>I end with '</think>' # A</think>B", "B"),
    ("# a comment with <think> A</think>B", "B"),
    ("```python\n'<think>'\nA</think>\nB", "B"),
    ("```python\nx = 1  # A</think>\nB", "B"),
    ("```\nA\n</think>\nB", "B"),
    ("<think>C</think>\n# A</think>B", "B"),
    ('<think>C</think>\n""" A\nfine</think>B', "B"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("response", "answer"), SAID)
def test_rewards_read_what_stands_behind_the_thinking(response: str, answer: str) -> None:
    right = float(answer.strip() == "B")
    assert ask(build("exact_match"), [make_sample("q", response, label="B")])[0].value == right
    assert ask(build("multiple_choice"), [make_sample("q", response, label="B")])[0].value == right
    assert ask(build("f1"), [make_sample("q", response, label="B")])[0].value == right
    boxed = re.sub(r"([ABC])", r"\\boxed{\1}", response)
    assert ask(build("math"), [make_sample("q", boxed, label="B")])[0].value == right
    assert without_thinking(response).strip() == answer


_QUOTING = 'tag = """\n<think>\nhm\n</think>\n"""\nprint(tag)'
#: answers that quote the tags of thinking, as they are and behind thinking
QUOTING: list[str] = [
    "x = '<think>'\nprint(x)",
    "# <think> is a tag\nprint(1)",
    "print(1)  #<think>",
    "a = s.split('</think>')[1]",
    "```python\na = s.split('</think>')\nprint(a)\n```",
    "```python\nx = '<think>'\n# </think>\nprint(x)\n```",
    "```python\nprint('<think>')",
    "~~~python\n<think>\n~~~\nend",
    _QUOTING,
    f"```python\n{_QUOTING}\n```",
    "Use the `<think>` tag: B",
    "Use the `</think>` tag: B",
    "Use `<think>hm</think>` or '</think>'",
    's = f"</think>\\n"\nprint(s)',
    "```python\na = s.split(r'</think>\\s*')\n```",
    "```python\nx = 1\n# all before </think> goes\n```\nDone",
    "```text\n<think>\nhm</think>\n```",
]


@pytest.mark.parametrize("answer", QUOTING)
def test_tags_that_an_answer_quotes_are_a_part_of_it(answer: str) -> None:
    assert without_thinking(answer) == answer
    for thinking in ("<think>hm</think>", "hm\n</think>\n", "<think>```python\nx\n</think>"):
        assert without_thinking(thinking + answer).strip() == answer


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("I try\n```python\nx\n``` no\n</think>\n```python\ny\n```", "y"),
        ("I try\n```python\nx\n</think>\n```python\ny\n```", "y"),
        ("<think>it's\n```python\nx\n</think>\n```python\ny\n```", "y"),
        ("I try\n```python\nx = 1  # or 2</think>\n```python\ny\n```", "y"),
        ("I try\n```python\nx = 1\nNo, that's it.</think>\n```\ny\n```", "y"),
    ],
)
def test_unfinished_code_in_the_thinking_is_no_answer(response: str, code: str) -> None:
    assert last_fenced(without_thinking(response), ("python",)) == code


@pytest.mark.slow
@pytest.mark.parametrize(("measure", "column"), [("f1", 2), ("exact", 3), ("contains", 4)])
def test_words_in_every_place(measure: str, column: int) -> None:
    def rows(place: dict[str, Any]) -> list[Any]:
        return words.F1 + words.F1_BOXED if place["boxed"] else words.F1

    assert mismatches("f1", rows, lambda row: row[column], measure=measure) == []


@pytest.mark.slow
@pytest.mark.parametrize(("extract", "ignore_case", "column"), [("text", False, 2), ("text", True, 3)])
def test_texts_in_every_place(extract: str, ignore_case: bool, column: int) -> None:
    def rows(place: dict[str, Any]) -> list[Any]:
        return words.EXACT + (words.EXACT_BOXED if place["boxed"] else words.EXACT_UNBOXED)

    assert mismatches("exact_match", rows, lambda row: row[column], extract=extract, ignore_case=ignore_case) == []


@pytest.mark.slow
@pytest.mark.parametrize("ignore_case", [False, True])
def test_numbers_in_every_place(ignore_case: bool) -> None:
    def rows(place: dict[str, Any]) -> list[Any]:
        return words.EXACT + (words.EXACT_BOXED if place["boxed"] else words.EXACT_UNBOXED)

    options = {"extract": "last_number", "ignore_case": ignore_case}
    assert mismatches("exact_match", rows, lambda row: row[4], **options) == []
