"""What a run prints and writes when components raise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun
from tests.support.distributions import make_distribution

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]

REWARD = """\
import sys

async def reward_func(args, sample):
    if sample.index == 1:
        sys.exit("\\x1b[31mno verdict\\x1b[0m")
    if sample.index == 2:
        raise ExceptionGroup("several", [LookupError("in a group")])
    return float(sample.index % 2)
"""
PLUGIN = """
    import slime.plugin as sp

    slime_api = 1

    @sp.hookimpl
    def slime_register_estimators():
        return [sp.EstimatorSpec(name="raising", factory="raising_estimator_impl:Raising")]
"""
ESTIMATOR = """
    class CannotPickle(Exception):
        def __reduce__(self):
            raise TypeError("not to be sent")

    class Raising:
        def __init__(self, options, context): ...

        def advantages(self, batch):
            raise CannotPickle("no advantage")
"""


@pytest.mark.row("T2")
def test_a_run_whose_reward_and_estimator_raise_names_both_with_their_lines(
    slime_train: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    sources = {"raising_estimator": PLUGIN, "raising_estimator_impl": ESTIMATOR}
    make_distribution(site, "slime-raising", "1.2", {"raising": "raising_estimator"}, sources)
    monkeypatch.setenv("PYTHONPATH", str(site))
    (tmp_path / "mine.py").write_text(REWARD)
    flags = ("--num-rollout", "2", "--custom-rm-path", "mine.py", "--advantage-estimator", "raising")
    run = slime_train(*flags, "--reward.error-budget", "1", "--save", "checkpoints", reward=False)
    assert run.wait() == 1, run.output
    mine, theirs = f"{tmp_path}/mine.py", f"{site}/raising_estimator_impl.py"
    # The reward lost samples, and the run went on.
    assert re.search(rf"1x reward mine.py:reward_func \(local \w+\): {mine}:5: SystemExit: no verdict", run.output)
    assert f"{mine}:7: ExceptionGroup: several" in run.output and "LookupError: in a group" in run.output
    assert '        sys.exit("\\x1b[31mno verdict\\x1b[0m")' in run.output
    assert f"Repair {mine}:5. The full traceback is in {run.run_dir.resolve()}/logs/rollout.log." in run.output
    # The estimator ended it.
    error = run.output[run.output.index("slime: error:") :]
    name = "estimator raising/raising (slime-raising 1.2).advantages"
    assert error.startswith(f"slime: error: {name}: {theirs}:10: CannotPickle: no advantage\n")
    assert 'raise CannotPickle("no advantage")' in error and f"{run.run_dir.resolve()}/logs/trainer-0.log" in error
    assert "no checkpoint had been written yet" in run.output
    logs = {path.name: path.read_text(errors="replace") for path in (run.run_dir / "logs").glob("*.log")}
    assert f'File "{mine}", line 5, in reward_func' in logs["rollout.log"]
    assert f'File "{theirs}", line 10, in advantages' in logs["trainer-0.log"]
    assert "estimator raising/raising" in logs["driver.log"]
    rows = [json.loads(line) for line in (run.run_dir / "rollouts/000000.jsonl").open()]
    [failed] = [row["failure"] for row in rows if "SystemExit" in (row["failure"] or "")]
    assert f"{mine}:5: SystemExit: no verdict" in failed
    for text in (run.output, *logs.values()):
        assert "ray::" not in text and "The actor" not in text and "\x1b[36m" not in text
    assert not any("\x1b[" in logs[name] for name in ("rollout.log", "trainer-0.log", "driver.log"))
    assert run.left_over() == []
