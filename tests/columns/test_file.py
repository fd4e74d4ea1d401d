"""The file of per-token columns: what is chosen for it, and that it reads back as it was."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.errors import DiskFullError
from slime.observe import token_columns
from slime.observe.logged_tokens import FLAGGED, LoggedTokens, Marks, choose
from slime.observe.samples import write_rollout
from slime.observe.token_columns import Pieces, pieces_of, token_file, write_token_columns
from slime.rollout.train_batch import TrainBatch
from slime.run.rollout_process import RolloutProcess
from slime.run.token_log import TokenLog
from slime.testing.samples import CHARACTERS, make_group, make_sample, make_tokenizer
from slime.types import Group, Status


def groups_of(count: int, *, size: int = 2, response: str = "abcd") -> list[Group]:
    return [make_group([1.0, 0.0, *[0.5] * (size - 2)][:size], index=n, response=response) for n in range(count)]


def batch_of(groups: list[Group]) -> TrainBatch:
    return TrainBatch.from_groups(groups, rollout=3, num_steps=1)


def no_marks(batch: TrainBatch) -> Marks:
    return Marks(np.zeros(len(batch.tokens)), np.zeros(len(batch.tokens)))


# --- what is chosen -----------------------------------------------------------------------------------


def test_flagged_groups_come_first_and_the_rest_is_drawn_by_the_seed() -> None:
    groups = groups_of(20)
    groups[7].samples[1].status = Status.FAILED
    groups[9] = make_group([1.0, 1.0], index=9, response="abcd")
    batch = batch_of(groups)
    marks = no_marks(batch)
    where = {group: np.flatnonzero(batch.group_ids == group) for group in range(20)}
    for rank, group in enumerate((11, 2, 5, 16, 3)):  # one more than are flagged
        marks.gap[where[group][0]] = 5.0 - rank
    marks.clipped[where[4]] = 1
    samples, flags = choose(batch, marks, most_tokens=None, seed=0)
    assert sorted(samples) == list(range(39))
    reasons = {int(batch.group_ids[i]): flag for i, flag in zip(samples, flags, strict=True)}
    assert list(reasons.items())[: FLAGGED + 3] == [
        (7, "failed"), (11, "gap"), (2, "gap"), (5, "gap"), (16, "gap"), (4, "clipped"), (9, "zero_variance"),
    ]  # fmt: skip
    assert set(list(reasons.values())[FLAGGED + 3 :]) == {"sampled"}
    again, other = (choose(batch, marks, most_tokens=None, seed=seed)[0] for seed in (0, 1))
    assert again == samples != other
    assert sorted(other) == sorted(samples)


def test_whole_groups_are_taken_until_the_budget_is_spent() -> None:
    batch = batch_of([make_group([1.0, 0.0], index=n, response="ab" * (5 if n == 3 else 1)) for n in range(6)])
    marks = no_marks(batch)
    marks.gap[6:8] = 1.0  # the long group is the most urgent one
    for most, groups in ((20, 1), (19, 4), (8, 2), (4, 1)):
        samples, _ = choose(batch, marks, most_tokens=most, seed=0)
        assert sum(int(batch.response_lengths[i]) for i in samples) <= most
        assert len({int(batch.group_ids[i]) for i in samples}) == groups
        assert (3 in batch.group_ids[samples]) == (most == 20)
    assert [len(choose(batch, marks, most_tokens=most, seed=0)[0]) for most in (3, 2, 1, 0)] == [1, 1, 0, 0]


# --- the file -------------------------------------------------------------------------------------------


def logged_of(samples: list[int], **columns: list[list[float]]) -> LoggedTokens:
    flat = {name: np.concatenate([np.float32(parts[i]) for i in samples]) for name, parts in columns.items()}
    return LoggedTokens(samples, ["sampled"] * len(samples), [0] * len(samples), flat)


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    return pieces_of(make_tokenizer())


NAN = float("nan")


def test_a_row_has_what_everybody_knows_of_its_tokens(tmp_path: Path, pieces: Pieces) -> None:
    float32 = np.float32
    first = make_sample(
        response="abc", index=5, group_index=2, loss_mask=[1, 0, 1], rollout_log_probs=[-1.0, 0.0, -2.0]
    )
    first.columns = {"source": float32([0, 1, 0]), "weight_version": float32([3, NAN, 4])}
    lost = make_sample(response="ab", index=6, group_index=2, status=Status.FAILED, reward=None)
    last = make_sample(response="x\n", index=7, group_index=2, weight_versions=["9"], loss_mask=[0, 1])
    last.columns = {"credit": float32([0.25, NAN])}
    groups = [Group(2, [first, lost, last])]
    logged = logged_of([1, 0], trainer_logprob=[[-1.5, NAN, -1.0], [NAN, -0.25]], ratio=[[1, NAN, 2], [NAN, 3]])
    path = write_token_columns(tmp_path, 12, groups, logged, pieces)
    assert path == tmp_path / "rollouts" / "000012.tokens.parquet"
    table = pq.read_table(path)
    described = json.loads(table.schema.metadata[b"slime"])
    names = ["loss_mask", "source", "weight_version", "engine_logprob", "trainer_logprob", "gap", "ratio", "credit"]
    assert described == {
        "format": 1, "rollout": 12, "samples": 3, "logged": 3, "columns": names, "own": ["credit"],
    }  # fmt: skip
    rows = table.to_pylist()
    assert [(row["line"], row["index"], row["flag"], row["step"]) for row in rows] == [
        (1, 6, "failed", None), (2, 7, "sampled", 0), (0, 5, "sampled", 0),
    ]  # fmt: skip
    failed, second, one = rows
    assert one["tokens"] == first.tokens[-3:] and one["pieces"] == ["a", "b", "c"] and second["pieces"] == ["x", "\n"]
    assert one["loss_mask"] == [1, 0, 1] and one["source"] == [0, 1, 0] and one["weight_version"] == [3, -1, 4]
    assert np.array_equal(one["engine_logprob"], [-1.0, NAN, -2.0], equal_nan=True)
    assert np.array_equal(one["gap"], [-0.5, NAN, 1.0], equal_nan=True)
    assert (one["gap_max"], one["gap_token"]) == (1.0, 2)
    assert one["credit"] is None and np.array_equal(second["credit"], [0.25, NAN], equal_nan=True)
    # a masked token of unknown origin, with a log-prob
    assert second["source"] == [-1, 0] and second["weight_version"] == [-1, 9]
    assert second["engine_logprob"] == [-0.5, -0.5]
    assert failed["gap"] is None and failed["gap_max"] is None and failed["loss_mask"] == [1, 1]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.row("V1")
def test_any_columns_read_back_to_the_bit(data: st.DataObject, tmp_path: Path, pieces: Pieces) -> None:
    words = st.text(st.sampled_from(CHARACTERS[5:]), min_size=1, max_size=9)
    groups = []
    for number in range(data.draw(st.integers(1, 4))):
        samples = []
        for index in range(data.draw(st.integers(1, 4))):
            sample = make_sample(response=data.draw(words), index=index, group_index=number)
            draw = st.lists(st.integers(0, 2**32 - 1), min_size=sample.response_length, max_size=sample.response_length)
            for name in data.draw(st.sets(st.sampled_from(["credit", "a/doubt", "äß"]))):
                sample.columns[name] = np.array(data.draw(draw), dtype=np.uint32).view(np.float32)
            samples.append(sample)
        groups.append(Group(number, samples))
    batch = batch_of(groups)
    chosen = data.draw(st.permutations(range(len(batch.tokens))))[: data.draw(st.integers(0, len(batch.tokens)))]
    everyone = [sample for group in groups for sample in group.samples]
    rows = pq.read_table(write_token_columns(tmp_path, 0, groups, logged_of(chosen), pieces)).to_pydict()
    assert rows["line"] == chosen
    table = pq.read_table(token_file(tmp_path, 0))
    for row, line in enumerate(chosen):
        sample = everyone[line]
        assert rows["tokens"][row] == sample.tokens[sample.prompt_length :]
        assert "".join(rows["pieces"][row]) == sample.response
        for name, column in sample.columns.items():
            read = table[name][row].values.to_numpy(zero_copy_only=False)
            assert read.view(np.uint32).tolist() == column.view(np.uint32).tolist()
        for name in {"credit", "a/doubt", "äß"} & rows.keys() - sample.columns.keys():
            assert rows[name][row] is None


def test_lost_samples_take_at_most_half_of_the_budget(tmp_path: Path, pieces: Pieces) -> None:
    groups = groups_of(4, size=2)
    for group in groups:
        lost = make_sample(response="ab" * 20, index=99, group_index=group.index, status=Status.ABORTED, failure="cut")
        group.samples.append(lost)
    everything = write_token_columns(tmp_path, 0, groups, logged_of(list(range(8))), pieces)
    assert pq.read_table(everything)["flag"].to_pylist().count("failed") == 4
    a_token = 4 * (2 + 4)  # id, piece, mask, source, version, engine
    few = write_token_columns(tmp_path, 1, groups, logged_of(list(range(8))), pieces, most_bytes=2 * 40 * a_token + 20)
    assert pq.read_table(few)["flag"].to_pylist() == ["failed"] + ["sampled"] * 8


def test_a_repeated_rollout_replaces_its_file(tmp_path: Path, pieces: Pieces) -> None:
    groups = groups_of(2)
    write_token_columns(tmp_path, 0, groups, logged_of([0, 1, 2, 3]), pieces)
    write_rollout(tmp_path, 0, groups[:1])
    assert not token_file(tmp_path, 0).exists()  # it would belong to other lines
    write_token_columns(tmp_path, 0, groups[:1], logged_of([1]), pieces)
    assert pq.read_table(token_file(tmp_path, 0))["line"].to_pylist() == [1]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["000000.jsonl", "000000.tokens.parquet"]


def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = groups_of(1)
    logged = logged_of([0])
    path = write_token_columns(tmp_path, 0, groups, logged, pieces)
    before = path.read_bytes()

    def full(_: object, where: Path, **__: object) -> None:
        where.write_bytes(b"PAR1")
        raise OSError(errno.ENOSPC, "No space left on device", str(where))

    monkeypatch.setattr(token_columns.pq, "write_table", full)
    with pytest.raises(DiskFullError, match=r"000000\.tokens\.parquet cannot be written"):
        write_token_columns(tmp_path, 0, groups, logged, pieces)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_piece_keeps_the_space_that_a_word_begins_with() -> None:
    class Spaced:
        """A tokenizer that drops the space of a word alone."""

        def decode(self, tokens: list[int]) -> str:
            return ["word", " word", "\udc80"][tokens[0]]

        def convert_ids_to_tokens(self, token: int) -> str:
            return ["\u2581word", "\u0120word", "?"][token]

    assert [pieces_of(Spaced())(token) for token in range(2)] == [" word", " word"]


def test_a_file_that_cannot_be_written_is_told_once_until_one_is_written_again() -> None:
    told: list[tuple[int, str]] = []
    answers = iter(["disk full", "disk full", None, "gone"])

    class Calls:
        """Processes whose calls have returned."""

        def begin(self, method: object, *args: Any, **_: Any) -> Any:
            answer = next(answers) if method == RolloutProcess.write_token_columns else "columns"
            return SimpleNamespace(refs=[f"{method} of {args}"], finished=True, wait=lambda: [answer])

    calls: Any = Calls()
    observer: Any = SimpleNamespace(columns_lost=lambda number, problem: told.append((number, problem)))
    log = TokenLog(calls, calls, observer, on=True)
    for number in range(4):
        log.begin(number)
    log.finish()
    assert told == [(0, "disk full"), (3, "gone")]
    TokenLog(calls, calls, observer, on=False).begin(9)
