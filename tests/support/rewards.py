"""Rewards built and called as in a worker."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.plugin import Reward, Sample
from slime.registry.component import Component, checked_options
from slime.registry.plugin_set import survey_plugins
from slime.testing import make_context, make_sample


def build(name: str, *, engine_url: str | None = None, engine_key: str | None = None, **options: Any) -> Any:
    """One of slime's own rewards, with options as in a run."""
    import dataclasses

    component = _components()[f"rewards/{name}"]
    chosen, _ = checked_options(component, options)
    context = dataclasses.replace(
        make_context(run_dir=Path(), config=object(), tokenizer=object()),
        engine_url=engine_url,
        engine_key=engine_key,
    )
    return component.build(chosen, context)


@functools.cache
def _components() -> dict[str, Component]:
    return {one.id: one for one in survey_plugins().components()}


def ask(reward: Any, samples: Sequence[Sample]) -> list[Reward]:
    """Its results, in an event loop if it needs one."""
    answer = reward.score(samples)
    if not inspect.isawaitable(answer):
        return list(answer)

    async def wait() -> list[Reward]:
        return list(await answer)

    return asyncio.run(wait())


def score(
    name: str, response: str, label: str | None = None, metadata: dict[str, Any] | None = None, **options: Any
) -> Reward:
    """One response's reward."""
    sample = make_sample("question", response, label=label, metadata=metadata or {}, index=7)
    return ask(build(name, **options), [sample])[0]
