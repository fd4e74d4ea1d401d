"""Run folders as slime writes them, without a run: real files of made-up samples and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slime.observe.metrics import MetricsWriter
from slime.observe.samples import write_eval, write_rollout
from slime.types import Group, Sample, Status

#: step, group, sample -> reward
Reward = Callable[[int, int, int], float]

GROUPS, SAMPLES = 3, 4


def rising(step: int, group: int, sample: int) -> float:
    """More samples are right in later steps."""
    return float((group + sample) % 12 < 3 + step)


def sample_of(step: int, group: int, number: int, reward: float, **changed: Any) -> Sample:
    fields: dict[str, Any] = {
        "group_index": step * GROUPS + group,
        "index": (step * GROUPS + group) * SAMPLES + number,
        "prompt": [{"role": "user", "content": f"what is {group}+{group}?"}],
        "response": f"it is {2 * group if reward else 7} I carry the {number}",
        "tokens": [1] * 12,
        "response_length": 5,
        "label": str(2 * group),
        "reward": reward,
        "status": Status.COMPLETED,
        "finish_reason": "stop",
        "weight_versions": [str(step + 1)],
    }
    return Sample(**{**fields, **changed})


def make_run(
    folder: Path,
    steps: int = 6,
    *,
    reward: Reward = rising,
    metrics: Callable[[int], dict[str, float]] = lambda _: {},
    config: str = "[run]\nseed = 1\n\n[megatron]\nlr = 0.001\n",
    finished: bool = True,
    dropped: Sequence[int] = (),
) -> Path:
    """Write a run of so many steps; in steps `dropped` a filter dropped one more group."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    used = {"reward": {"id": "rewards/exact_match", "distribution": "slime-rl", "version": "0.1.0", "options": {}}}
    (folder / "plugins.json").write_text(json.dumps({"format": 2, "used": used}))
    lock = {"pid": 1, "host": "elsewhere", "finished": steps if finished else None}
    (folder / "run.lock").write_text(json.dumps(lock))
    (folder / "logs").mkdir()
    warned = "2026-01-01 10:00:00,123 WARNING slime.rollout: the reward is slow\n"
    (folder / "logs" / "driver.log").write_text(f"2026-01-01 09:00:00,123 INFO slime.run: begins\n{warned}")
    writer = MetricsWriter(folder)
    for step in range(steps):
        add_step(folder, writer, step, reward=reward, metrics=metrics(step), dropped=step in dropped)
    writer.close()
    held = [(sample_of(0, group, 0, 1.0), {"attempt": 0}) for group in range(GROUPS)]
    write_eval(folder, steps, "held_out", held)
    return folder


def add_step(
    folder: Path,
    writer: MetricsWriter,
    step: int,
    *,
    reward: Reward = rising,
    metrics: dict[str, float] | None = None,
    dropped: bool = False,
) -> None:
    """What a run writes in one step."""
    groups = [
        Group(step * GROUPS + group, [sample_of(step, group, n, reward(step, group, n)) for n in range(SAMPLES)])
        for group in range(GROUPS)
    ]
    away = (
        [(Group(9000 + step, [sample_of(step, GROUPS, 0, 0.0, group_index=9000 + step)]), "all equal")]
        if dropped
        else []
    )
    write_rollout(folder, step, groups, away)
    rewards = [sample.reward_value or 0.0 for group in groups for sample in group.samples]
    mean = sum(rewards) / len(rewards)
    row = {"rollout/reward_mean": mean, "rollout/reward_std": 0.5, "train/kl": 0.01 * step, "time/step": 2.0}
    row |= {"time/wait_rollout": 1.5, "time/forward_backward": 0.4, "time/engine": 1.4, "train/entropy": 0.5}
    writer.write(step, {**row, **(metrics or {})})


NAN = math.nan
#: line -> columns of three tokens, the first of which a tool wrote
TOKEN_ROWS: dict[int, dict[str, Any]] = {
    0: {"gap": [NAN, 0.5, -0.1], "credit": [NAN, 1.0, 2.0], "flag": "gap"},
    1: {"gap": [NAN, -0.75, 0.0], "credit": None, "flag": "gap"},
    5: {"gap": [NAN, 0.01, 0.02], "credit": [NAN, -3.0, 0.5], "flag": "sampled"},
}


def write_tokens(path: Path, rows: dict[int, dict[str, Any]], *, about: object = None, tokens: int = 3) -> None:
    floats = pa.list_(pa.float32())
    columns: dict[str, Any] = {
        "line": pa.array(list(rows), pa.int32()),
        "flag": pa.array([row["flag"] for row in rows.values()]),
        "gap_max": pa.array([max(abs(one) for one in row["gap"][1:]) for row in rows.values()], pa.float32()),
        "step": pa.array([0] * len(rows), pa.int32()),
        "tokens": pa.array([list(range(tokens))] * len(rows), pa.list_(pa.int32())),
        "pieces": pa.array([["<tool>", "\u202e<b>", "\n"][:tokens]] * len(rows), pa.list_(pa.string())),
        "source": pa.array([[1, 0, 0][:tokens]] * len(rows), pa.list_(pa.int8())),
        "loss_mask": pa.array([[0, 1, 1][:tokens]] * len(rows), pa.list_(pa.int8())),
        "gap": pa.array([row["gap"][:tokens] for row in rows.values()], floats),
        "credit": pa.array([row["credit"] for row in rows.values()], floats),
        "advantage": pa.array([[NAN, 0.25, 0.75][:tokens]] * len(rows), floats),
        "clipped": pa.array([[NAN, 1.0, 0.0][:tokens]] * len(rows), floats),
    }
    about = {"format": 1, "columns": ["source", "gap", "credit"], "own": ["credit"]} if about is None else about
    table = pa.table(columns).replace_schema_metadata({"slime": json.dumps(about)})
    # Parts of two rows, so that a row is searched for in several.
    pq.write_table(table, path, row_group_size=2)


def make_run_with_tokens(folder: Path) -> Path:
    """A run of two steps, of whose second one tokens were logged."""
    make_run(folder, 2)
    groups = [
        Group(7, [sample_of(1, 0, n, float(n), response_length=3, group_index=7) for n in range(4)]),
        Group(8, [sample_of(1, 1, n, 0.0, response_length=3, group_index=8) for n in range(4)]),
    ]
    write_rollout(folder, 1, groups)
    write_tokens(folder / "rollouts" / "000001.tokens.parquet", TOKEN_ROWS)
    return folder
