"""The contract of every estimator, and the specifics of this one."""

from slime_estimator_median import MedianOptions, slime_register_estimators
from slime_estimator_median.impl import Median

from slime.testing import assert_estimator_contract, assert_light_import, make_batch, make_context


def test_the_estimator_keeps_its_contract() -> None:
    [spec] = slime_register_estimators()
    assert_estimator_contract(Median(MedianOptions(), make_context()), spec=spec)


def test_an_outlier_does_not_change_the_other_advantages() -> None:
    estimator = Median(MedianOptions(clip=5.0), make_context())
    advantages = estimator.advantages(make_batch([[0.0, 1.0, 2.0, 1.0, 100.0]])).advantages
    assert [float(part[0]) for part in advantages] == [-1.0, 0.0, 1.0, 0.0, 5.0]


def test_importing_the_package_is_light() -> None:
    assert_light_import("slime_estimator_median")
