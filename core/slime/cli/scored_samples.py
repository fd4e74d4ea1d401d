"""Scores stored responses with the rewards of a configuration, as a run would."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import orjson

from slime.config import RunConfig
from slime.config.eval_sets import eval_sets
from slime.engine.requests import FairSlots
from slime.errors import DataError
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_source import PromptSource, parse_source, parse_sources
from slime.kit.readers.reader import BadRow
from slime.kit.readers.rows import Columns, PromptRow
from slime.kit.readers.stored_responses import StoredRow
from slime.observe.samples import readable
from slime.observe.timing import BusyClock
from slime.registry.plugin_set import PluginSet
from slime.registry.resolve import Resolved
from slime.rollout.components import ComponentBuilder
from slime.rollout.failures import PassiveChecks
from slime.rollout.scoring import Scorer
from slime.types import Sample

#: samples that are scored at once
WINDOW = 1024


@dataclass
class Accounts:
    """What the rewards report of all samples."""

    #: `plugin/reward/...`
    metrics: dict[str, float] = field(default_factory=dict)
    #: what they raised, and rules of their contract that they broke
    texts: list[str] = field(default_factory=list)


async def scored(
    rows: Iterable[StoredRow],
    config: RunConfig,
    plugins: PluginSet,
    rewards: Sequence[Resolved],
    folder: Path,
    accounts: Accounts,
) -> AsyncIterator[tuple[StoredRow, Sample]]:
    """Every row with its sample, which has its reward or the reason why it failed; in their order.

    Rows beside each other with the same `group` are scored together by rewards that compare the samples of a group.

    Args:
        rows: The responses.
        config: The configuration that rewards see.
        plugins: The installed plugins.
        rewards: Of `config` or of one of its evaluation sets. However many samples they fail, all are scored.
        folder: Stands for the run folder.
        accounts: Filled at the end.

    Raises:
        PluginError: A reward cannot be built.
    """
    passive = PassiveChecks(1)
    unlimited = [replace(one, limits=one.limits.model_copy(update={"error_budget": 1.0})) for one in rewards]
    builder = ComponentBuilder(
        config=config,
        plugins=plugins,
        used={one.use.slot: one for one in unlimited},
        run_dir=folder,
        tokenizer=None,
        client=None,
        engine_url=None,
        engine_key=None,
        slots=FairSlots(1),
        passive=passive,
    )
    scorer = builder.scorer(unlimited) if rewards[0].use.eval_set is None else builder.eval_scorer(unlimited[0])
    assert scorer is not None
    await scorer.start()
    try:
        for window in _windows(rows):
            groups = [[row.sample() for row in group] for group in window]
            await _score(scorer, groups)
            for pair in zip(chain.from_iterable(window), chain.from_iterable(groups), strict=True):
                yield pair
        accounts.metrics = scorer.metrics()
        accounts.texts = [*scorer.tracebacks(), *passive.rollout_done()]
    finally:
        await scorer.close()


def _windows(rows: Iterable[StoredRow]) -> Iterator[list[list[StoredRow]]]:
    """The rows in groups, as many at a time as are scored at once."""
    window: list[list[StoredRow]] = []
    for _, group in groupby(rows, key=_group_of):
        window.append(list(group))
        if sum(map(len, window)) >= WINDOW:
            yield window
            window = []
    if window:
        yield window


def _group_of(row: StoredRow) -> tuple[str, object]:
    """Equal for rows of one group. A row without one is a group by itself, and each file has its own."""
    group = row.entries.get("group")
    return (row.where, None) if group is None else (row.file, group)


async def _score(scorer: Scorer, groups: Sequence[Sequence[Sample]]) -> None:
    parts = groups if scorer.scope == "group" else [[sample] for group in groups for sample in group]
    clock = BusyClock()
    await asyncio.gather(*(scorer.score(part, clock) for part in parts))


# --- what the samples of a run do not have ----------------------------------------------------------


def with_metadata(rows: Iterable[StoredRow], found: dict[bytes, dict[str, Any]]) -> Iterator[StoredRow]:
    """Rows with the metadata of their prompts, as `prompt_metadata` found them."""
    for row in rows:
        row.metadata = found.get(_key(row), {})
        yield row


def prompt_metadata(
    rows: Iterable[StoredRow], config: RunConfig, eval_set: str | None
) -> tuple[dict[bytes, dict[str, Any]], list[str]]:
    """The metadata of the prompts of a run's samples, which are in its prompt files alone; and notes.

    A prompt is recognized by its text and its label.
    """
    wanted = {_key(row) for row in rows}
    found: dict[bytes, dict[str, Any]] = {}
    try:
        for source, columns in _prompt_files(config, eval_set):
            with contextlib.closing(open_reader(source, columns, by_block=True)) as reader:
                for _, row in reader.scan():
                    if not isinstance(row, BadRow) and (key := _key(row)) in wanted:
                        found.setdefault(key, row.metadata)
    except DataError as error:
        return found, [f"samples have no metadata: {error}"]
    missing = len(wanted) - len(found)
    note = f"{missing} of {len(wanted)} prompts are not in the run's prompt files, so that they have no metadata"
    return found, [note] if missing else []


def _prompt_files(config: RunConfig, eval_set: str | None) -> Iterator[tuple[PromptSource, Columns]]:
    data = config.data
    if eval_set is None:
        columns = Columns(data.input_key, data.label_key, data.metadata_key, data.tool_key)
        yield from ((source, columns) for source in parse_sources(data.prompt_data))
    for one in eval_sets(config):
        if one.name == eval_set:
            yield parse_source(one.path), Columns(one.input_key, one.label_key, one.metadata_key, data.tool_key)


def _key(row: PromptRow) -> bytes:
    content = orjson.dumps(readable([row.prompt, row.label]), option=orjson.OPT_SORT_KEYS, default=str)
    return hashlib.blake2b(content, digest_size=16).digest()
