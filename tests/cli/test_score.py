"""`slime score`: rewards tried on stored responses, with the isolation and the accounts of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import Slime
from tests.support.rewards import score as reward_of

from slime.cli import scored_samples
from slime.observe.samples import sample_row
from slime.types import Sample, Status

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "response": "2", "label": "2", "expected": 1},
    {"prompt": "1+2=", "response": "2", "label": 3, "expected": False},
    {"response": "4", "label": "4", "expected": {"score": 1}},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows as a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two samples that would be scored otherwise now, and one whose generation failed."""
    folder = tmp_path / "outputs" / "run"
    (folder / "rollouts").mkdir(parents=True)
    prompts = write(
        tmp_path / "prompts.jsonl",
        [{"question": f"{n}+1=", "label": str(n + 1), "metadata": {"bonus": n}} for n in range(3)],
    )
    (folder / "config.toml").write_text(
        f'[data]\nprompt-data = ["{prompts}"]\ninput-key = "question"\n[reward]\nreward = "exact_match"\n'
    )
    done = {"response_length": 1, "tokens": [1, 2], "status": Status.COMPLETED}
    samples = [
        Sample(index=0, group_index=0, prompt="0+1=", response="1", label="1", reward=1.0, **done),
        Sample(index=1, group_index=0, prompt="0+1=", response="2", label="1", reward={"score": 1.0, "x": 2}, **done),
        Sample(index=2, group_index=1, prompt="1+1=", response="2", label="2", reward=None, failure="reward a: lost"),
        Sample(index=3, group_index=1, prompt="1+1=", response="", label="2", reward=None, failure="generator b: lost"),
    ]
    samples[2].status = samples[3].status = Status.FAILED
    write(folder / "rollouts" / "000000.jsonl", [sample_row(sample) for sample in samples])
    return folder


def test_every_verdict_is_printed(slime: Slime, file: str) -> None:
    ended = slime("score", file, "--reward", "exact_match")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[:4] == [
        f"{file}:1  reward 1",
        f"{file}:2  reward 0",
        f"{file}:3  reward 1",
        "3 samples, mean reward 0.666667",
    ]
    assert lines[4].startswith("reward rewards/exact_match (slime-rl ")


def test_rows_that_expect_what_they_get(slime: Slime, file: str) -> None:
    ended = slime("score", file, "--reward", "exact_match", "--expected-key", "expected")
    assert (ended.code, ended.out.splitlines()[0]) == (0, "3 samples, 3 as expected, 0 not, mean reward 0.666667")


@pytest.mark.parametrize(
    ("expected", "shown"),
    [(0, "reward 1, expected 0"), (None, "reward 1, expected none"), ({"score": 1, "x": 2}, "expected 1 (x 2)")],
)
def test_a_row_that_expects_something_else_is_shown_and_ends_with_1(
    slime: Slime, tmp_path: Path, expected: Any, shown: str
) -> None:
    rows = write(tmp_path / "rows.jsonl", [{**ROWS[0], "expected": expected}, ROWS[1]])
    ended = slime("score", rows, "--reward", "exact_match", "--expected-key", "expected")
    assert ended.code == 1
    [first, label, response, counts, _] = ended.out.splitlines()
    assert first.startswith(f"{rows}:1  ") and shown in first
    assert (label.split(), response.split()) == (["label", "2"], ["response", "2"])
    assert "1 as expected, 1 not" in counts


@pytest.mark.slow
def test_a_sample_that_cannot_be_scored_fails_alone_and_is_counted(slime: Slime, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"response": "B", "expected": None}, *[{**ROWS[0], "label": "2"}] * 5])
    ended = slime("score", rows, "--reward", "math")
    assert ended.code == 0 and f"{rows}:1  failed: reward rewards/math" in ended.out
    assert "6 samples, mean reward 1, 1 failed" in ended.out and "failed 1" in ended.out.splitlines()[-1]
    assert "no label to compare with" in ended.err and "please report" not in ended.err


@pytest.mark.slow
def test_a_reward_over_its_budget_says_that_a_run_would_have_ended(slime: Slime, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"response": "B"}] * 6)
    ended = slime("score", rows, "--reward", "math")
    assert ended.code == 1 and "would have ended: 6 of 6 samples failed" in ended.out
    assert slime("score", rows, "--reward", "math", "--reward.error-budget", "1").code == 0


