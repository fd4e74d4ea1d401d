"""Rewards from a service over HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slime.errors import PluginContractError
from slime.plugin import Context, Reward, Sample
from slime_rewards.batching import Batcher
from slime_rewards.http_service import HttpService
from slime_rewards.options import RemoteOptions


class Remote:
    """The rewards that a service over HTTP gives.

    - Protocol `batch`: POST `{"samples": [{"prompt", "response", "label", "metadata"}, ...]}`; the response is
      `{"rewards": [...]}` or the list alone, with one entry per sample, in order. Samples that are scored at the same
      time share requests.
    - Protocol `single`: POST `{"prompt", "response", "label"}`; the response is the reward.

    A reward is a number, or an object with a number at `reward_key`; its other numbers become parts.

    If a request fails after all retries, or the number of rewards is wrong, all samples of the request fail. A reward
    that is not a finite number fails only its own sample. A response after the reward's deadline is too late.
    """

    def __init__(self, options: RemoteOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        """Initialize.

        Raises:
            ConfigError: The environment lacks the variable that `token_env` names.
        """
        self._options = options
        self._service = HttpService(options.url, options)
        batch = options.protocol == "batch"
        self._batcher = Batcher(
            self._batch if batch else self._single,
            options.batch_size if batch else 1,
            options.batch_wait_s,
            options.concurrency,
        )

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return await self._batcher.ask(samples) if samples else []

    async def _batch(self, samples: Sequence[Sample]) -> list[Reward]:
        answer = await self._ask({"samples": [_as_sent(s) | {"metadata": s.metadata} for s in samples]})
        rewards = answer.get("rewards") if isinstance(answer, Mapping) else answer
        if not isinstance(rewards, list):
            raise PluginContractError(f"got {answer!r:.100} from {self._service.url}, expected a list of rewards")
        if len(rewards) != len(samples):
            raise PluginContractError(
                f"got {len(rewards)} rewards from {self._service.url} for {len(samples)} samples, expected one each"
            )
        return [self._reward(reward) for reward in rewards]

    async def _single(self, samples: Sequence[Sample]) -> list[Reward]:
        return [self._reward(await self._ask(_as_sent(sample))) for sample in samples]

    async def _ask(self, content: Any) -> Any:
        """What the service answers. Raises `RuntimeError` if that is an error, whatever rewards are beside it."""
        answer = await self._service.post(content)
        if isinstance(answer, Mapping) and answer.get("error"):
            raise RuntimeError(f"{self._service.url} answered with an error: {answer['error']!r:.200}")
        return answer

    def _reward(self, answer: Any) -> Reward:
        """The reward in an answer; NaN, which fails the sample, if it has none or has an error."""
        parts: dict[str, float] = {}
        if isinstance(answer, Mapping) and not answer.get("error"):
            numbers = {str(k): _number(v) for k, v in answer.items() if k != self._options.reward_key}
            parts = {name: number for name, number in numbers.items() if math.isfinite(number)}
            answer = answer.get(self._options.reward_key)
        return Reward(_number(answer), parts)


def _as_sent(sample: Sample) -> dict[str, Any]:
    return {"prompt": sample.prompt, "response": sample.response, "label": sample.label}


def _number(value: object) -> float:
    """`value` as a float; NaN if it is not a number."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer too large for a float
        return math.nan
