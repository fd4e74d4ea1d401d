"""What a filter finds as a whole: its order around a sample, its rewards over the steps, its groups, and excerpts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.viewer.tests.making import GROUPS, SAMPLES, TOKEN_ROWS, make_run, make_run_with_tokens, rising

from slime_viewer import answers, queries, results
from slime_viewer.filters import read_filter, searched
from slime_viewer.index import RunIndex
from slime_viewer.run_files import RunFolder

STEPS = 6


def opened(folder: Path) -> RunIndex:
    index = RunIndex(RunFolder(folder), None)
    index.refresh()
    return index


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunIndex]:
    made = opened(make_run(tmp_path_factory.mktemp("runs") / "run", STEPS, dropped=[2]))
    yield made
    made.close()


@pytest.mark.parametrize("counted", [queries.COUNTED, 5])
@pytest.mark.parametrize("sort", ["step", "-step", "reward", "-reward", "version", "gap", "-gap"])
@pytest.mark.parametrize("line", ["kind:train", "", '"carry the 2"', "reward>0.5"])
def test_a_walk_through_a_result_goes_through_its_table(
    index: RunIndex, monkeypatch: pytest.MonkeyPatch, line: str, sort: str, counted: int
) -> None:
    """Also of so many samples that they are not all sorted, and of values that samples lack."""
    condition = read_filter(line)
    found, total = queries.table(index, condition, sort=sort, limit=1000)
    keys = [one.key for one in found]
    assert len(keys) == total
    monkeypatch.setattr(queries, "COUNTED", counted)
    for number, key in enumerate(keys):
        assert results.place(index, condition, sort, key) == number
        after = results.beside(index, condition, sort, key, back=False)
        before = results.beside(index, condition, sort, key, back=True)
        assert (after and after.key) == (keys[number + 1] if number + 1 < total else None)
        assert (before and before.key) == (keys[number - 1] if number else None)


def test_from_a_sample_that_a_filter_does_not_find_the_walk_goes_to_the_nearest(index: RunIndex) -> None:
    condition = read_filter("kind:train reward>0.5")
    wrong = next(one.key for one in queries.find(index, read_filter("step=1 reward<0.5")))
    assert results.place(index, condition, "step", wrong) is None
    found = results.beside(index, condition, "step", wrong, back=False)
    order = [one.key for one in queries.find(index, read_filter("kind:train"), limit=1000)]
    right = {one.key for one in queries.find(index, condition, limit=1000)}
    assert found is not None and found.key == next(key for key in order[order.index(wrong) :] if key in right)
    assert results.beside(index, condition, "step", "000099:1", back=False) is None


def test_a_histogram_counts_the_rewards_of_each_step(index: RunIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    told = results.histogram(index, read_filter("kind:train"))
    expected = [
        Counter(rising(step, group, sample) for group in range(GROUPS) for sample in range(SAMPLES))
        for step in range(STEPS)
    ]
    assert told["steps"] == [(step, step) for step in range(STEPS)]
    assert told["levels"] == [(0.0, 0.0), (1.0, 1.0)]
    assert told["counts"] == [[one[0.0], one[1.0]] for one in expected]
    assert results.histogram(index, read_filter("step>100"))["steps"] == []
    monkeypatch.setattr(queries, "COUNTED", 5)
    assert results.histogram(index, read_filter("kind:train")) == told, "of very many too, by an index"
    words = read_filter("kind:train carry")  # which is in every answer, evaluations and dropped ones included
    assert results.histogram(index, words) == told, "and of very many that words find"
    monkeypatch.setattr(results, "_COUNTED", 20)
    some = results.histogram(index, words)
    numbers = [number for (number,) in index.query("SELECT id FROM samples WHERE kind = 'train'")]
    assert some["every"] == 4
    assert sum(map(sum, some["counts"])) == sum((number * 2654435761 % 2**32 >> 16) % 4 == 0 for number in numbers)
    few = read_filter("kind:train carry step:1..3")  # of some 80 hits
    assert results.histogram(index, few)["every"] == 2, "by what the filter finds"
    monkeypatch.setattr(results, "_READ", 30)
    assert results.histogram(index, few)["every"] == 3, "and by what is read for it"


def test_a_histogram_of_one_in_so_many_counts_every_place_of_a_group_of_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain modulus by the size of a group, or by a part of it, would count the same answers of every group."""
    index = opened(
        make_run(tmp_path / "eights", 100, reward=lambda step, group, n: float((12 * step + 4 * group + n) % 8))
    )
    monkeypatch.setattr(queries, "COUNTED", 5)
    for most in (160, 320):
        monkeypatch.setattr(results, "_COUNTED", most)
        told = results.histogram(index, read_filter("kind:train carry"))
        places = [sum(column[n] for column in told["counts"]) for n in range(8)]
        assert told["every"] > 1 and sum(places) == pytest.approx(1200 / told["every"], rel=0.2)
        assert max(places) < 0.3 * sum(places), places
    index.close()