@pytest.mark.parametrize(
    ("failures", "others", "budget", "why"),
    [
        (12, 1, "0.25", None),
        (13, 1, "0.25", "13 of 14 samples failed in {} (--reward.error-budget)"),
        (12, 0, "0.25", "none of 12 samples has a reward in {}"),
        (2, 0, "1", "none of 2 samples has a reward in {}"),
    ],
)
def test_an_evaluation_may_fail_its_share_of_fifty_samples_but_not_all_as_in_a_run(
    slime: Slime, run: Path, failures: int, others: int, budget: str, why: str | None
) -> None:
    unlabelled = Sample(index=0, group_index=0, prompt="1+1=", response="2", response_length=1, tokens=[1, 2])
    unlabelled.status = Status.COMPLETED
    rows = [sample_row(unlabelled)] * failures + [sample_row(replace(unlabelled, label="2"))] * others
    file = write(run / "rollouts" / "eval_held_000003.jsonl", rows)
    ended = slime("score", file, "--reward.error-budget", budget)
    assert f"{failures} failed" in ended.out
    verdict = [line for line in ended.out.splitlines() if "would have ended" in line]
    assert verdict == ([] if why is None else [f"a run with these samples would have ended: {why.format(file)}"])
    assert ended.code == len(verdict)


@pytest.mark.slow
def test_a_function_that_hangs_or_ends_its_process_fails_its_own_sample(slime: Slime, tmp_path: Path) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "import os\n"
        "def reward_func(args, sample, **kwargs):\n"
        "    while sample.response == 'hang':\n"
        "        pass\n"
        "    if sample.response == 'die':\n"
        "        os._exit(3)\n"
        "    return {'score': len(sample.response), 'bonus': sample.metadata['bonus']}\n"
    )
    rows = [{"response": text, "metadata": {"bonus": 7}} for text in ("hang", "die", "good")]
    file = write(tmp_path / "rows.jsonl", rows)
    ended = slime("score", file, "--custom-rm-path", str(function), "--reward.timeout-s", "8")
    lines = ended.out.splitlines()
    assert "no score after 8 s" in lines[0] and "exit code 3" in lines[1]
    assert lines[2] == f"{file}:3  reward 4 (bonus 7)"
    assert "timeouts 1, died 1" in ended.out


