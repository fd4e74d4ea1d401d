"""Rollouts whose reward misbehaves, from prompts to metrics: real worker processes, a scripted policy for engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.conftest import ScriptedPolicy
from tests.support.bad_rewards import bad_rewards
from tests.support.distributions import install

from slime.compat.functions import place_functions
from slime.config.options import DataOptions, RewardOptions, RewardTerm, RolloutOptions
from slime.config.run_config import RunConfig
from slime.errors import ErrorBudgetError
from slime.registry.plugin_set import load_plugins
from slime.rollout.record import Rollout
from slime.run.rollout_process import RolloutProcess
from slime.types import Status

__all__ = ["bad_rewards", "install"]

pytestmark = pytest.mark.usefixtures("bad_rewards")

PROMPTS = 20


def workers(ancestor: int) -> list[int]:
    """The worker processes of `ancestor`, and those they are forked from."""
    parents, ours = {}, []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit():
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(stat[1])
                if stat[0] != "Z" and b"slime.kit.processes." in (folder / "cmdline").read_bytes():
                    ours.append(int(folder.name))
        except OSError:  # it ended while we looked
            continue
    return [pid for pid in ours if ancestor in (parents[pid], parents.get(parents[pid]))]


def alive(pids: list[int]) -> list[int]:
    """Those that have not ended; their new parent may not have asked how yet."""
    return [pid for pid in pids if runs(pid)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def configured(folder: Path, labels: dict[int, str], reward: RewardOptions, **options: Any) -> RunConfig:
    """A run of two batches; `labels` says what the reward does for some prompts."""
    path = folder / "prompts.jsonl"
    rows = [{"prompt": f"{n}+1=", "label": labels.get(n, "good")} for n in range(2 * PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return RunConfig(
        data=DataOptions(prompt_data=str(path)),
        rollout=RolloutOptions(
            num_rollout=2, rollout_batch_size=PROMPTS, n_samples_per_prompt=4, rollout_max_response_len=8
        ),
        reward=reward,
        component_options={"reward": options} if options else {},
    )


def run(config: RunConfig, tokenizer: Any, run_dir: Path) -> list[Rollout]:
    """Run two rollouts, and check that no worker process is left."""
    # Other tests of this session keep the fork server of their engines until the session ends.
    others = workers(os.getpid())

    async def main() -> list[Rollout]:
        functions = place_functions(config)
        plugins = load_plugins(config.plugins, functions.components)
        process = RolloutProcess(functions.config, plugins, ScriptedPolicy(tokenizer), run_dir, tokenizer)
        await process.start()
        try:
            return [await process.make_rollout(number) for number in range(2)]
        finally:
            started = [pid for pid in workers(os.getpid()) if pid not in others]
            await process.close()
            assert len(started) > 1 and alive(started) == []

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reasons", "counts"),
    [
        ({"nan": "returned value = nan, expected a finite number"}, {"failed": 4, "restarts": 0}),
        (
            {
                "spin": "no score after 1.5 s (timeout_s)",
                "sleep": "no score after 1.5 s (timeout_s)",
                "kill": "its worker process was killed by SIGKILL while it scored the sample",
            },
            {"failed": 12, "timeouts": 8, "died": 4},
        ),
    ],
    ids=["its process goes on", "its process ends"],
)
def test_a_run_continues_without_the_samples_a_reward_failed(
    reasons: dict[str, str], counts: dict[str, int], tokenizer: Any, tmp_path: Path
) -> None:
    labels = dict(zip((3, 8, 12), reasons, strict=False))  # 4 samples each, of 80 of the first rollout
    config = configured(tmp_path, labels, RewardOptions(reward="bad/plain"), timeout_s=1.5)
    first, second = run(config, tokenizer, tmp_path)
    for sample in (s for group in first.groups for s in group.samples):
        if (reason := reasons.get(str(sample.label))) is not None:
            assert sample.status is Status.FAILED and sample.reward is None
            assert (sample.failure or "").startswith("reward bad/plain (bad-rewards 1.0)")
            assert (sample.failure or "").endswith(reason)
        else:
            assert sample.reward == {"score": float(sample.index or 0), "half": 0.5}
    assert first.metrics["rollout/failed"] == counts["failed"]
    found = {name: first.metrics.get(f"plugin/reward/bad/plain/{name}", 0) for name in counts}
    assert found == counts
    assert second.metrics["rollout/failed"] == 0
    assert "plugin/reward/bad/plain/failed" not in second.metrics
    assert (first.metrics.get("plugin/reward/bad/plain/restarts", 0) > 0) == ("restarts" not in counts)


@pytest.mark.slow
def test_a_reward_that_always_hangs_ends_the_run_quickly(tokenizer: Any, tmp_path: Path) -> None:
    labels = dict.fromkeys(range(2 * PROMPTS), "sleep")
    config = configured(tmp_path, labels, RewardOptions(reward="bad/plain"), timeout_s=0.2)
    with pytest.raises(ErrorBudgetError) as raised:
        run(config, tokenizer, tmp_path)
    text = str(raised.value)
    assert text.startswith("reward bad/plain (bad-rewards 1.0) is over its error budget: 21 of the 21 samples")
    assert "21x reward bad/plain (bad-rewards 1.0): no score after 0.2 s (timeout_s)" in text
    assert str(tmp_path / "rollouts" / "failed_reward_bad_plain.jsonl") in text
    assert str(tmp_path / "logs" / "reward*.log") in text


@pytest.mark.slow
def test_several_rewards_have_separate_workers_limits_and_metrics(tokenizer: Any, tmp_path: Path) -> None:
    terms = [
        RewardTerm(name="bad/plain", weight=2.0, options={"timeout_s": 1.5}),
        RewardTerm(name="best", weight=0.5),
    ]
    first, _ = run(configured(tmp_path, {3: "spin"}, RewardOptions(terms=terms)), tokenizer, tmp_path)
    for group in first.groups:
        indices = [sample.index or 0 for sample in group.samples]
        for sample in group.samples:
            best = float(sample.index == max(indices))
            scored = {"plain": float(sample.index or 0), "plain/half": 0.5, "best": best}
            expected = None if sample.label == "spin" else {"score": 2 * scored["plain"] + 0.5 * best, **scored}
            assert sample.reward == expected
    assert first.metrics["plugin/reward/bad/plain/timeouts"] == 4
    assert "plugin/reward/bad/best/failed" not in first.metrics
    assert first.metrics["rollout/reward/best"] == pytest.approx(0.25)
    assert {path.name for path in (tmp_path / "logs").iterdir()} >= {"reward0-0.log", "reward1-0.log"}


@pytest.mark.slow
def test_two_uses_of_one_reward_are_distinguished(tokenizer: Any, tmp_path: Path) -> None:
    terms = [RewardTerm(name="bad/plain", options={"timeout_s": 30.0}), RewardTerm(name="bad/plain")]
    first, _ = run(configured(tmp_path, {3: "raise"}, RewardOptions(terms=terms)), tokenizer, tmp_path)
    assert [first.metrics[f"plugin/reward/bad/plain[{place}]/failed"] for place in (0, 1)] == [4, 4]


@pytest.mark.slow
def test_workers_end_when_the_runs_process_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from slime.config import RunConfig
from slime.registry.resolve import Use
from slime.rollout.scoring import IsolatedReward, RewardJob
from slime.types import Sample

async def main():
    job = RewardJob(RunConfig(), Use("reward", "reward", "bad/plain"), Path({str(tmp_path)!r}))
    pool = IsolatedReward(job, "reward r", size=1, timeout_s=1000.0, startup_timeout_s=60)
    await pool.start()
    asyncio.create_task(pool.call([Sample(label="spin")]))
    print("up", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        pids = workers(process.pid)
        assert len(pids) >= 2  # another worker is started when the call takes unusually long
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    deadline = time.monotonic() + 60
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive(pids) == []
