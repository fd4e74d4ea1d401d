"""How the senders of a sync take turns: the first rank of each pipeline stage, in the order of the stages.

The first sender, which paused the engines and resumes them, lets the others begin: one after another if they and the
engines meet in collective operations, whose order must be one everywhere, and otherwise all at the same time. Each
reports to it. A sender that fails says so in its report, and the first says to all that the sync has failed. Messages
are left in the store through which the ranks met.
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

from slime.config.weight_options import LAST_WORDS_S
from slime.errors import WeightSyncError

logger = logging.getLogger(__name__)

#: the longest pause between two looks at the store, and the share of what has been waited that one takes
_POLL_S, _POLL_SHARE = 0.002, 0.05
#: torch's store takes at most 8 MiB in one value
_PART_BYTES = 2**22


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
        #: of the first: the stages that it has let begin in this sync
        self._begun: set[int] = set()
        #: keys of what this one has told in the last sync
        self._told: list[str] = []

    @classmethod
    def of_pipeline(cls) -> Self:
        """Those of the senders of Megatron's pipeline group of this rank."""
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        store = distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(group), dist.get_world_size(group))

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Run the body as this sender's part of the next sync; an error in it is passed on to the other senders.

        All that a sender does for a sync belongs into it: the senders count them. A `WeightSyncError` is raised by the
        first sender alone, for all.
        """
        self._sync += 1
        for key in self._told:  # the first has ended the sync before; another may still have to read how
            if "/end/" not in key:
                self._store.delete_key(key)
        self._told = []
        self._begun.clear()
        try:
            yield
        except BaseException as error:
            synced = isinstance(error, WeightSyncError)
            text = str(error).removeprefix("Weight sync: ") if synced else f"{type(error).__name__}: {error}"
            urls = error.urls if isinstance(error, WeightSyncError) else []
            self._tell("end" if self.stage == 0 else f"report {self.stage}", {"error": text, "urls": urls})
            if self.stage == 0 or not synced:
                raise
            logger.warning("%s", error)

    def wait(self, deadline: float) -> tuple[float, Any]:
        """Wait until this sender may send; returns its deadline, and what the first has told it for that.

        The deadline is at most the first's, so that no sender goes on when the first has given up. Their clocks may
        differ, so the first says how long it is from now, when this one has said that it is ready.

        Args:
            deadline: That of this sender's sync, in monotonic seconds.

        Raises:
            WeightSyncError: The sync has failed, or its turn has not come in time.
        """
        if self.stage == 0:
            return deadline, None
        self._tell(f"ready {self.stage}", {})
        begin = self._read((f"begin {self.stage}", "end"), 0, deadline)
        return min(deadline, time.monotonic() + float(begin["remaining_s"])), begin["told"]

    def done(self, *, sent: int, seconds: float, report: Any = None) -> None:
        """Of a sender other than the first: report to it that this one has sent its tensors.

        Args:
            sent: How many bytes.
            seconds: In how long.
            report: What else the first must know.
        """
        self._tell(f"report {self.stage}", {"sent": sent, "seconds": seconds, "report": report})

    def others(self, deadline: float) -> dict[int, dict[str, Any]]:
        """Of the first sender: let one after another of the others send, if they have not begun; what each reports.

        Returns:
            Stage -> what it passed to `done`.

        Raises:
            WeightSyncError: One has failed, or has not sent in time.
        """
        reports = {}
        for stage in range(1, self._stages):
            if stage not in self._begun:
                self._begin(stage, deadline)
            reports[stage] = self._read((f"report {stage}",), stage, deadline)
        return reports

    def begin_together(self, deadline: float, told: Any = None) -> None:
        """Of the first sender: let all others send at once, and tell them something; raises as `others`."""
        for stage in range(1, self._stages):
            self._begin(stage, deadline, told)

    def _begin(self, stage: int, deadline: float, told: Any = None) -> None:
        self._begun.add(stage)
        self._read((f"ready {stage}", f"report {stage}"), stage, deadline)  # it may report that it failed before
        self._tell(f"begin {stage}", {"remaining_s": deadline - time.monotonic(), "told": told})

    def _key(self, message: str, part: int = 0) -> str:
        return f"slime/weights/{self._sync}/{message}/{part}"

    def _tell(self, message: str, content: Mapping[str, Any]) -> None:
        data = json.dumps(content)  # ASCII
        parts = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
        parts[0] = f"{len(parts)} {parts[0]}"
        # The first part is stored last: a reader waits for it alone, and then finds the others.
        for number in reversed(range(len(parts))):
            self._store.set(self._key(message, number), parts[number])
            self._told.append(self._key(message, number))

    def _read(self, messages: tuple[str, ...], sender: int, deadline: float) -> dict[str, Any]:
        """The first of these messages of stage `sender` that is there."""
        # Torch's own wait would keep the store from others, and could not be interrupted.
        began = time.monotonic()
        while not (there := [message for message in messages if self._store.check([self._key(message)])]):
            if time.monotonic() > deadline + LAST_WORDS_S:
                what = "did not send its part" if self.stage == 0 else f"did not let stage {self.stage} send"
                raise WeightSyncError(
                    f"Weight sync: the sender of pipeline stage {sender} {what} in time. Look at the logs of the"
                    " trainer's ranks; --weight-sync-timeout-s sets the limit."
                )
            time.sleep(min(_POLL_S, max(0.0001, _POLL_SHARE * (time.monotonic() - began))))
        count, _, data = self._store.get(self._key(there[-1])).decode().partition(" ")
        data += "".join(self._store.get(self._key(there[-1], part)).decode() for part in range(1, int(count)))
        content: dict[str, Any] = json.loads(data)
        if "error" in content:
            text = f"Weight sync: the sender of pipeline stage {sender} failed: {content['error']}"
            raise WeightSyncError(text, content["urls"])
        return content


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
