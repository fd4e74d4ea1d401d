"""Runs that name functions by path, for the tests of function paths."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from pathlib import Path
from textwrap import dedent
from typing import Any

from slime.compat.functions import place_functions
from slime.config import RunConfig, resolve
from slime.config.options import AlgorithmOptions, DataOptions, RewardOptions, RolloutOptions
from slime.plugin import Context, Sample, Status
from slime.registry.plugin_set import PluginSet, survey_plugins


class Letters:
    """A tokenizer with one token for each character."""

    eos_token_id = 0
    chat_template = "letters"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"{message['role']}:{message['content']};" for message in messages)


def write(folder: Path, name: str, source: str) -> Path:
    """A file with the dedented source."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source))
    return path


def write_prompts(folder: Path, count: int = 3) -> Path:
    """Rows `0+1=` with label `1`, and so on."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(count)))
    return path


def run_config(
    *,
    algorithm: dict[str, Any] | None = None,
    reward: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **more: Any,
) -> RunConfig:
    """A resolved run of four prompts with two samples each."""
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 1}
    return resolve(
        place_functions(
            RunConfig(
                algorithm=AlgorithmOptions(**{"advantage_estimator": "grpo"} | (algorithm or {})),
                reward=RewardOptions(**reward or {}),
                rollout=RolloutOptions(**sizes | (rollout or {})),
                data=DataOptions(**data or {}),
                **more,
            )
        ).config
    )


def plugins_for(config: RunConfig) -> PluginSet:
    """The installed plugins, with the functions that the run names by path."""
    return survey_plugins(given=place_functions(config).components)


def build(config: RunConfig, slot: str, run_dir: Path, tokenizer: Any = None) -> Any:
    """The object in a slot of the run, as the rollout process builds it."""
    plugins = plugins_for(config)
    resolved = plugins.resolve(config)[slot]
    context = Context(
        seed=0, run_dir=run_dir, logger=logging.getLogger("local test"), config=config, tokenizer=tokenizer or Letters()
    )
    return resolved.build(context)


def scores(reward: Any, samples: list[Sample]) -> list[float]:
    """The values of a reward's results, awaited if necessary."""
    answer = reward.score(samples)
    if inspect.isawaitable(answer):

        async def wait() -> Any:
            return await answer

        answer = asyncio.run(wait())
    return [one.value for one in answer]


def answered(*responses: str, label: str | None = "4") -> list[Sample]:
    """Finished samples of one prompt."""
    return [
        Sample(group_index=0, index=i, prompt="2+2=", label=label, response=response, status=Status.COMPLETED)
        for i, response in enumerate(responses)
    ]
