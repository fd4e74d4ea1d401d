"""Routed experts in the answers of an engine: their type and shape, and which requests ask for them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from tests.engine.conftest import FaultyEngine
from tests.engine.test_client import ONE, PROMPT, answer, generate

from slime.engine.client import HttpPolicyClient
from slime.errors import EngineError
from slime.plugin import SamplingParams


def encoded(rows: int, *, most: int = 7) -> str:
    """Routed experts of `rows` tokens, 2 layers and 3 experts per token, as an engine sends them."""
    experts = np.arange(rows * 2 * 3, dtype=np.int32) % most
    experts[-1] = most
    return base64.b64encode(experts.tobytes()).decode()


@pytest.mark.parametrize(("most", "kind"), [(255, np.uint8), (256, np.int16)])
def test_routed_experts_come_in_the_smallest_type(
    faulty_engine: Callable[..., FaultyEngine], most: int, kind: type
) -> None:
    rows = len(PROMPT) + 2 - 1
    stub = faulty_engine(lambda _: (200, answer(routed_experts=encoded(rows, most=most))))
    [generation] = generate(stub.url, ONE, routed_layers=2)
    assert orjson.loads(stub.bodies[0])["return_routed_experts"] is True
    assert generation.routed_experts is not None and generation.routed_experts.dtype == kind
    assert generation.routed_experts.shape == (rows, 2, 3) and generation.routed_experts[-1, -1, -1] == most
    assert "routed_experts" not in generation.meta


def test_only_routed_experts_that_are_not_known_are_asked_for(faulty_engine: Callable[..., FaultyEngine]) -> None:
    rows = len(PROMPT) + 2 - 1 - 3
    stub = faulty_engine(lambda _: (200, answer(routed_experts=encoded(rows))))
    [generation] = generate(stub.url, replace(ONE, routed_from=3), routed_layers=2)
    assert orjson.loads(stub.bodies[0])["routed_experts_start_len"] == 3
    assert generation.routed_experts is not None
    assert (generation.routed_experts.shape, generation.routed_from) == ((rows, 2, 3), 3)


def test_an_answer_without_new_tokens_has_no_routed_experts(faulty_engine: Callable[..., FaultyEngine]) -> None:
    ended = {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}
    stub = faulty_engine(lambda _: (200, answer(**ended, routed_experts="")))
    [generation] = generate(stub.url, replace(ONE, routed_from=len(PROMPT) - 1), routed_layers=2)
    assert (generation.routed_experts, generation.tokens) == (None, [])


@pytest.mark.parametrize("meta", [{}, {"routed_experts": encoded(4)}], ids=["none", "too-few"])
def test_missing_routed_experts_are_an_engine_error(
    faulty_engine: Callable[..., FaultyEngine], meta: dict[str, Any]
) -> None:
    stub = faulty_engine(lambda _: (200, answer(**meta)))
    with pytest.raises(
        EngineError, match=r"expected a multiple of 5 tokens x 2 layers; .*--enable-return-routed-experts"
    ):
        generate(stub.url, ONE, routed_layers=2)


def test_an_aborted_answer_may_lack_routed_experts(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, answer(finish_reason={"type": "abort"})))
    assert generate(stub.url, ONE, routed_layers=2)[0].routed_experts is None


def test_requests_for_routed_experts_go_around_the_router_and_evaluations_do_not(
    faulty_engine: Callable[..., FaultyEngine],
) -> None:
    served = answer(routed_experts=encoded(len(PROMPT) + 1))
    router, one, two = (faulty_engine(lambda _: (200, served)) for _ in range(3))

    async def run() -> None:
        async with HttpPolicyClient(router.url, timeout_s=30, routed_layers=2) as client:
            client.connect(router.url, [one.url, two.url])
            await client.generate(PROMPT, SamplingParams(max_new_tokens=2, evaluation=True))
            for session in ("a", "b", "a", "a", "b"):
                await client.generate(PROMPT, ONE, session=session)

    asyncio.run(run())
    assert b"routed" not in router.bodies[0]
    assert router.requests == 1
    assert sorted([one.requests, two.requests]) == [2, 3], "each session has an engine for itself"
