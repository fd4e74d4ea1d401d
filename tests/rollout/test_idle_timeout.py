"""The deadline of a sample, which every request moves."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.simulated_time import run_simulated

from slime.rollout.policy_session import IdleTimeout


async def seconds_until_expired(timeout: IdleTimeout, *, extended_by: float | None = None) -> float:
    """Seconds until a body that does nothing is cancelled, if the deadline is extended once after 0.05 s."""
    clock = asyncio.get_running_loop().time
    began = clock()
    with pytest.raises(TimeoutError):
        async with timeout:
            await asyncio.sleep(0.05)
            if extended_by is not None:
                timeout.extend(extended_by)
            await asyncio.sleep(600)
    assert timeout.expired()
    return clock() - began


@pytest.mark.parametrize(
    ("seconds", "extended_by", "expected"),
    [(0.1, None, 0.1), (0.1, 0.3, 0.35), (60.0, 0.1, 0.15)],
    ids=["never extended", "to later", "to earlier"],
)
def test_it_expires_when_nothing_happens_for_its_time(
    seconds: float, extended_by: float | None, expected: float
) -> None:
    async def main() -> float:
        return await seconds_until_expired(IdleTimeout(seconds), extended_by=extended_by)

    assert run_simulated(main()) == pytest.approx(expected)


def test_it_lasts_while_it_is_extended_and_is_over_after_its_body() -> None:
    async def main() -> None:
        timeout = IdleTimeout(0.1)
        async with timeout:
            timeout.extend(30.0)
            await asyncio.sleep(0.3)  # the first deadline passes
            timeout.extend(0.05)
        await asyncio.sleep(0.1)
        assert not timeout.expired()

    run_simulated(main())


def test_an_extension_comes_too_late_once_it_has_expired() -> None:
    async def main() -> None:
        timeout = IdleTimeout(0.01)
        with pytest.raises(TimeoutError):
            async with timeout:
                try:
                    await asyncio.sleep(60)
                finally:
                    timeout.extend(60.0)
        assert timeout.expired()

    run_simulated(main())


def test_a_cancellation_from_outside_is_not_a_timeout() -> None:
    async def main() -> None:
        timeout = IdleTimeout(60.0)
        task = asyncio.ensure_future(seconds_until_expired(timeout))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not timeout.expired()

    run_simulated(main())
