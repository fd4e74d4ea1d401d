"""Asks a language model how good the response is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.errors import ConfigError
from slime.plugin import Context, Reward, Sample
from slime_rewards.answers import named
from slime_rewards.http_service import HttpService
from slime_rewards.options import LLMJudgeOptions


class LLMJudge:
    """The score that a judge writes, in [0, 1].

    The judge is any OpenAI-compatible endpoint; without `url` it is the model in training itself, on the run's own
    engines.  It is asked `template` with the question (a chat as its messages' texts), the label (empty where there is
    none) and the response, and the last match of `pattern` in what it writes is the score s: reward (s - lowest) /
    (highest - lowest).  A judge that writes no score, or one outside [lowest, highest], is asked again, `attempts`
    times in all; then the reward is `no_score`, or the sample fails.  So it does when the request fails after all
    retries.  Part `attempts`: how often it was asked.

    A response can tell the judge what to write; a template that fences it off and a judge that is not trained on its
    own scores make that harder, not impossible.
    """

    def __init__(self, options: LLMJudgeOptions, context: Context) -> None:
        """Raises `ConfigError` for a pattern without a group, a missing template or where there is nobody to ask."""
        self._options = options
        url = options.url or context.engine_url
        if url is None:
            raise ConfigError("url is not stated, and the run starts no engines that could judge; state url")
        self._service = HttpService(url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions", options)
        self._template = _template(options)
        try:
            self._pattern = re.compile(options.pattern)
        except re.error as error:
            raise ConfigError(f"pattern {options.pattern!r} is no regular expression: {error}") from None
        if not self._pattern.groups:
            raise ConfigError(f"pattern {options.pattern!r} has no group; expected the score in its first")
        self._free = asyncio.Semaphore(options.concurrency)

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return list(await asyncio.gather(*(self._score(sample) for sample in samples)))

    async def _score(self, sample: Sample) -> Reward:
        options, written = self._options, ""
        for attempt in range(1, options.attempts + 1):
            async with self._free:
                written = await self._ask(sample)
            score = self._read(written)
            if score is not None:
                value = (score - options.lowest) / (options.highest - options.lowest)
                return Reward(value, {"attempts": float(attempt)})
        if options.no_score is None:
            raise ValueError(
                f"{named(sample)}: the judge wrote no score from {options.lowest:g} to {options.highest:g} in"
                f" {options.attempts} attempts, but {written[-120:]!r}"
            )
        return Reward(options.no_score, {"attempts": float(options.attempts)})

    async def _ask(self, sample: Sample) -> str:
        values = {"question": _text(sample.prompt), "response": sample.response, "label": sample.label or ""}
        # In one pass, so that a response cannot have a placeholder filled in.
        asked = re.sub(r"\{(question|response|label)\}", lambda found: values[found.group(1)], self._template)
        system = [] if self._options.system is None else [{"role": "system", "content": self._options.system}]
        answer = await self._service.post(
            {
                "model": self._options.model,
                "messages": [*system, {"role": "user", "content": asked}],
                "temperature": self._options.temperature,
                "max_tokens": self._options.max_tokens,
            }
        )
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise RuntimeError(f"{self._service.url} answered {answer!r:.200}, expected a chat completion") from None

    def _read(self, written: str) -> float | None:
        """The score; None where there is none in range."""
        found = list(self._pattern.finditer(written))
        try:
            score = float(found[-1].group(1))
        except (IndexError, TypeError, ValueError):
            return None
        return score if self._options.lowest <= score <= self._options.highest else None


def _template(options: LLMJudgeOptions) -> str:
    template = options.template
    if options.template_path is not None:
        try:
            template = Path(options.template_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"template_path {options.template_path}: {error}") from None
    if "{response}" not in template:
        raise ConfigError("the template has no {response}: the judge would not see what it judges")
    return template


def _text(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message.get("content", "")) for message in prompt)
