"""A rollout scored by a function that `--custom-rm-path` names, in real worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.rollout.test_scoring_run import configured, run

from slime.config import resolve
from slime.config.options import RewardOptions
from slime.types import Status

SOURCE = """
import time

from helpers import WORTH

def reward_func(args, sample, **kwargs):
    if sample.label == "spin":
        while True:
            pass
    return {"score": WORTH, "turns": args.max_turns or 0}
"""


@pytest.mark.slow
def test_a_plain_function_that_hangs_is_killed_and_the_others_score(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("WORTH = 0.25")
    (tmp_path / "custom_rm.py").write_text(SOURCE)
    reward = RewardOptions(custom_rm_path=str(tmp_path / "custom_rm.py"))
    first, _ = run(resolve(configured(tmp_path, {3: "spin"}, reward, timeout_s=1.5)), tokenizer, tmp_path)
    for sample in (s for group in first.groups for s in group.samples):
        if sample.label == "spin":
            assert sample.status is Status.FAILED
            assert (sample.failure or "").startswith("reward custom_rm.py:reward_func (local ")
        else:
            assert sample.reward == {"score": 0.25, "turns": 0.0}
    assert first.metrics["plugin/reward/custom_rm.reward_func/timeouts"] == 4


RAISING = """\
import sys

def reward_func(args, sample, **kwargs):
    if sample.label == "exit":
        sys.exit("\\x1b[31mno verdict\\x1b[0m")
    return 0.5
"""


@pytest.mark.slow
@pytest.mark.parametrize("definition", ["def", "async def"])
def test_a_function_that_raises_is_named_with_its_line_and_traceback(
    definition: str, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "custom_rm.py").write_text(RAISING.replace("def", definition))
    reward = RewardOptions(custom_rm_path=str(tmp_path / "custom_rm.py"))
    first, second = run(resolve(configured(tmp_path, {3: "exit"}, reward)), tokenizer, tmp_path)
    failed = [s for group in first.groups for s in group.samples if s.label == "exit"]
    where = f"{tmp_path}/custom_rm.py:5: SystemExit: no verdict"
    scored = [s.reward for group in first.groups for s in group.samples if s.label != "exit"]
    assert scored and set(scored) == {0.5}
    assert failed and all((sample.failure or "").endswith(where) for sample in failed)
    [shown] = first.tracebacks
    assert where in shown and "sys.exit(" in shown and f"Repair {tmp_path}/custom_rm.py:5." in shown
    assert second.tracebacks == []  # that line has been shown
    assert f'File "{tmp_path}/custom_rm.py", line 5, in reward_func' in caplog.text
    assert where in (tmp_path / "rollouts/000000.jsonl").read_text()
