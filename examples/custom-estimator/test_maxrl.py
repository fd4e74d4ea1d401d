"""The contract of every estimator, and what is special about this one."""

from slime_estimator_maxrl import MaxRL, slime_register_estimators

from slime.plugin import NoOptions
from slime.testing import assert_estimator_contract, assert_light_import, make_batch, make_context


def build() -> MaxRL:
    return MaxRL(NoOptions(), make_context())


def test_estimator_contract() -> None:
    [spec] = slime_register_estimators()
    assert_estimator_contract(build(), spec=spec)


def test_rare_correct_answers_count_more() -> None:
    answer = build().advantages(make_batch([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))
    first = [round(float(part[0]), 6) for part in answer.advantages]
    assert first == [3, -1, -1, -1, 0.333333, 0.333333, 0.333333, -1]


def test_prompts_never_or_always_solved_have_zero_advantages() -> None:
    answer = build().advantages(make_batch([[0.0, 0.0, 0.0], [1.0, 1.0], [1.0]]))
    assert not any(bool(part.any()) for part in answer.advantages)


def test_import_is_light() -> None:
    assert_light_import("slime_estimator_maxrl")
