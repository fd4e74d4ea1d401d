"""Finding the answer in a response, and rewards that compare it as text."""

from __future__ import annotations

import pytest
from tests.support.rewards import build, score

from slime.errors import ConfigError
from slime_rewards.extraction import last_boxed, last_fenced


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{5}", "5"),
        (r"so \boxed{1} and then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed 7$", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1} but \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        ("no box", None),
        ("", None),
        (r"\boxed", None),
        (r"\boxed{" * 1000, None),
        ("\\boxed{数学 🙂}", "数学 🙂"),
    ],
)
def test_the_last_closed_box_counts(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```\na\n```\ntext\n```py\nb\n\nc\n```\nend", "b\n\nc"),
        ("```json\n{}", "{}"),
        ("no fence", None),
        ("```", ""),
        ("```\na\n```\n```\n", "a"),
        ("```\na\n```\n```\nb", "b"),
        ("", None),
    ],
)
def test_the_last_fenced_block_counts(text: str, content: str | None) -> None:
    assert last_fenced(text) == content


def test_answer_options_apply_one_after_the_other() -> None:
    response = r"<answer>\boxed{1}</answer> final: <answer>I say \boxed{Paris}</answer>"
    assert score("exact_match", response, "Paris", after="final:", tag="answer", boxed=True).value == 1.0
    assert score("exact_match", response, "Paris", tag="thought").value == 0.0
    assert score("exact_match", "Paris", "Paris", boxed=True).value == 0.0
    assert score("exact_match", "</answer>Paris<answer>", "Paris", tag="answer").value == 0.0


#: answer, label, F1 by hand
F1_TABLE = [
    ("the cat sat", "cat sat", 1.0),  # articles go
    ("Cat, sat!", "cat sat", 1.0),  # so do case and punctuation
    ("cat sat down", "cat sat", 0.8),  # p 2/3, r 1
    ("cat", "cat sat", 2 / 3),  # p 1, r 1/2
    ("cat cat", "cat", 2 / 3),  # one in common: p 1/2, r 1
    ("dog", "cat", 0.0),
    ("", "cat", 0.0),
    ("the", "a", 1.0),  # neither has words
    ("", "", 1.0),
    ("Köln 数学", "köln", 2 / 3),
]


CODE = "```python\nx = 1\n```"
#: (response, its code)
NAMED: list[tuple[str, str]] = [
    (CODE, "x = 1"),
    (f"{CODE}\nOutput:\n```\n4\n```", "x = 1"),
    (f"{CODE}\nRun it:\n```bash\npython a.py\n```", "x = 1"),
    ("```bash\npython a.py\n```", "python a.py"),
    ("```\nx = 1\n```\n```json\n{}\n```", "x = 1"),
    (f"```python\nx = 0\n```\nFixed:\n{CODE}", "x = 1"),
    (CODE.replace("python", "Python"), "x = 1"),
    (CODE.replace("python", "py3"), "x = 1"),
    (CODE.replace("python", 'python title="a.py"'), "x = 1"),
    (CODE.replace("```", "~~~"), "x = 1"),
    ("- a\n\t```python\n\tif x:\n\t\tx = 1\n\t```", "if x:\n\tx = 1"),
    ('~~~python\nx = """\n```\n"""\n~~~', 'x = """\n```\n"""'),
]


@pytest.mark.parametrize(("response", "code"), NAMED)
def test_a_block_of_python_counts_before_others(response: str, code: str) -> None:
    assert last_fenced(response, ("python", "py", "py3")) == code


@pytest.mark.parametrize(("answer", "label", "expected"), F1_TABLE)
def test_f1_by_hand(answer: str, label: str, expected: float) -> None:
    assert score("f1", answer, label).value == pytest.approx(expected)


def test_a_list_of_labels_accepts_any_of_them() -> None:
    assert score("f1", "New York", '["NYC", "new york city", "The New York"]').value == 1.0
    assert score("f1", "x", "[broken").value == 0.0


def test_f1_may_measure_equality_or_containment() -> None:
    assert score("f1", "The Beatles!", "beatles", measure="exact").value == 1.0
    assert score("f1", "It was the Beatles", "beatles", measure="exact").value == 0.0
    assert score("f1", "It was the Beatles.", "beatles", measure="contains").value == 1.0
    assert score("f1", "catalog", "cat", measure="contains").value == 0.0


