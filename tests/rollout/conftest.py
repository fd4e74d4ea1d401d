"""Fixtures of the rollout tests: a real tokenizer, a prompt file, and a policy without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.stub_engines import NeverAborted
from tests.support.tiny_models import write_tiny_tokenizer

from slime.plugin import Generation, SamplingParams


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with one token per character and a chat template."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Twelve additions with their answers."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1)} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class ScriptedPolicy(NeverAborted):
    """A policy with known answers: adds correctly for even seeds, answers "?" for odd ones.

    `delay_s` maps a prompt to seconds of thinking, so that tests choose who finishes first.
    """

    def __init__(self, tokenizer: Any, delay_s: dict[str, float] | None = None) -> None:
        self.tokenizer = tokenizer
        self.delay_s = delay_s or {}
        self.requests: list[tuple[str, SamplingParams]] = []

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,  # noqa: ARG002 - the contract's
        rid: str = "",  # noqa: ARG002 - the contract's
    ) -> Generation:
        prompt = self.tokenizer.decode(tokens)
        self.requests.append((prompt, sampling))
        await asyncio.sleep(self.delay_s.get(prompt, 0.0))
        assert sampling.sampling_seed is not None
        right = sampling.temperature == 0 or sampling.sampling_seed % 2 == 0
        answer = self.tokenizer.encode(str(int(prompt[:-3]) + 1) if right else "?", add_special_tokens=False)
        answer = answer[: sampling.max_new_tokens]
        return Generation(answer, [-0.5] * len(answer), "stop", ["3"])
