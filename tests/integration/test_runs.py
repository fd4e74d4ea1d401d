"""The real loop from end to end: Ray, Megatron-core, SGLang and its router."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from tests.integration.conftest import SlimeRun, starting
from tests.support.hostile_checkpoints import ATTACKS

from slime.observe.metrics import depends_on_time, read_metrics
from slime.run.checkpoint.files import digest_of_json, record_files

pytestmark = pytest.mark.engine
Start = Callable[..., SlimeRun]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Iterator[tuple[Start, SlimeRun]]:
    """A synchronous run of three rollouts that has ended, and what starts others in its folder."""
    with starting(tmp_path_factory.mktemp("finished"), model, data) as start:
        run = start(*flags_of_finished(data), "--save", "ckpt", "--save-hf", "export/{rollout}")
        assert run.wait() == 0, run.output
        yield start, run


def flags_of_finished(data: Path) -> list[str]:
    """What it has in common with the run that continues it."""
    return [
        *("--num-rollout", "3", "--use-kl-loss", "--kl-loss-coef", "0.01", "--check-weight-update-equal"),
        *("--rollout-shuffle", "--deterministic", "--use-tis"),  # which trains on the engine's log-probs too
        *("--eval-prompt-data", "held", str(data), "--eval-interval", "3", "--n-samples-per-eval-prompt", "4"),
        *("--eval-temperature", "1", "--eval-max-response-len", "8", "--save-interval", "2", "--async-save"),
    ]


@pytest.mark.row("L1")
def test_a_synchronous_run_trains_syncs_evaluates_saves_and_ends_cleanly(finished: tuple[Start, SlimeRun]) -> None:
    _, run = finished
    assert run.left_over() == []

    steps = run.steps()
    assert [row["step"] for row in steps] == [0, 1, 2]
    for number, row in enumerate(steps):
        assert row["weight_version"] == number + 2  # one sync before the first rollout, one after each
        assert row["rollout/samples"] == 8
        assert row["train/grad_norm"] > 1e-3  # the weights change, so the gap shows whether they arrive
        assert row["train/logprob_gap_max"] < 1e-4
        assert all(math.isfinite(v) for v in row.values())
    assert abs(steps[0]["train/kl"]) < 1e-5  # the first step starts at the reference
    for name in ("config.toml", "plugins.json", "metrics.jsonl", "report.html"):
        assert (run.run_dir / name).stat().st_size > 0, name
    rows = [json.loads(line) for line in (run.run_dir / "rollouts" / "000001.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert all(row["weight_versions"] == ["2"] for row in rows)
    assert all(row["status"] in ("completed", "truncated") for row in rows)
    for number, row in enumerate(steps):
        assert_columns_are_those_of_the_step(run.run_dir, number, row)
    assert (run.root / "ckpt" / "latest").read_text().strip() == "rollout_000003"
    # every interval was exported, complete, and each with the weights of its time
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exports = {path.name: path for path in (run.root / "export").iterdir()}
    assert exports.keys() == {"2", "3"}
    heads = [AutoModelForCausalLM.from_pretrained(path).state_dict()["lm_head.weight"] for path in exports.values()]
    assert not torch.equal(*heads)
    assert AutoTokenizer.from_pretrained(exports["2"]).chat_template
    # the checkpoint of the finished run has the model that the run exported at its end
    saved, exported = run.root / "export" / "3", run.root / "exported"
    ended = slime("convert", "ckpt", "exported", "--verify", cwd=run.root)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {path.name for path in exported.iterdir()} == {path.name for path in saved.iterdir()}
    weights, expected = (load_file(folder / "model.safetensors") for folder in (exported, saved))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def assert_columns_are_those_of_the_step(run_dir: Path, number: int, step: dict[str, float]) -> None:
    """All samples fit into the budget, so the file's means are the step's metrics."""
    samples = (run_dir / "rollouts" / f"{number:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = pq.read_table(run_dir / "rollouts" / f"{number:06d}.tokens.parquet").to_pylist()
    assert sorted(row["line"] for row in rows) == list(range(len(samples)))
    for row in rows:
        sample = json.loads(samples[row["line"]])
        assert (row["group"], row["index"]) == (sample["group"], sample["index"])
        assert len(row["tokens"]) == sample["response_tokens"]
        assert sum(row["loss_mask"]) == sample["trained_tokens"]
        assert set(row["weight_version"]) == {int(sample["weight_versions"][0])} and set(row["source"]) == {0}
    flat = {
        name: np.concatenate([np.array(row[name]) for row in rows])
        for name in (
            "engine_logprob",
            "trainer_logprob",
            "ref_logprob",
            "gap",
            "entropy",
            "ratio",
            "clipped",
            "advantage",
        )
    }
    assert not any(np.isnan(values).any() for values in flat.values())
    gap = np.abs(flat["trainer_logprob"] - flat["engine_logprob"])
    assert np.allclose(np.abs(flat["gap"]), gap, atol=1e-6)
    assert max(row["gap_max"] for row in rows) == pytest.approx(step["train/logprob_gap_max"], abs=1e-7)
    by_hand = {
        "logprob_gap_mean": gap.mean(),
        "entropy": flat["entropy"].mean(),
        "ratio": flat["ratio"].mean(),
        "clip_fraction": flat["clipped"].mean(),
        "advantage_mean": flat["advantage"].mean(),
    }
    assert {name: step[f"train/{name}"] for name in by_hand} == pytest.approx(by_hand, rel=1e-4, abs=1e-7)


def slime(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a `slime` command to its end."""
    command = [str(Path(sys.executable).with_name("slime")), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


def sign(checkpoint: Path) -> None:
    """Record the hashes of the files as they are now, as somebody does who changed them on purpose."""
    path = checkpoint / "state.json"
    state = json.loads(path.read_text())
    state["files"] = record_files(checkpoint, [checkpoint / name for name in state["files"]])
    del state["sha256"]
    path.write_text(json.dumps({**state, "sha256": digest_of_json(state)}))


@pytest.mark.row("L7")
def test_a_finished_run_is_exported_again_and_a_hostile_copy_of_it_runs_nothing(
    finished: tuple[Start, SlimeRun], model: Path, data: Path
) -> None:
    start, run = finished
    state = json.loads((run.root / "ckpt" / "rollout_000003" / "state.json").read_text())
    held = {path for path in (run.root / "ckpt" / "rollout_000003").rglob("*") if path.is_file()}
    assert len(state["files"]) == len(held) - 1, "every file but state.json has a hash"

    again = start("--num-rollout", "3", "--save", "ckpt", "--load", "ckpt", "--save-hf", "again", name="again")
    assert again.wait() == 0, again.output
    assert "nothing is left to train" in again.output
    assert not list((again.run_dir / "logs").glob("engine*")) and not list((again.run_dir / "logs").glob("rollout*"))
    weights, before = load_file(run.root / "again" / "model.safetensors"), load_file(model / "model.safetensors")
    assert weights.keys() == before.keys()
    assert any(not weights[name].equal(before[name]) for name in before), "the trained weights, not the original ones"
    by_the_run = load_file(run.root / "export" / "3" / "model.safetensors")
    assert all(weights[name].equal(by_the_run[name]) for name in before)

    hostile, canary = run.root / "hostile", run.root / "canary"
    shutil.copytree(run.root / "ckpt", hostile)
    ATTACKS["in_metadata"](hostile / "rollout_000003" / "megatron", canary)
    changed = slime("convert", "hostile", "model-a", cwd=run.root)
    assert changed.returncode == 2 and "megatron/.metadata has" in changed.stderr, changed
    sign(hostile / "rollout_000003")
    evaluation = ("--eval-prompt-data", "held", str(data), "--reward", "exact_match")
    for words in (("convert", "hostile", "model-b"), ("eval", "hostile", *evaluation, "--eval-max-response-len", "8")):
        ended = slime(*words, cwd=run.root)
        assert ended.returncode == 2, ended
        assert "names posix.system, which could run code" in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr
    assert not canary.exists()
    assert not (run.root / "model-b").exists()


@pytest.mark.slow
@pytest.mark.row("E1")
def test_a_checkpoint_gets_the_score_that_its_run_reported(finished: tuple[Start, SlimeRun]) -> None:
    _, run = finished
    [reported] = [row for row in run.rows() if "eval/held" in row and row["step"] == 3]
    ended = slime("eval", "ckpt", "--run-name", "scored", cwd=run.root)
    assert ended.returncode == 0, ended.stderr
    assert "eval of " in ended.stdout and "pass@4" in ended.stdout and "95% interval" in ended.stdout
    scored = json.loads((run.root / "outputs" / "scored" / "results.json").read_text())
    assert scored["rollouts_done"] == 3
    [held] = scored["sets"]
    names = ("response_length_mean", "truncated_ratio", "pass@4")
    assert held["mean_reward"]["value"] == reported["eval/held"]
    assert {name: held["metrics"][name] for name in names} == {name: reported[f"eval/held/{name}"] for name in names}
    assert not list((run.root / "outputs" / "scored").glob(".model*"))


@pytest.mark.slow
@pytest.mark.row("L8")
def test_a_resumed_deterministic_run_equals_an_uninterrupted_one_to_the_bit(
    finished: tuple[Start, SlimeRun], data: Path
) -> None:
    start, whole = finished
    assert whole.steps(2)[0]["time/save"] > 0  # the loop's part: the copy
    second = start(*flags_of_finished(data), "--load", "ckpt/rollout_000002", "--save", "second-ckpt", name="second")
    assert second.wait() == 0, second.output

    assert [row["step"] for row in second.steps()] == [0, 1, 2]  # the curve of the first run goes on
    assert second.prompts(2) == whole.prompts(2)
    # weights, optimizer, versions and sampling continue too
    assert all(row["train/grad_norm"] > 1e-3 and row["train/logprob_gap_max"] < 1e-4 for row in second.steps(2))
    assert_same_bits(whole, [whole, whole, second], "ckpt", second, "second-ckpt")


@pytest.mark.slow
def test_a_resumed_asynchronous_deterministic_run_equals_an_uninterrupted_one_to_the_bit(
    slime_train: Start, data: Path
) -> None:
    # Evaluations, which are greedy, run beside the rollouts: the engine would sample otherwise in a batch of both.
    evaluated = ("--eval-prompt-data", "held", str(data), "--eval-interval", "2", "--skip-eval-before-train")
    same = ("--async", "--async-buffer-size", "2", "--deterministic", "--use-tis", "--save-interval", "2", *evaluated)
    kept = ("--save-keep-last", "2", "--save-keep-best", "eval/held", "--save", "whole-ckpt")
    whole = slime_train(*same, *kept, "--num-rollout", "6", name="whole")
    assert whole.wait() == 0, whole.output
    second = slime_train(
        *same, "--num-rollout", "6", "--load", "whole-ckpt/rollout_000004", "--save", "second-ckpt", name="second"
    )
    assert second.wait() == 0, second.output
    versions = json.loads((whole.run_dir / "rollouts" / "000003.jsonl").read_text().splitlines()[0])["weight_versions"]
    assert versions == ["2"]  # generated two rollouts ahead, by one version of the weights
    assert_same_bits(whole, [whole] * 4 + [second] * 2, "whole-ckpt", second, "second-ckpt")

    evaluations = [row for row in whole.rows() if "eval/held" in row]
    assert [row["step"] for row in evaluations] == [2, 4, 6]
    for row in evaluations:  # of their own weights, whatever was trained in the meantime
        path = whole.run_dir / "rollouts" / f"eval_held_{row['step']:06d}.jsonl"
        versions = {tuple(json.loads(line)["weight_versions"]) for line in path.read_text().splitlines()}
        assert versions == {(str(row["step"] + 1),)} == {(str(int(row["eval/held/weight_version"])),)}
    # Each evaluation finished after the checkpoint of its weights was saved.
    scores = [row["eval/held"] for row in evaluations]
    best = {"rollout_000002"} if scores[0] > max(scores[1:]) else set()
    names = {path.name for path in (whole.root / "whole-ckpt").glob("rollout_*")}
    assert names == {"rollout_000004", "rollout_000006"} | best


def assert_same_bits(
    whole: SlimeRun,
    parts: list[SlimeRun],
    checkpoint: str,
    last: SlimeRun,
    last_checkpoint: str,
    *,
    but: Collection[str] = (),
) -> None:
    """A run and the runs that did its rollouts have the same samples, metrics, weights, optimizer and rollout state.

    `but`: metrics that may differ.
    """
    for number, part in enumerate(parts):
        mine, its = (run.run_dir / "rollouts" / f"{number:06d}.jsonl" for run in (part, whole))
        assert mine.read_bytes() == its.read_bytes(), number
    # A resumed run begins its file with the earlier rows, those of a step and of the evaluation before it in one.
    for resumed, uninterrupted in zip(*(read_metrics(run.run_dir) for run in (last, whole)), strict=True):
        rows = (resumed, uninterrupted)
        timeless = ({k: v for k, v in row.items() if not (depends_on_time(k) or k in but)} for row in rows)
        assert next(timeless) == next(timeless)
    saved, its = (
        run.root / name / f"rollout_{len(parts):06d}" for run, name in ((last, last_checkpoint), (whole, checkpoint))
    )
    paths = (*its.rglob("*.distcp"), *its.rglob("common.pt"), *its.glob("rollout/*"))
    files = [path.relative_to(its) for path in paths]
    assert len(files) > 2
    for name in files:
        assert (saved / name).read_bytes() == (its / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.row("L2")
def test_an_asynchronous_run_generates_ahead_and_trains_on_every_rollout_in_order(slime_train: Start) -> None:
    run = slime_train(
        "--async", "--async-buffer-size", "2", "--update-weights-interval", "2", "--num-rollout", "5",
        "--rollout-num-gpus", "2", "--update-weight-transport", "disk", "--inflight-kv", "keep",
        "--max-staleness", "2",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    assert run.left_over() == []
    steps = run.steps()
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4]
    assert [row["weight_version"] for row in steps] == [1, 2, 2, 3, 3]
    rows = [json.loads(line) for line in (run.run_dir / "rollouts" / "000002.jsonl").read_text().splitlines()]
    assert {v for row in rows for v in row["weight_versions"]} <= {"1", "2"}
    # rollouts 0, 1, 2 are started with the first weights, so rollout 2 is trained on two rollouts later; rollout 3
    # would be three rollouts later and waits for the next weights
    assert steps[0]["train/staleness_max"] == 0
    assert 1 <= steps[2]["train/staleness_max"] <= 2
    assert max(row["train/staleness_max"] for row in steps) <= 2
    for row in steps:
        counts = {name: count for name, count in row.items() if name.startswith("train/staleness/")}
        assert sum(counts.values()) == 8
        assert row["train/staleness_mean"] == sum(int(name.split("/")[-1]) * n for name, n in counts.items()) / 8
        assert row["train/staleness_over"] == 0
        assert 0 <= row["rollout/ready"] <= 2
        assert 0 <= row["time/engines_idle"] < 30
    header = next(line for line in run.output.splitlines() if line.split()[:1] == ["step"])
    assert {"ready", "stale"} <= set(header.split())
    # the ratio of stale samples uses the weights that produced them
    assert abs(steps[0]["train/ratio"] - 1) < 1e-4
    assert abs(steps[1]["train/ratio"] - 1) > 1e-4


@pytest.mark.row("A9")
def test_supervised_fine_tuning_starts_no_engine_and_lowers_the_loss(slime_train: Start) -> None:
    run = slime_train(
        "--num-rollout", "6", "--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--lr", "1e-2", reward=False
    )
    assert run.wait() == 0, run.output
    losses = [row["train/loss"] for row in run.steps()]
    assert losses[-1] < losses[0]
    assert not list((run.run_dir / "logs").glob("engine-*"))
    assert not (run.run_dir / "logs" / "router.log").exists()
