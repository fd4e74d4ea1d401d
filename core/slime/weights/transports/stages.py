"""How the senders of a sync take turns: the first rank of each pipeline stage, in the order of the stages.

An engine receives one bucket at a time, so only one sender can be served. When a sender has sent all its tensors, it
leaves a note for the next one, and for the first, which paused the engines and resumes them. A sender that fails says
so in its note, and those after it do not begin. Notes are left in the store through which the trainer's ranks met.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from slime.errors import WeightSyncError

logger = logging.getLogger(__name__)

_POLL_S = 0.002
#: how long after the deadline a sender may take to say what went wrong
_LAST_WORDS_S = 8.0


class Turns:
    """The turns of one sender. There is one such object for each sender of a group of ranks.

    Attributes:
        stage: The sender's pipeline stage.
    """

    def __init__(self, store: Store, stage: int, stages: int) -> None:
        """
        Args:
            store: A store that all senders share.
            stage: The pipeline stage of this sender.
            stages: Number of stages.
        """
        self._store, self.stage, self._stages = store, stage, stages
        self._sync = 0
        self._told = False

    @classmethod
    def of_pipeline(cls) -> Self:
        """Those of the senders of Megatron's pipeline group of this rank."""
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        store = distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(group), dist.get_world_size(group))

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Run the body as this sender's part of the next sync; an error in it is passed on to the other senders."""
        self._sync += 1
        self._told = False
        try:
            yield
        except BaseException as error:
            if not self._told:
                synced = isinstance(error, WeightSyncError)
                text = str(error).removeprefix("Weight sync: ") if synced else f"{type(error).__name__}: {error}"
                self._tell({"error": text, "urls": error.urls if isinstance(error, WeightSyncError) else []})
            raise

    def wait(self, deadline: float) -> float:
        """Wait until the stage before this one has sent; returns the deadline for this one.

        It is at most that of the stage before, so that no sender goes on when the first has given up.

        Args:
            deadline: That of this sender's sync, in monotonic seconds.

        Raises:
            WeightSyncError: The stage before has failed, or has not sent in time.
        """
        if self.stage == 0:
            return deadline
        note = self._note(self.stage - 1, deadline)
        return min(deadline, time.monotonic() + float(note["remaining_s"]))

    def done(self, *, sent: int, seconds: float, deadline: float, report: Any = None) -> None:
        """Let the next sender begin.

        Args:
            sent: How many bytes this one has sent.
            seconds: In how long.
            deadline: As returned by `wait`.
            report: What its check has observed.
        """
        remaining = deadline - time.monotonic()
        self._tell({"sent": sent, "seconds": seconds, "remaining_s": remaining, "report": report})

    def others(self, deadline: float) -> dict[int, dict[str, Any]]:
        """For the first sender: wait until all others have sent, too; stage -> what it passed to `done`.

        Raises:
            WeightSyncError: One has failed, or has not sent in time.
        """
        notes = {stage: self._note(stage, deadline) for stage in range(1, self._stages)}
        for stage in range(self._stages):  # all have been read
            self._store.delete_key(self._key(stage))
        return notes

    def _key(self, stage: int) -> str:
        return f"slime/weights/{self._sync}/{stage}"

    def _tell(self, note: Mapping[str, Any]) -> None:
        self._told = True
        self._store.set(self._key(self.stage), json.dumps(note))

    def _note(self, stage: int, deadline: float) -> dict[str, Any]:
        # Torch's own wait would keep the store from others, and could not be interrupted.
        while not self._store.check([self._key(stage)]):
            if time.monotonic() > deadline + _LAST_WORDS_S:
                raise WeightSyncError(
                    f"Weight sync: the sender of pipeline stage {stage} did not send its part in time. Look at the logs"
                    " of the trainer's ranks; --weight-sync-timeout-s sets the limit."
                )
            time.sleep(_POLL_S)
        note: dict[str, Any] = json.loads(self._store.get(self._key(stage)))
        if "error" in note:
            raise WeightSyncError(
                f"Weight sync: the sender of pipeline stage {stage} failed: {note['error']}", note["urls"]
            )
        return note


def stage_metrics(shares: Mapping[int, tuple[int, float]]) -> dict[str, float]:
    """Metrics of the senders of a sync: bytes, seconds and GB/s of each, and the slowest stage, which is logged too.

    Args:
        shares: Stage -> bytes, and seconds.
    """
    rates = {stage: size / 1e9 / max(seconds, 1e-9) for stage, (size, seconds) in shares.items()}
    slowest = min(rates, key=rates.__getitem__)
    metrics = {"perf/sync/slowest_stage": float(slowest)}
    told = []
    for stage, (size, seconds) in sorted(shares.items()):
        numbers = {"bytes": float(size), "seconds": seconds, "gb_per_s": rates[stage]}
        metrics |= {f"perf/sync/stage{stage}_{name}": number for name, number in numbers.items()}
        told.append(f"stage {stage} {size / 2**20:.1f} MiB in {seconds:.2f} s ({rates[stage]:.2f} GB/s)")
    logger.info("weights sent by %s; the slowest was stage %d", ", ".join(told), slowest)
    return metrics