@pytest.mark.parametrize("most", [20_000, 100])
def test_of_many_steps_and_rewards_a_histogram_has_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(results, "_VALUES", most)
    index = opened(make_run(tmp_path / "long", 130, reward=lambda step, group, n: step - 20 * n - 0.01 * group))
    told = results.histogram(index, read_filter("kind:train"))
    assert told["steps"][0] == (0, 2) and told["steps"][-1] == (129, 129) and len(told["steps"]) == 44
    assert len(told["levels"]) == 8 and told["levels"][0][0] == pytest.approx(-60.02)
    assert told["levels"][-1][1] == pytest.approx(129.0)
    assert sum(map(sum, told["counts"])) == 130 * GROUPS * SAMPLES
    width = (129 + 60.02) / 8
    low = sum(
        step - 20 * n - 0.01 * group < -60.02 + width
        for step in range(3)
        for group in range(GROUPS)
        for n in range(SAMPLES)
    )
    assert told["counts"][0][0] == low


def test_a_page_of_samples_tells_the_rewards_of_whole_groups(index: RunIndex) -> None:
    answer = answers.samples_answer(index, "kind:train step=3 index=38", "step", 0, 50)
    rewards = [rising(3, 0, n) for n in range(SAMPLES)]
    passed = sum(one == 1.0 for one in rewards)
    assert answer["total"] == 1
    told = answer["groups"]["000003/9"]
    assert told == {"size": 4, "scored": 4, "mean": sum(rewards) / 4, "passed": passed, "rewards": rewards}


def test_what_was_searched_for_is_told_and_is_in_the_excerpt() -> None:
    assert searched('kind:train carry "the 2" -not reward<1 dropped:"all equal"') == ["carry", "the 2"]
    row = {"prompt": "p", "response": f"<think>{'so ' * 200}</think>\n\nIt is 4, I Carry -- the 2.", "label": 4}
    assert queries.excerpts(row)["answer"] == "… It is 4, I Carry -- the 2."
    row["response"] = "so " * 200 + "I Carry -- the 2, and on"
    assert queries.excerpts(row)["answer"].startswith("so so so")
    assert queries.excerpts(row, ["carry the"])["answer"] == "… so so so so so so so so so I Carry -- the 2, and on"
    assert queries.excerpts(row, ["arry"])["answer"].startswith("so so so"), "words are found whole"
    assert queries.excerpts({"response": "<think>only</think> "})["answer"] == "<think>only</think> "


def test_the_tokens_of_a_group_have_one_column_and_the_scale_of_the_run(tmp_path: Path) -> None:
    index = opened(make_run_with_tokens(tmp_path / "tokens"))
    answer = answers.group_tokens_answer(index, "000001/7", "gap")
    assert set(answer["tokens"]) == {"000001:0", "000001:1"}, "of the group's four samples two were logged"
    assert answer["tokens"]["000001:1"]["values"]["gap"] == [None, *TOKEN_ROWS[1]["gap"][1:]]
    assert answer["tokens"]["000001:1"]["values"]["loss_mask"] == [0, 1, 1]
    assert {"gap", "credit", "advantage"} <= set(answer["columns"]) and answer["own"] == ["credit"]
    assert answer["scales"]["gap"] == (-0.75, 0.5)
    assert answers.group_tokens_answer(index, "000001/7", "")["tokens"] == {}
    assert answers.group_tokens_answer(index, "000000/1", "gap")["columns"] == []
