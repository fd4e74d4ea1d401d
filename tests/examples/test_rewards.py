"""The examples about rewards, shortened: properties of their data, and their runs with real engines."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.support.python import run_python
from tests.support.rewards import score

EXAMPLES = Path(__file__).parents[2] / "examples"
#: the three rewards in one short run, so that engines start once
RUN_FILE = """
[data]
prompt-data = "prompts.jsonl"
label-key = "none"
apply-chat-template = true

[checkpoint]
hf-checkpoint = "model"

[rollout]
num-rollout = 1
rollout-batch-size = 4
n-samples-per-prompt = 4
global-batch-size = 16
rollout-max-response-len = 6

[[reward.terms]]
name = "llm_judge"             # the run's own engines
template = "rate {response}"
highest = 1.0
max-tokens = 16
no-score = 0.0

[[reward.terms]]
name = "reward_model"
model-path = "reward_model"
output = "sigmoid"

[[reward.terms]]
name = "code"                  # a number is a program

[estimator]
name = "grpo"

[megatron]
lr = 1e-4
"""
TEACH = """
import importlib.util, json, sys
from pathlib import Path
from teach import teach

def module(path):
    spec = importlib.util.spec_from_file_location(Path(path).parent.name.replace("-", "_"), path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded

examples = Path(sys.argv[1])
judge, rewards = module(examples / "llm-judge/run.py"), module(examples / "reward-model/make_reward_model.py")
teach(Path("model"), judge.lesson, steps=150)
print(rewards.make_reward_model(Path("reward_model"), Path("model"), judge.QUESTION, steps=60))
row = {"prompt": [{"role": "user", "content": judge.QUESTION}], "metadata": {"tests": [{"input": "", "output": ""}]}}
Path("prompts.jsonl").write_text((json.dumps(row) + "\\n") * 8)
"""


def python(code: str, folder: Path, *words: str) -> str:
    paths = f"{EXAMPLES}/code-reward:{EXAMPLES}/common"
    return run_python(["-c", code, *words], folder, PYTHONPATH=paths)


def test_only_correct_programs_pass_the_tests(tmp_path: Path) -> None:
    code = """
import json, random
from pathlib import Path
from make_data import make_data, program, lesson
print(make_data(Path("data")))
print(json.dumps([program("times", 3), program("plus", 3), lesson(random.Random(0))]))
"""
    counts, said = python(code, tmp_path).splitlines()
    assert counts == "{'held_out.jsonl': 48, 'train.jsonl': 246}"
    right, wrong, (question, answer) = json.loads(said)
    rows = [json.loads(line) for name in ("train", "held_out") for line in (tmp_path / f"data/{name}.jsonl").open()]
    [row] = [row for row in rows if row["prompt"][0]["content"] == "x times 3"]
    assert score("code", right, metadata=row["metadata"]).value == 1.0
    assert score("code", wrong, metadata=row["metadata"]).value == 0.0
    assert re.fullmatch(r"x (plus|minus|times) \d+", question) and answer.startswith("f=lambda x:x")


@pytest.mark.parametrize(
    "run_file",
    ["code-reward/grpo.toml", "code-reward/combined.toml", "llm-judge/grpo.toml", "reward-model/grpo.toml"],
)
def test_run_files_use_existing_reward_options(run_file: str) -> None:
    from slime.registry.component import checked_options
    from slime.registry.plugin_set import survey_plugins

    stated: Any = tomllib.loads((EXAMPLES / run_file).read_text(encoding="utf-8"))["reward"]
    components = {one.spec.name: one for one in survey_plugins().components() if one.kind == "reward"}
    for term in stated.get("terms", [stated]):
        options = {key.replace("-", "_"): value for key, value in term.items() if key not in ("name", "weight")}
        checked_options(components[term["name"]], options)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_judge_reward_model_and_code_score_one_run_with_real_engines(tmp_path: Path) -> None:
    right = float(python(TEACH, tmp_path, str(EXAMPLES)).splitlines()[-1])
    assert right > 0.8  # on pairs, where guessing is right half the time
    (tmp_path / "run.toml").write_text(RUN_FILE)
    words = ["train", "run.toml", "--run-name", "short", "--startup-timeout-s", "400"]
    run_python(["-m", "slime.cli.main", *words], tmp_path, timeout_s=800)
    rollout = (tmp_path / "outputs/short/rollouts/000000.jsonl").read_text(encoding="utf-8")
    samples = [json.loads(line) for line in rollout.splitlines()]
    scored = [sample["reward"] for sample in samples if sample["reward"] is not None]
    assert len(scored) == len(samples) == 16
    for sample, reward in zip(samples, scored, strict=True):
        assert 0 < reward["reward_model"] < 1
        assert reward["score"] == pytest.approx(reward["llm_judge"] + reward["reward_model"] + reward["code"])
        assert reward["llm_judge/attempts"] in (1.0, 2.0)
        if re.fullmatch(r"[1-9]\d", sample["response"]):
            assert reward["code"] == 1.0
    # The model has learned to judge before the run, so it writes a score for most answers.
    assert sum(reward["llm_judge/attempts"] == 1.0 for reward in scored) > 8
