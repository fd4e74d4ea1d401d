"""When a run goes back to an earlier checkpoint, the records of the abandoned steps are kept apart from its own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from slime.observe.abandoned import set_aside_records
from slime.observe.metrics import MetricsWriter, read_metrics

#: of four rollouts, with evaluations after two and four
FILES = (
    *(f"{number:06d}.jsonl" for number in range(4)),
    *("000003.tokens.parquet", "dropped_000001.jsonl", "dropped_000002.jsonl"),
    *("eval_held_out_000002.jsonl", "eval_held_out_000004.jsonl", "failed_evaluation.jsonl"),
)


def recorded(folder: Path) -> MetricsWriter:
    (folder / "rollouts").mkdir()
    for name in FILES:
        (folder / "rollouts" / name).write_text(name)
    writer = MetricsWriter(folder)
    for step in range(4):
        writer.write(step, {"train/loss": 1.0 + step, "restarts/run": 1.0})
        if step % 2:
            writer.write(step + 1, {"eval/held_out": step / 10})
    return writer


def test_metrics_and_samples_after_the_checkpoint_are_moved_while_the_run_has_the_file_open(tmp_path: Path) -> None:
    with closing(recorded(tmp_path)) as writer:
        aside = set_aside_records(tmp_path, 2)
        writer.write(2, {"train/loss": 7.0})
    assert aside == tmp_path / "abandoned_1"
    rows = [{name: value for name, value in row.items() if name != "unix_time"} for row in read_metrics(tmp_path)]
    assert rows[0] == {"step": 0, "train/loss": 1.0, "restarts/run": 1.0}
    # The evaluation after two rollouts stays; the abandoned step leaves nothing in the row of the new one.
    assert rows[2:] == [{"step": 2, "eval/held_out": 0.1, "train/loss": 7.0}]
    assert [row["step"] for row in read_metrics(aside)] == [2, 3, 4]
    moved = {path.name for path in (aside / "rollouts").iterdir()}
    assert moved == {*FILES[2:5], "dropped_000002.jsonl", "eval_held_out_000004.jsonl"}
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == set(FILES) - moved
    assert set_aside_records(tmp_path, 3) is None


def test_a_run_that_begins_again_begins_with_nothing(tmp_path: Path) -> None:
    recorded(tmp_path).close()
    aside = set_aside_records(tmp_path, 0)
    assert aside is not None and len(read_metrics(aside)) == 5
    assert read_metrics(tmp_path) == []
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["failed_evaluation.jsonl"]


def test_a_folder_without_records_is_left_alone(tmp_path: Path) -> None:
    assert set_aside_records(tmp_path, 0) is None
    assert not list(tmp_path.iterdir())
