"""The openai-agent example: the agent does not import slime, and one rollout of its run works with real engines."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from tests.support.python import run_python

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "openai-agent"


def test_the_agent_does_not_import_slime() -> None:
    tree = ast.parse((EXAMPLE / "agent.py").read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert modules == {"__future__", "typing", "openai", "os", "sys"}


@pytest.mark.parametrize(("answer", "fits"), [("85", True), ("75", True), ("84", False), ("", False), ("eight", False)])
def test_the_agent_objects_to_a_wrong_last_digit(answer: str, fits: bool) -> None:
    spec = importlib.util.spec_from_file_location("openai_agent_example", EXAMPLE / "agent.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.last_digit_fits("27+58=", answer) is fits


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(700)
def test_a_rollout_of_the_agent_is_trained_on(tmp_path: Path) -> None:
    quickstart = ROOT / "examples" / "quickstart"
    work = tmp_path / "outputs" / "quickstart"
    for script, target in (("make_model.py", "warm_start"), ("make_data.py", "data")):
        run_python([str(quickstart / script), str(work / target)], tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    held_out = work / "data" / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:8]))
    flags = ["--num-rollout", "2", "--rollout-batch-size", "4", "--global-batch-size", "32", "--eval-interval", "2"]
    flags += ["--skip-eval-before-train"]
    command = ["-m", "slime.cli.main", "train", str(EXAMPLE / "grpo.toml"), *flags, "--run-name", "short"]
    run_python(command, tmp_path, timeout_s=550)
    found = [json.loads(line) for line in (tmp_path / "outputs/short/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in found if "time/step" in row]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/failed"] == 0
        # A random model is wrong nine times in ten, so the agent objects as often as it can.
        assert 1.2 < step["rollout/agent/requests"] <= 3
        assert step["rollout/agent/errors"] == step["rollout/agent/timeouts"] == 0
    # The trainer computes the same log-probs, so masks and positions of all turns are right.
    assert steps[0]["train/logprob_gap_max"] < 1e-4
    evaluation = next(row for row in found if "eval/held_out" in row)
    assert evaluation["eval/held_out/agent/requests"] > 1.2
