"""A reward that depends on its sample alone. Evaluations, whose prompts begin with h, are noted, and take a while."""

import asyncio
from pathlib import Path


async def reward_func(args, sample):  # noqa: ARG001 - the signature of a reward
    if sample.prompt.startswith("h"):
        Path("evaluating").touch()
        await asyncio.sleep(0.8)
        Path("evaluating").unlink(missing_ok=True)
    return float(sum(map(ord, sample.response)) % 2)