@pytest.mark.slow
def test_rewards_that_compare_a_group_get_the_rows_of_a_group(
    slime: Slime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a group that is scored with others, or across what is scored at once; null is no group."""
    monkeypatch.setattr(scored_samples, "WINDOW", 4)
    function = tmp_path / "mine.py"
    function.write_text("def reward_func(args, samples, **kwargs):\n    return [len(samples)] * len(samples)\n")
    rows = write(
        tmp_path / "rows.jsonl", [{"response": "a", "group": group} for group in (0, 0, 1, 2, 2, 2, None, None)]
    )
    ended = slime("score", rows, "--custom-rm-path", str(function), "--group-rm")
    assert [line.split()[-1] for line in ended.out.splitlines()[:8]] == ["2", "2", "1", "3", "3", "3", "1", "1"]


def test_other_columns_of_a_file_mean_nothing(slime: Slime, tmp_path: Path) -> None:
    rows = [{**ROWS[0], "status": "failed", "messages": 3, "prompt": [{"role": "assistant", "content": "an answer"}]}]
    ended = slime("score", write(tmp_path / "rows.jsonl", rows), "--reward", "exact_match")
    assert ended.code == 0 and "1 sample, mean reward 1" in ended.out


def test_parquet_with_other_keys_and_a_slice(slime: Slime, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"output": ["a", "b", "c"], "truth": ["a", "a", "c"]}), path)
    keys = ("--response-key", "output", "--label-key", "truth", "--reward", "exact_match")
    ended = slime("score", f"{path}@[1:]", *keys)
    assert [line.split()[-1] for line in ended.out.splitlines()[:2]] == ["0", "1"]


def test_several_rewards_of_a_run_file(slime: Slime, file: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[[reward.terms]]\nname = "exact_match"\n[[reward.terms]]\nname = "f1"\nweight = 0.5\n'
    )
    ended = slime("score", file, str(tmp_path / "run.toml"))
    assert ended.out.splitlines()[0] == f"{file}:1  reward 1.5 (exact_match 1, f1 1)"


def test_a_run_shows_the_rewards_that_would_change(slime: Slime, run: Path) -> None:
    ended = slime("score", str(run))
    assert (ended.code, ended.err) == (0, "")
    changed = [line for line in ended.out.splitlines() if "->" in line and "rollouts" in line]
    assert [line.split("  ")[1] for line in changed] == ["reward 1 -> 0", "reward none -> 1"]
    assert "3 samples, 2 rewards would change: 1 higher, 1 lower, mean reward 1 -> 0.666667" in ended.out
    assert "1 without an answer" in ended.out


@pytest.mark.slow
def test_another_reward_on_a_run_and_the_metadata_of_its_prompts(slime: Slime, run: Path) -> None:
    function = run.parent / "mine.py"
    function.write_text("def reward_func(args, sample, **kwargs):\n    return sample.metadata['bonus'] + 0.5\n")
    ended = slime("score", str(run / "rollouts" / "000000.jsonl") + "@[0:]", "--custom-rm-path", str(function))
    assert (ended.code, ended.err) == (0, "")
    changed = [line.split("  ")[1] for line in ended.out.splitlines() if "->" in line and "rollouts" in line]
    assert changed == ["reward 1 -> 0.5", "reward 1 -> 0.5", "reward none -> 1.5"]


def test_prompts_that_are_gone_are_noted(slime: Slime, run: Path) -> None:
    prompts = run.parents[1] / "prompts.jsonl"
    write(prompts, [{"question": "another", "label": "1"}])
    assert "note: 2 of 2 prompts are not in the run's prompt files" in slime("score", str(run)).err
    prompts.unlink()
    assert "note: samples have no metadata: " in slime("score", str(run)).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere.jsonl --reward exact_match", "nowhere.jsonl does not exist"),
        ("{file}", "--reward is missing"),
        ("{file} --reward exact_mtch", "Did you mean exact_match?"),
        ("{file} --reward exact_match --reward.ignore-cas true", "ignore_case"),
        ("{file} --reward exact_match --response-key respons", "Did you mean response?"),
        ("{file} --reward exact_match --expected-key expect", "Did you mean expected?"),
        ("{file} --reward exact_match --expected-key response", "rows.jsonl:1: 'response' is '2', expected a number"),
        ("--reward exact_match", "expected a file or a run folder first"),
        ("{run} --reward exact_match --response-key response", "drop --response-key"),
        ("{run}/rollouts/000000.jsonl other.toml", "drop other.toml"),
    ],
)
def test_bad_input_is_refused(slime: Slime, file: str, run: Path, words: str, message: str) -> None:
    ended = slime("score", *(word.format(file=file, run=run) for word in words.split()))
    assert (ended.code, ended.out) == (2, ""), ended
    assert message in ended.err and "Traceback" not in ended.err


def test_a_response_that_is_no_text_is_refused_with_file_and_line(slime: Slime, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [ROWS[0], {"response": ["a", "b"]}])
    ended = slime("score", rows, "--reward", "exact_match")
    assert ended.code == 2 and f"{rows}:2: 'response' is a list, expected the text of one response" in ended.err


def test_the_length_of_a_response_is_read_or_asked_for(slime: Slime, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"response": "abc", "response_tokens": 20}, {"response": "abc"}])
    ended = slime("score", rows, "--reward", "length", "--reward.free", "10", "--reward.limit", "30")
    first, second, *_ = ended.out.splitlines()
    assert first.endswith("reward 0.5") and "no number of tokens" in second


@pytest.mark.slow
def test_the_table_of_pairs_is_run_by_it(slime: Slime, tmp_path: Path) -> None:
    """As a user's own table would be; a few pairs stand for all, which other tests try."""
    table = Path(__file__).parents[1] / "rewards" / "tables" / "math_pairs.tsv"
    lines = table.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("\t") for line in lines if not line.startswith("#")][:60]
    boxed = [(rf"\boxed{{{box}}}", label, verdict == "right") for verdict, label, box in pairs]
    rows = [{"response": response, "label": label, "expected": right} for response, label, right in boxed]
    ended = slime("score", write(tmp_path / "pairs.jsonl", rows), "--reward", "math", "--expected-key", "expected")
    assert ended.code == 0 and "60 samples, 60 as expected, 0 not" in ended.out
    assert reward_of("math", boxed[0][0], boxed[0][1]).value == float(boxed[0][2])
