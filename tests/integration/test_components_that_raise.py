"""What a run prints and writes when components raise, and when it is continued elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun
from tests.support.distributions import make_distribution

from slime.observe.metrics import read_metrics
from slime.run.checkpoint.read import intact_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]

SUPERVISED = ("--loss-type", "sft_loss", "--n-samples-per-prompt", "1")
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


def test_a_supervised_run_is_continued_from_its_configuration_elsewhere_before_a_damaged_checkpoint(
    slime_train: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    keep = ("--save-interval", "1", "--save-keep-last", "2", "--save-keep-best", "train/loss:min")
    first = slime_train(*SUPERVISED, "--num-rollout", "4", *keep, reward=False)
    assert first.wait() == 0, first.output
    header, *steps = [line for line in first.output.splitlines() if re.match(r" *(step|\d/3) ", line)]
    assert "loss" in header.split() and len(steps) == 4 and all(len(line) <= 80 for line in steps)
    saved, losses = first.run_dir / "checkpoints", [row["train/loss"] for row in read_metrics(first.run_dir)]
    assert names(saved) == sorted({"latest", kept(3), kept(4), kept(1 + losses.index(min(losses)))})
    (saved / kept(4) / "megatron" / "common.pt").write_bytes(b"")
    [shown] = re.findall(r"slime train (\S+/config.toml)", first.output)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    flags = ("--load", str(saved), "--save", str(saved), "--num-rollout", "5", "--run-name", "again", "--quiet")
    flags += ("--skip-damaged-checkpoints",)
    again = subprocess.run(
        [Path(sys.executable).with_name("slime"), "train", tmp_path / shown, *flags],
        cwd=elsewhere, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert "rollout_000004 is damaged: megatron/common.pt has 0 bytes" in again.stderr
    assert f"continues from {saved / kept(3)}: 1 rollouts are lost, and are done again" in again.stderr
    [log] = tmp_path.rglob("again/logs/driver.log")
    rows = read_metrics(log.parents[1])
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    losses = [row["train/loss"] for row in rows]
    assert names(saved) == sorted({"latest", kept(4), kept(5), kept(1 + losses.index(min(losses)))})
    for number in (4, 5):  # the damaged one was replaced
        intact_checkpoint(saved / kept(number), "--load {}")
    text = log.read_text()
    assert "resumed from" in text and "after 3 rollouts" in text and "resumed" not in again.stdout


def kept(done: int) -> str:
    return f"rollout_{done:06d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
