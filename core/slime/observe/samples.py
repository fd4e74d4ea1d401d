"""Samples in readable form: files with one line per sample, and examples for the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from slime.errors import writing
from slime.types import Group, Sample

FOLDER = "rollouts"


def sample_row(sample: Sample) -> dict[str, Any]:
    """One sample as a line of a file, without token ids and log-probs.

    `trained_tokens` counts the ones in the loss mask, `routed_tokens` those with routed experts, if the run records
    them. Conversations have `messages`; if the generator reports metrics, samples have `metrics`.
    """
    row = {
        "group": sample.group_index,
        "index": sample.index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": sample.prompt_length,
        "response_tokens": sample.response_length,
        "trained_tokens": sample.response_length if sample.loss_mask is None else sum(sample.loss_mask),
        "weight_versions": sample.weight_versions,
        "failure": sample.failure,
    }
    if sample.rollout_routed_experts is not None:
        row["routed_tokens"] = len(sample.rollout_routed_experts)
    if "messages" in sample.metadata:
        row["messages"] = sample.metadata["messages"]
    if sample.metrics:
        row["metrics"] = sample.metrics
    return row


def write_rollout(
    run_dir: Path, rollout: int, groups: Sequence[Group], dropped: Sequence[tuple[Group, str]] = ()
) -> None:
    """Write `RUN_DIR/rollouts/000012.jsonl`. Raises `OSError`.

    Samples that filters `dropped` are in `dropped_000012.jsonl`, each with the reason. Per-token columns of an earlier
    attempt at this rollout are deleted: they belong to other samples.
    """
    (run_dir / FOLDER / f"{rollout:06d}.tokens.parquet").unlink(missing_ok=True)
    _write(run_dir, f"{rollout:06d}", (sample_row(sample) for group in groups for sample in group.samples))
    if dropped:
        rows = ({**sample_row(sample), "dropped": reason} for group, reason in dropped for sample in group.samples)
        _write(run_dir, f"dropped_{rollout:06d}", rows)
    else:
        # An earlier attempt at this rollout, which a restart repeats, may have dropped some.
        (run_dir / FOLDER / f"dropped_{rollout:06d}.jsonl").unlink(missing_ok=True)


def write_eval(run_dir: Path, rollout: int, name: str, samples: Iterable[tuple[Sample, Mapping[str, Any]]]) -> Path:
    """Write `RUN_DIR/rollouts/eval_NAME_000012.jsonl` and return its path. Raises `OSError`.

    Each sample comes with further entries for its line.
    """
    return _write(run_dir, f"eval_{name}_{rollout:06d}", ({**sample_row(sample), **more} for sample, more in samples))


def write_failed(run_dir: Path, name: str, samples: Iterable[tuple[Sample, str | None]]) -> Path:
    """Write `RUN_DIR/rollouts/failed_NAME.jsonl` and return its path. Raises `OSError`.

    Each sample comes with the traceback of what the component raised, if it raised.
    """
    return _write(run_dir, f"failed_{name}", ({**sample_row(sample), "traceback": trace} for sample, trace in samples))


def _write(run_dir: Path, name: str, rows: Iterable[dict[str, Any]]) -> Path:
    path = run_dir / FOLDER / f"{name}.jsonl"
    write_whole(path, b"".join(map(_dump, rows)))
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is either complete or absent, even if the run is killed. Raises `OSError`."""
    with whole(path) as partial:
        partial.write_bytes(content)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """The file to write in place of `path`, which it becomes at the end of the body. Raises `OSError`."""
    partial = path.with_suffix(".partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # it may not be there, and the body's error says why
            partial.unlink()
        raise


def _dump(row: dict[str, Any]) -> bytes:
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(row, option=options, default=str)
    except orjson.JSONEncodeError:
        # A lone surrogate in a response is not valid UTF-8, and an integer may exceed 64 bits.
        return orjson.dumps(readable(row), option=options, default=str)


def readable(value: Any) -> Any:
    """A value of JSON as files of samples have it: integers beyond 64 bits and lone surrogates are text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if value is None or isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    if isinstance(value, Mapping):
        return {readable(str(name)): readable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [readable(one) for one in value]
    return readable(repr(value))


def question_text(prompt: str | list[dict[str, object]]) -> str:
    """The text of a prompt; of a conversation, its last message that is not the assistant's."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message.get("role") != "assistant":
            return str(message.get("content", ""))
    return ""


def examples_of(groups: Sequence[Group], rollout: int) -> list[Sample]:
    """The best and the worst answer to one question, or a single answer if no group has answers of different reward.

    The choice depends on the rollout number alone, so that it varies over a run and repeats when the run is repeated.
    The samples are copies with nothing but their texts, reward and status, cheap to send between processes.
    """
    scored = [
        sorted(with_reward, key=lambda sample: sample.reward_value or 0.0)
        for group in groups
        if (with_reward := [sample for sample in group.samples if sample.reward is not None])
    ]
    if not scored:
        return []
    mixed = [ranked for ranked in scored if ranked[0].reward_value != ranked[-1].reward_value]
    ranked = (mixed or scored)[rollout % len(mixed or scored)]
    return [
        Sample(prompt=one.prompt, label=one.label, response=one.response, reward=one.reward, status=one.status)
        for one in ([ranked[-1], ranked[0]] if mixed else ranked[:1])
    ]
