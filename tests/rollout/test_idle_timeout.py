"""The deadline of a sample, which every request moves."""

from __future__ import annotations

import asyncio
import time

import pytest

from slime.rollout.policy_session import IdleTimeout


def test_it_expires_when_nothing_happens_for_its_time() -> None:
    async def main() -> float:
        timeout = IdleTimeout(0.1)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with timeout:
                await asyncio.sleep(60)
        assert timeout.expired()
        return time.monotonic() - began

    assert 0.1 <= asyncio.run(main()) < 30


def test_it_lasts_as_long_as_it_is_extended() -> None:
    async def main() -> None:
        timeout = IdleTimeout(0.1)
        async with timeout:
            began = time.monotonic()
            timeout.extend(30.0)
            while time.monotonic() - began < 0.3:
                await asyncio.sleep(0.001)
                timeout.extend(30.0)
        assert not timeout.expired()

    asyncio.run(main())


def test_an_extension_that_ends_earlier_counts() -> None:
    async def main() -> float:
        timeout = IdleTimeout(60.0)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with timeout:
                timeout.extend(0.1)
                await asyncio.sleep(60)
        return time.monotonic() - began

    assert asyncio.run(main()) < 30


def test_it_expires_later_than_first_planned_if_extended_once() -> None:
    async def main() -> float:
        timeout = IdleTimeout(0.1)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with timeout:
                await asyncio.sleep(0.05)
                timeout.extend(0.3)
                await asyncio.sleep(60)
        return time.monotonic() - began

    assert 0.3 <= asyncio.run(main()) < 30


def test_a_cancellation_from_outside_is_not_a_timeout() -> None:
    async def main() -> None:
        timeout = IdleTimeout(60.0)

        async def body() -> None:
            async with timeout:
                await asyncio.sleep(60)

        task = asyncio.ensure_future(body())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not timeout.expired()

    asyncio.run(main())


def test_nothing_happens_after_its_body() -> None:
    async def main() -> None:
        timeout = IdleTimeout(0.05)
        async with timeout:
            pass
        await asyncio.sleep(0.1)
        assert not timeout.expired()

    asyncio.run(main())
