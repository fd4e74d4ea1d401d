"""`report.html`: what it holds, what it costs, and that a run does not end because of it."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from plugins.viewer.tests.making import GROUPS, SAMPLES, make_run

from slime.config import RunConfig
from slime.config.options import RunOptions
from slime.observe.observer import RunObserver
from slime.registry.plugin_set import load_plugins
from slime_viewer import index as index_module
from slime_viewer import report as module
from slime_viewer.report import write_report_page


def data_of(folder: Path) -> dict[str, Any]:
    """The data in a report."""
    text = (folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*)</script>\n', text)
    assert found is not None
    return dict(json.loads(found[1]))


def test_a_report_has_curves_alerts_and_the_best_and_worst_groups(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12, metrics=lambda _: {"rollout/truncated_ratio": 0.5})
    write_report_page(folder, "failed")
    data = data_of(folder)
    assert (
        data["run"]["state"] == "failed"
        and data["run"]["command"] == f"slime train {tmp_path.name}/run/config.toml --run-name run-again"
    )
    assert "cut off" in data["run"]["verdict"]["alerts"][0]["text"]
    assert data["series"]["values"]["train/kl"][11] == 0.11
    assert len(data["samples"]) == 8 * SAMPLES + GROUPS
    assert {sample["step"] for sample in data["samples"] if sample["kind"] == "train"} <= set(range(7, 12))
    assert {sample["step"] for sample in data["samples"] if sample["kind"] == "eval"} == {12}
    assert "of rollouts 7 to 11 and of the evaluation after 12 rollouts. 35 samples are in this file" in data["note"]
    assert not list(folder.glob("*.sqlite")) and not list(folder.glob("*.partial"))


def test_a_report_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    config = (
        f'[checkpoint]\nhf_checkpoint = "{tmp_path}/models/small"\n\n[data]\nprompt_data = ["/data/sets/a.jsonl"]\n'
    )
    folder = make_run(tmp_path / "run", 12, config=config)
    write_report_page(folder, "interrupted")
    assert str(tmp_path) not in (folder / "report.html").read_text()
    told = dict(data_of(folder)["run"]["config"])
    assert told["checkpoint.hf_checkpoint"] == "…/small" and told["data.prompt_data"] == '["…/a.jsonl"]'


def test_texts_cannot_leave_the_data_of_a_report(tmp_path: Path) -> None:
    hostile = '</script><script>alert(1)</script><!-- "'
    folder = make_run(tmp_path / "run", 1)
    (folder / "config.toml").write_text(f"[run]\nrun_name = '{hostile}'\n")
    rows = [{"group": 1, "reward": n, "prompt": hostile, "response": hostile} for n in range(2)]
    (folder / "rollouts/000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report_page(folder, "finished")
    assert "alert(1)</script>" not in (folder / "report.html").read_text()
    assert any(sample["row"]["response"] == hostile for sample in data_of(folder)["samples"])


def test_a_report_reads_only_the_newest_samples_and_thins_long_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", 30)
    size = (folder / "rollouts/000029.jsonl").stat().st_size
    monkeypatch.setattr(module, "_BYTES", 2 * size + 50)
    monkeypatch.setattr(module, "_STEPS", 10)
    write_report_page(folder, "finished")
    data = data_of(folder)
    assert data["run"]["index"]["samples"] == 2 * GROUPS * SAMPLES + GROUPS
    assert {sample["step"] for sample in data["samples"]} <= {28, 29, 30}
    assert data["series"]["steps"] == list(range(0, 30, 3))
    assert "of rollouts 28 to 29 and of the evaluation after 30 rollouts, of which the newest 0 MiB" in data["note"]


def test_a_report_has_the_first_groups_of_a_rollout_that_is_too_large_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", 2)
    monkeypatch.setattr(module, "_BYTES", 1)
    monkeypatch.setattr(index_module, "_BATCH", 10)  # two groups of four, and two samples of the third
    write_report_page(folder, "finished")
    data = data_of(folder)
    assert {sample["group_key"] for sample in data["samples"]} == {"000001/3", "000001/4"}
    assert data["sizes"] == {"000001/3": SAMPLES, "000001/4": SAMPLES} and len(data["samples"]) == 2 * SAMPLES


def test_long_curves_keep_evaluations_but_not_all_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEPS", 10)
    values = {"a": [1.0] * 1000, "eval/b": [None, 1.0] * 500}
    thinned = module._thinned({"steps": list(range(1000)), "values": values, "axes": {"time": list(range(1000))}})
    assert thinned["axes"]["time"] == thinned["steps"]
    assert len(thinned["steps"]) == 20 and sum(value is not None for value in thinned["values"]["eval/b"]) == 10


def test_a_report_of_a_run_without_steps_says_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("")
    write_report_page(folder, "failed")
    assert data_of(folder)["run"]["problems"] == ["metrics.jsonl is missing: there are no curves"]


def observed(folder: Path, out: io.StringIO | None = None) -> RunObserver:
    folder.mkdir()
    config = RunConfig(run=RunOptions(output_dir=str(folder.parent), run_name=folder.name))
    return RunObserver(config, folder, load_plugins(config.plugins), file=out or io.StringIO())


@pytest.mark.slow
def test_a_run_leaves_a_report(tmp_path: Path) -> None:
    observer = observed(tmp_path / "run")
    observer.step_finished(0, {"rollout/reward_mean": 0.5, "time/step": 1.0})
    observer.run_finished("interrupted")
    data = data_of(tmp_path / "run")
    assert data["run"]["state"] == "interrupted" and data["series"]["values"]["rollout/reward_mean"] == [0.5]


@pytest.mark.slow
def test_the_summary_does_not_wait_for_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    seen: list[str] = []

    def interrupted(*_: object) -> None:
        seen.append(out.getvalue())
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_report_page", interrupted)
    observer = observed(tmp_path / "run", out)
    log = observer._log
    closed: list[bool] = []
    monkeypatch.setattr(log, "close", lambda: closed.append(True))
    with pytest.raises(KeyboardInterrupt):
        observer.run_finished("finished")
    assert "run folder" in seen[0] and closed == [True]
    observer = observed(tmp_path / "other", out)
    observer.run_finished("interrupted", reports=False)
    assert len(seen) == 1, "no time for it"


def test_a_report_that_cannot_be_written_is_told_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observer = observed(tmp_path / "run")
    (tmp_path / "run" / "report.html" / "in the way").mkdir(parents=True)
    observer.step_finished(0, {"rollout/reward_mean": 0.5})
    observer.run_finished("finished")
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert not list((tmp_path / "run").glob("*.partial"))
    assert any(text.startswith("report.html cannot be written; the run continues: ") for text in told), told
