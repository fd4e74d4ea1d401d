"""Mathematical equality, on pairs chosen by hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.rewards import score

from slime_rewards.mathematics import equal, read
from slime_rewards.mathematics.bounds import TooMuchWorkError, bounded

EQUAL = [
    ("1/2", "0.5"),
    (r"\frac{1}{2}", r"the answer is \boxed{0.5}"),
    ("0.5", r"so it is $50\%$"),
    ("1,000", "I get 1000."),
    ("-3", r"\boxed{-3}"),
    (r"\pi", r"$\pi$"),
    ("42", "first 7, then 42"),
    (r"\sqrt{3}/2", r"$\frac{\sqrt{3}}{2}$"),
    ("10^{3}", "$1000$"),
    ("25%", "$0.25$"),
    (r"25\%", "1/4"),
    ("3/4", r"\boxed{\frac{3}{4}}"),
    ("-0.5", "-1/2"),
    ("12,345,678", "12345678"),
    ("x+1", "$1+x$"),
    ("1/6", r"\boxed{0.1\overline{6}}"),
    (r"0.1\overline{6}", "1/6"),
]
DIFFERENT = [
    ("3", "-3"),
    (r"\sqrt{2}", "$2$"),
    ("42", "42 at first, but then 43"),
    ("5", "\x00"),
]


@pytest.mark.parametrize(("label", "response"), EQUAL)
def test_different_forms_of_a_value_are_equal(label: str, response: str) -> None:
    assert score("math", response, label).value == 1.0


@pytest.mark.parametrize(("label", "response"), DIFFERENT)
def test_different_values_are_not_equal(label: str, response: str) -> None:
    assert score("math", response, label).value == 0.0


def test_a_part_shows_whether_there_was_an_expression() -> None:
    assert score("math", "no idea", "5").parts == {"parsed": 0.0}
    assert score("math", "it is 6", "5").parts == {"parsed": 1.0}


def test_with_boxed_only_the_box_counts() -> None:
    assert score("math", "it is 5", "5", boxed=True).value == 0.0
    assert score("math", r"it is \boxed{5}", "5", boxed=True).value == 1.0


def test_variable_names_matter_only_in_strict_mode() -> None:
    assert score("math", "$y+1$", "$x+1$").value == 0.0
    assert score("math", "$y+1$", "$x+1$", strict=False).value == 1.0
    assert score("math", "no idea", "$x+1$", strict=False).parts == {"parsed": 0.0}


def test_numbers_are_compared_to_the_given_precision() -> None:
    assert score("math", "3.14159265", r"\pi", digits=6).value == 1.0
    assert score("math", "3.1415", r"\pi", digits=6).value == 0.0
    assert score("math", "3.1416", r"\pi", digits=3).value == 1.0


def test_only_the_end_of_a_long_text_is_read() -> None:
    assert score("math", "so 1 + 1 = 2, " * 100_000 + "that is 5", "5").value == 1.0


def test_a_label_without_expression_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 7 has the label '', expected an answer"):
        score("math", "5", "")


@pytest.mark.parametrize(
    "huge",
    [
        "10^{10^{10}}",
        "9^{9^{9^{9}}}",
        "100000000!",
        "((1000!)!)!",
        r"\binom{10^{12}}{10^{6}}",
        "e^{e^{e^{20}}}",
        "2e999999999",
        r"\sum_{k=1}^{10^{9}} k^k",
        "{" * 500 + "5" + "}" * 500,
        "1+" * 700 + "1",
        "x^{x^{x^{x^{x^{x}}}}}",
        "e^{e^{e^{x}}}",
        r"\sin(2^{2^{x^{99}}})",
        r"\prod_{k=1}^{1600} k^k",
        r"\sum_{k=1}^{2400} k!",
        r"\sum_{k=1}^{4800} \sqrt k",
        r"\lfloor (\frac{1+\sqrt5}{2})^{1600} \rfloor",
        r"\lim_{x \to 0} " + r"\sin(\tan(" * 6 + "x^5" + "))" * 6,
        "+".join(f"1/{n}^{{999}}" for n in range(2, 40)),
        "".join(rf"(1+\sqrt{n}x)" for n in range(30)) + "^{50}",
    ],
)
def test_what_is_too_large_to_compute_is_wrong_at_once(huge: str) -> None:
    started = time.process_time()
    assert score("math", rf"\boxed{{{huge}}}", "5").value == 0.0
    assert score("math", rf"\boxed{{{huge}}}", huge).value == 1.0
    assert time.process_time() - started < 5


def test_work_is_counted_in_calls_and_ends() -> None:
    with pytest.raises(TooMuchWorkError), bounded(1000):
        sympy.Sum(sympy.sin(sympy.Symbol("k")), (sympy.Symbol("k"), 1, 300)).doit()
    assert sys.getprofile() is None
    with bounded(1000):
        assert sympy.Integer(2) ** 10 == 1024


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_work_is_bounded_where_python_ignores_exceptions() -> None:
    def generate() -> Iterator[int]:
        try:
            yield 1
        finally:
            for number in range(2000):
                work(number)

    def work(number: int) -> int:
        return number

    with pytest.raises(TooMuchWorkError), bounded(1000):
        closed = generate()
        next(closed)
        del closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_work_ends_where_python_ignores_exceptions_again_and_again() -> None:
    class Stubborn:
        def __del__(self) -> None:
            for number in range(2000):
                work(number)

    def work(number: int) -> int:
        return number

    done = 0
    with pytest.raises(TooMuchWorkError), bounded(1000):
        for _ in range(100):
            Stubborn()
            work(1)
            done += 1
    assert done < 5
    assert sys.getprofile() is None


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_a_verdict_does_not_depend_on_what_was_scored_before(order: int) -> None:
    sums = [rf"\sum_{{n=1}}^{{\infty}}\frac{{n^2}}{{{base}^n}}" for base in (3, 5, 7)][::order]
    values = ["\\frac32", "\\frac{15}{32}", "\\frac{7}{27}"][::order]
    for _ in range(2):
        got = [score("math", rf"\boxed{{{text}}}", value).value for text, value in zip(sums, values, strict=True)]
        assert got == [1.0, 1.0, 1.0]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *"0123456789xyABe+-*/=<>()[]{}^_!|,;:.%$'& \n",
                *(rf"\{name}" for name in ("frac", "sqrt", "text", "binom", "pi", "pm", "sum", "in", "mathrm{i}")),
                *("mod", "half", "½", "\\", "10^", r"\boxed{", r"\begin{pmatrix}", r"\end{pmatrix}"),
            ]
        ),
        max_size=14,
    ).map("".join)
)
def test_any_text_is_read_and_equals_itself(text: str) -> None:
    answer = read(text)
    assert answer is None or equal(answer, read(text) or answer, 6)
    assert score("math", text, "7").value in (0.0, 1.0)
