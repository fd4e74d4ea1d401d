"""A worker whose reward is a plain function: one call at a time."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import socket
import time

from slime.errors import PluginContractError
from slime.plugin import RewardModel
from slime.rollout.failures import Cause, Fault, reason_of, shorten
from slime.rollout.scoring.answers import Outcome, verdicts_of
from slime.rollout.scoring.board import Board
from slime.rollout.scoring.frames import FrameReader, frame

_READ = 256 * 1024
#: seconds that answers may wait to be sent together
TOGETHER_S = 0.001


def serve_sync(reward: RewardModel, who: str, connection: socket.socket, board: Board) -> None:
    """Answer calls until the other end closes.  Deadlines are kept there, by killing this process."""
    reader = FrameReader()
    with asyncio.Runner() as runner:
        while data := connection.recv(_READ):
            unsent, sent_at = [], time.monotonic()
            for call, content in reader.feed(data):
                if not call:
                    continue
                board.note(call)
                unsent.append(frame(call, _answer(reward, who, content, runner).pack()))
                if board.note(0) - sent_at > TOGETHER_S:
                    connection.sendall(b"".join(unsent))
                    unsent, sent_at = [], time.monotonic()
            connection.sendall(b"".join(unsent))


def _answer(reward: RewardModel, who: str, content: bytes, runner: asyncio.Runner) -> Outcome:
    started = time.monotonic()
    try:
        samples = pickle.loads(content)
        answer: object = reward.score(samples)
        if inspect.isawaitable(answer):  # a plain function that returns a coroutine
            answer = runner.run(_wait(answer))
        return Outcome(verdicts_of(answer, len(samples)), time.monotonic() - started)
    except PluginContractError as error:
        fault = Fault(Cause.CONTRACT, shorten(f"{who} {error}"))
    except BaseException as error:  # noqa: BLE001 - the boundary around the reward plugin, sys.exit() included
        fault = Fault(Cause.RAISED, reason_of(who, error))
    return Outcome(fault, time.monotonic() - started)


async def _wait(answer: object) -> object:
    assert inspect.isawaitable(answer)
    return await answer
