"""An evaluation as a table."""

from __future__ import annotations

from slime.observe.eval_results import eval_table

METRICS = {
    "eval/sums": 0.5,
    "eval/sums/low": 0.4,
    "eval/sums/high": 0.6,
    "eval/sums/attempts": 4.0,
    **{f"eval/sums/pass@{k}": value for k, value in ((1, 0.5), (2, 0.7), (4, 0.9))},
    "eval/sums/pass@4/low": 0.8,
    "eval/sums/samples": 64.0,
    "eval/sums/failed": 3.0,
    "eval/sums/response_length_mean": 3.25,
    "eval/sums/truncated_ratio": 0.125,
    "eval/sums/tools/search/calls": 2.0,
    "eval/longer_name": -1.5,
    "eval/longer_name/attempts": 4.0,
    "eval/plugin/reward/x/failed": 3.0,
}


def shown(width: int = 200, **first: float) -> list[str]:
    return [line.plain for line in eval_table(METRICS, {f"eval/{name}": value for name, value in first.items()}, width)]


def test_every_set_is_a_line_with_dots_for_missing_numbers() -> None:
    assert shown(sums=0.25) == [
        "  set           mean@4   change      95% interval  pass@1  pass@2  pass@4  samples  length    cut  lost",
        "  sums          0.5000  +0.2500  0.4000 to 0.6000  0.5000  0.7000  0.9000       64     3.2  12.5%     3",
        "  longer_name  -1.5000        ·                 ·       ·       ·       ·        ·       ·      ·     ·",
    ]


def test_a_narrow_terminal_drops_the_middle_of_pass_at_k_first() -> None:
    header = shown(width=90)[0]
    assert "pass@1" in header and "pass@4" in header and "pass@2" not in header
    assert all(len(line) <= 40 for line in shown(width=40)) and "mean@4" in shown(width=40)[0]


def test_sets_with_different_numbers_of_responses_have_a_plain_mean() -> None:
    metrics = METRICS | {"eval/longer_name/attempts": 1.0}
    assert eval_table(metrics, {}, 200)[0].plain.split()[1] == "mean"
