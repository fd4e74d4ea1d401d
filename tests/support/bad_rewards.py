"""A distribution of rewards that misbehave on demand, installed where worker processes find it too."""

from __future__ import annotations

import pytest

from tests.support.distributions import Install

#: what a reward does is written in `Sample.label`
SOURCE = '''
import asyncio, itertools, math, os, random, signal, subprocess, sys, threading, time
import slime.plugin as sp

slime_api = 1


def act(sample):
    """The value, or mischief."""
    what = sample.label
    if what == "spin":
        while True:
            pass
    if what == "sleep":
        time.sleep(1e6)
    if what == "nap":
        time.sleep(float(sample.response))
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "segfault":
        import ctypes
        ctypes.string_at(0)
    if what == "raise":
        raise ValueError("no verdict")
    if what == "nan":
        return sp.Reward(math.nan)
    if what == "pid":
        return sp.Reward(float(os.getpid()))
    if what == "child":
        subprocess.Popen(["sleep", "1000"], start_new_session=False)
    if what == "chance":
        return sp.Reward(random.random())
    if what == "write":
        sample.metadata["seen"] = True
    if what == "print":
        print("a word from the reward", flush=True)
    return sp.Reward(float(sample.index or 0), {"half": 0.5})


class Plain:
    def __init__(self, options, context):
        assert context.tokenizer is None

    def score(self, samples):
        if samples[0].label == "too few":
            return []
        if samples[0].label == "wrong type":
            return "good"
        return [act(sample) for sample in samples]


class Overlapping(Plain):
    async def score(self, samples):
        first = samples[0]
        if first.label == "wait":
            await asyncio.sleep(1e6)
        if first.label == "stubborn":
            while True:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    pass
        if first.label == "thread exit":
            await asyncio.to_thread(lambda: (time.sleep(0.1), os._exit(4)))
        if first.label == "nap":
            await asyncio.sleep(float(first.response))
            return [sp.Reward(1.0)]
        if first.label == "compute":
            for _ in range(8):
                end = time.monotonic() + float(first.response)
                while time.monotonic() < end:
                    pass
                await asyncio.sleep(0)
            return [sp.Reward(1.0)]
        await asyncio.sleep(0)
        return [act(sample) for sample in samples]


class Unbuildable:
    def __init__(self, options, context):
        raise RuntimeError("no model at /nowhere")


class Group(Plain):
    def score(self, samples):
        best = max(sample.index for sample in samples)
        return [sp.Reward(float(sample.index == best)) for sample in samples]


@sp.hookimpl
def slime_register_rewards():
    here = __name__
    return [
        sp.RewardSpec(name="plain", factory=f"{here}:Plain", timeout_s=60),
        sp.RewardSpec(name="overlapping", factory=f"{here}:Overlapping", timeout_s=60),
        sp.RewardSpec(name="unbuildable", factory=f"{here}:Unbuildable"),
        sp.RewardSpec(name="best", factory=f"{here}:Group", scope="group"),
    ]
'''


@pytest.fixture
def bad_rewards(install: Install) -> None:
    """As if `pip install bad-rewards==1.0` had been run; workers get this process's `sys.path`."""
    install("bad-rewards", "1.0", {"bad": "bad_rewards"}, {"bad_rewards": SOURCE})