CHOICES = [
    ("(b).", "B", 1.0),
    ("The answer is (C)", "c", 1.0),
    ("Answer: **B**", "B", 1.0),
    (r"so \boxed{D}", "D", 1.0),
    (r"\boxed{\text{D}}", "D", 1.0),
    ("option A is wrong, the answer is B", "B", 1.0),
    ("answer: A", "B", 0.0),
    ("option a is best", "A", 1.0),
    ("The answer is A because of that", "A", 1.0),
    ("The answer is $B$", "B", 1.0),
    (r"The answer is \textbf{B}", "B", 1.0),
]


@pytest.mark.parametrize(("response", "label", "expected"), CHOICES)
def test_a_choice_is_found_in_every_documented_form(response: str, label: str, expected: float) -> None:
    assert score("multiple_choice", response, label).value == expected


def test_a_part_shows_whether_a_choice_was_made() -> None:
    assert score("multiple_choice", "who knows", "A").parts == {"chosen": 0.0}
    assert score("multiple_choice", "B", "A").parts == {"chosen": 1.0}
    assert score("multiple_choice", "B", "B", bare=False).parts == {"chosen": 0.0}


@pytest.mark.parametrize("name", ["exact_match", "math", "multiple_choice", "f1", "code"])
def test_the_error_names_a_sample_without_label(name: str) -> None:
    with pytest.raises(ValueError, match=r"sample 7 \(a.jsonl 3\) has no label to compare with; check --label-key"):
        score(name, "1", None, {"source": "a.jsonl", "line": 3})


def test_a_label_that_is_not_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 7 has the label 'Paris'; expected one letter or number"):
        score("multiple_choice", "A", "Paris")


@pytest.mark.parametrize(
    ("response", "value", "tags"),
    [
        ("<think>hm</think><answer>4</answer>", 1.0, 1.0),
        (" <think>\nhm\n</think>\n\n<answer>4</answer>\n", 1.0, 1.0),
        ("<think>hm</think><answer> </answer>", 0.0, 1.0),
        ("<answer>4</answer><think>hm</think>", 0.0, 1.0),
        ("<think>hm</think> so <answer>4</answer>", 0.0, 1.0),
        ("<think>hm</think><answer>4</answer><answer>5</answer>", 0.0, 0.5),
        ("<answer>4</answer>", 0.0, 0.5),
        ("", 0.0, 0.0),
    ],
)
def test_tags_must_occur_once_in_order_with_content(response: str, value: float, tags: float) -> None:
    reward = score("format", response)
    assert (reward.value, reward.parts) == (value, {"tags": tags})


def test_a_format_may_be_a_pattern_with_custom_values() -> None:
    options = {"pattern": r"Answer: \d+.*", "hit": 0.2, "miss": -1.0}
    assert score("format", "Answer: 4\nbye", **options).value == 0.2
    assert score("format", "well, Answer: 4", **options).value == -1.0


def test_an_invalid_pattern_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"pattern '\(' is not a regular expression"):
        build("format", pattern="(")


@pytest.mark.parametrize(
    ("tokens", "linear", "cosine", "overlong"),
    [
        (0, 1.0, 1.0, 0.0),
        (10, 1.0, 1.0, 0.0),
        (15, 0.75, 0.5 + 0.5 * 2**-0.5, -0.25),
        (20, 0.5, 0.5, -0.5),
        (30, 0.0, 0.0, -1.0),
        (99, 0.0, 0.0, -1.0),
    ],
)
def test_length_falls_between_free_and_limit(tokens: int, linear: float, cosine: float, overlong: float) -> None:
    expected = {"linear": linear, "cosine": cosine, "overlong": overlong}
    for shape, value in expected.items():
        assert score("length", "x" * tokens, shape=shape, free=10, limit=30).value == pytest.approx(value)


def test_a_limit_below_free_is_refused() -> None:
    with pytest.raises(ConfigError, match="free is 30 and limit 30; expected free below limit"):
        build("length", free=30, limit=30)


def test_an_enormous_response_is_scored_quickly() -> None:
    assert score("exact_match", "1-" * 1_000_000 + "7", "7", extract="last_number").value == 1.0
