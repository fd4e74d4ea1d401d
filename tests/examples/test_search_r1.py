"""The search example, shortened: properties of its data, and both of its runs with real engines."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tests.support.python import run_python

from slime_generators.tools.search import SearchIndex, make_search

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "search-r1"
FACT = re.compile(r"the (\w+) of (\w+) is (\w+)\.")
RESULTS = 2

#: a function for --rollout-sample-filter-path that drops nothing and records what is trained on
WITNESS = """
import json
from pathlib import Path

def witness(args, groups):
    with Path("witness.jsonl").open("a") as file:
        for group in groups:
            for sample in group:
                file.write(json.dumps(sample.to_dict()) + "\\n")
"""


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's data at the path of its run files."""
    folder = tmp_path_factory.mktemp("search-r1")
    run_python([str(EXAMPLE / "make_data.py"), "outputs/search-r1/data"], folder)
    return folder


@pytest.fixture(scope="module")
def with_model(root: Path) -> Path:
    """The same folder, with the example's model."""
    run_python([str(EXAMPLE / "make_model.py"), "outputs/search-r1/model"], root)
    return root


@pytest.fixture(scope="module")
def data(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by file name without extension."""
    return {path.stem: rows(path) for path in (root / "outputs/search-r1/data").glob("*.jsonl")}


def facts(passages: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """(field, subject) -> value."""
    found = {(m[1], m[2]): m[3] for row in passages if (m := FACT.fullmatch(row["text"]))}
    assert len(found) == len(passages)
    return found


@pytest.mark.row("W3")
def test_every_answer_is_in_the_corpus_and_the_right_searches_find_it(data: dict[str, list[dict[str, Any]]]) -> None:
    known = facts(data["corpus"])
    index = SearchIndex([row["text"] for row in data["corpus"]])

    def look_up(field: str, subject: str) -> str:
        texts = [index.passages[place] for place in index.best(f"{field} {subject}", RESULTS)]
        assert f"the {field} of {subject} is {known[field, subject]}." in texts
        return known[field, subject]

    for row in data["train"] + data["held_out"]:
        *path, subject = re.findall(r"the (\w+)|of (\w+)\?", row["prompt"][0]["content"])
        name = subject[1]
        for field, _ in reversed(path):
            name = look_up(field, name)
        assert name == row["label"]
        assert len(path) == row["metadata"]["hops"]


def test_questions_do_not_overlap_with_warm_start_or_held_out_set(
    data: dict[str, list[dict[str, Any]]],
) -> None:
    shown = set(re.findall(r"\w+", json.dumps(data["teacher"]))) | set(re.findall(r"\w+", json.dumps(data["train"])))
    names = {name for (_, subject), value in facts(data["corpus"]).items() for name in (subject, value)}
    taught = set(re.findall(r"\w+", json.dumps(data["teacher"])))
    assert not names & taught
    asked = {row["prompt"][0]["content"].rstrip("?").rpartition(" ")[2] for row in data["held_out"]}
    assert len(asked) == 48  # 24 countries and their capitals
    assert not asked & shown


def test_the_teacher_is_sometimes_right(root: Path, data: dict[str, list[dict[str, Any]]]) -> None:
    known = facts(data["teacher_corpus"])
    search = make_search(root / "outputs/search-r1/data/teacher_corpus.jsonl", RESULTS)
    answered = right = 0
    for row in data["teacher"]:
        question, *said = row["prompt"]
        for call, result in zip(said[::2], said[1::2], strict=True):
            written = json.loads(call["content"].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert search(**written["arguments"]) == result["content"]
        if row["label"].startswith("answer: "):
            *path, subject = re.findall(r"the (\w+)|of (\w+)\?", question["content"])
            name = subject[1]
            for field, _ in reversed(path):
                name = known[field, name]
            answered, right = answered + 1, right + (row["label"] == f"answer: {name}")
    assert answered == 12_000
    assert 0.3 < right / answered < 0.4


@pytest.mark.nightly
def test_calls_are_short_and_any_text_can_be_encoded(with_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(with_model / "outputs/search-r1/model")
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "capital suntal"}}\n</tool_call>'
    for text in (call, "é \u2028 北京 <tool_call>{", "error: no tool is called 'serch'", "[3] the \n\n"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode(call, add_special_tokens=False)) == 12


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1700)
def test_both_runs_train_only_on_the_models_tokens(with_model: Path) -> None:
    root = with_model
    from transformers import AutoTokenizer

    slime = ["-m", "slime.cli.main", "train"]
    (root / "witness.py").write_text(WITNESS, encoding="utf-8")
    # Long enough to learn to write calls, not correct ones; the whole example shows that the reward rises.
    run_python([*slime, str(EXAMPLE / "warm_start.toml"), "--num-rollout", "10", "--run-name", "warm"], root)
    flags = ["--num-rollout", "2", "--rollout-batch-size", "8", "--global-batch-size", "64", "--eval-interval", "2"]
    flags += ["--rollout-sample-filter-path", "witness.py:witness", "--run-name", "grpo"]
    flags += ["--skip-eval-before-train", "--n-samples-per-eval-prompt", "1"]
    run_python([*slime, str(EXAMPLE / "grpo.toml"), *flags], root)

    steps = [row for row in rows(root / "outputs/grpo/metrics.jsonl") if "time/step" in row]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/tools/search/calls"] > 0.1
        assert step["rollout/tools/search/timeouts"] == step["rollout/failed"] == 0
        assert 1.1 < step["rollout/turns"] <= 4
        assert 0 <= step["rollout/reward_mean"] <= 1
        assert step["train/logprob_gap_max"] < 1e-4
    evaluations = [row for row in rows(root / "outputs/grpo/metrics.jsonl") if "eval/held_out" in row]
    assert evaluations[-1]["eval/held_out/tools/search/calls"] > 0.1

    tokenizer = AutoTokenizer.from_pretrained(root / "outputs/search-r1/model")
    search = make_search(root / "outputs/search-r1/data/corpus.jsonl", RESULTS)
    samples = rows(root / "witness.jsonl")
    assert len(samples) == 128
    searched = 0
    for sample in samples:
        response = sample["tokens"][-sample["response_length"] :]
        assert tokenizer.decode(sample["tokens"]).startswith(f"<|user|>{sample['prompt'][0]['content']}<|end|>")
        pieces = [
            (trained, list(part))
            for trained, part in groupby(
                zip(sample["loss_mask"], response, sample["rollout_log_probs"], strict=True), key=lambda row: row[0]
            )
        ]
        texts = [tokenizer.decode([token for _, token, _ in part]) for _, part in pieces]
        said = sample["metadata"]["messages"]
        assert [trained for trained, _ in pieces] == [int(m["role"] == "assistant") for m in said]
        for message, text, (trained, part) in zip(said, texts, pieces, strict=True):
            if not trained:
                assert text == f"<|tool|>{message['content']}<|end|><|assistant|>"
                assert all(log_prob == 0 for _, _, log_prob in part)
            else:
                assert text.removesuffix("<|end|>") == message["content"]
        for call, result in zip(said[::2], said[1::2], strict=False):
            query = re.search(r'"query": "(\w+ \w+)"', call["content"])
            if query and not result["content"].startswith("error"):
                searched += 1
                assert result["content"] == search(query[1])
    assert searched > 10
