"""Reward from a language model that judges the response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.errors import ConfigError
from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import describe
from slime_rewards.http_service import HttpService
from slime_rewards.options import LLMJudgeOptions


class LLMJudge:
    """The score that a language model gives the response, scaled to [0, 1].

    The judge is any OpenAI-compatible endpoint; without `url`, the run's own engines, which serve the model in
    training. Its prompt is `template`, filled with the question (the texts of all messages, if it is a chat), the label
    (empty if the sample has none) and the response. The last match of `pattern` in its answer is the score s, and the
    reward is (s - lowest) / (highest - lowest).

    If the answer has no score in [lowest, highest], the judge is asked again, `attempts` times in all; after that the
    reward is `no_score`, or the sample fails if that is not set. The sample also fails if a request fails after all
    retries. Part `attempts`: how often the judge was asked.

    A response can contain instructions to the judge. A template that delimits the response, and a judge other than the
    model in training, make such attacks harder but not impossible.
    """

    def __init__(self, options: LLMJudgeOptions, context: Context) -> None:
        """Initialize.

        Raises:
            ConfigError: The pattern or the template cannot be used, or there is no endpoint.
        """
        self._options = options
        url = options.url or context.engine_url
        if url is None:
            raise ConfigError("url is not set, and the run has no engines to use as judge: set url")
        key = context.engine_key if options.url is None else None
        self._service = HttpService(url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions", options, key)
        self._template = _template(options)
        try:
            self._pattern = re.compile(options.pattern)
        except re.error as error:
            raise ConfigError(f"pattern {options.pattern!r} is not a regular expression: {error}") from None
        if not self._pattern.groups:
            raise ConfigError(f"pattern {options.pattern!r} has no group, expected the score in the first group")
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
                f"{describe(sample)}: the judge wrote no score from {options.lowest:g} to {options.highest:g} in"
                f" {options.attempts} attempts, but {written[-120:]!r}"
            )
        return Reward(options.no_score, {"attempts": float(options.attempts)})

    async def _ask(self, sample: Sample) -> str:
        values = {"question": _text(sample.prompt), "response": sample.response, "label": sample.label or ""}
        # In one pass, so that placeholders inside a response are not filled in.
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
        """The score; None if there is none in range."""
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
        raise ConfigError("the template has no {response}: the judge would not see the response")
    return template


def _text(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message.get("content", "")) for message in prompt)
