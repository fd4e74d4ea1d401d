"""`--colocate`: engines and trainer share their devices and use them in turn.

While one side works, the memory of the other is released. A turn passes on in stages, so that at no time the whole of
both is in memory:

- to the trainer: the idle engines release KV cache, weights and CUDA graphs; the trainer restores weights, then
  gradients and optimizer;
- to the engines: the trainer releases gradients and optimizer; the engines restore memory for weights, which are then
  sent; the trainer releases its weights; the engines restore KV cache and CUDA graphs.

`--no-offload-train` and `--no-offload-rollout` leave out the stages of a side, whose memory stays then.

A turn passes on when a step needs the other side. So a sync only names the new version: the weights are sent with the
turn of the engines, and a checkpoint right after training finds the trainer's state where it is.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from slime.observe.timing import timed
from slime.rollout.record import Rollout
from slime.run.checkpoint.save import Saver
from slime.run.placement import Placement
from slime.run.remote_trainer import TrainerProcess
from slime.run.run import Run

if TYPE_CHECKING:
    from slime.registry.plugin_set import Fingerprint
    from slime.train.offload import Part

logger = logging.getLogger(__name__)

Side = Literal["engines", "trainer"]
_MIB = 2**20


@dataclass(frozen=True)
class Stage:
    """One change of memory, by one side."""

    side: Side
    verb: Literal["release", "restore"]
    #: SGLang's kinds of memory, or parts of the trainer's (see `slime.train.offload`), in order
    what: tuple[str, ...]

    def __str__(self) -> str:
        return f"the {self.side} {self.verb}d {', '.join(self.what)}"


TO_TRAINER = (
    Stage("engines", "release", ("kv_cache", "weights", "cuda_graph")),
    Stage("trainer", "restore", ("weights", "training")),
)
BEFORE_SENDING = (
    Stage("trainer", "release", ("training",)),
    Stage("engines", "restore", ("weights",)),
)
AFTER_SENDING = (
    Stage("trainer", "release", ("weights",)),
    Stage("engines", "restore", ("cuda_graph", "kv_cache")),
)


class ColocatedRun(Run):
    """A run whose engines and trainer take turns. Without engines, or without a trainer, it is a plain `Run`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shares = {"engines", "trainer"} <= self._roles
        self._turn: Side = "trainer"
        #: bytes and seconds of the turns since the last step was reported: of some turns, no step is under way
        self._of_turns: defaultdict[str, float] = defaultdict(float)

    # --- start: the engines have released their memory before the trainer takes any ---------------------

    def _start_engines(self, placement: Placement) -> None:
        shared, nodes = placement.shared, placement.nodes_per_engine
        devices = self._trainer.devices() if shared and self.config.on_gpu else []
        visible = [[devices[rank] for rank in ranks] for ranks in shared] if devices else []
        through_memory = self.config.sync.update_weight_transport == "tensor"
        if through_memory and self.config.cluster.actor_num_nodes > 1:
            # Each of its ranks opens memory of the rank that it shares a device with.
            self._beside = [[*chain(*shared[first : first + nodes])] for first in range(0, len(shared), nodes)]
        elif through_memory:
            # An engine opens memory of the first rank of each pipeline stage, and therefore must see their devices; its
            # own come first.
            stages = self.config.megatron.get("pipeline_model_parallel_size", 1)
            senders = devices[:: max(1, len(devices) // stages)]
            visible = [list(dict.fromkeys([*own, *senders])) for own in visible]
        self._engines.start(placement.engines, visible, nodes=nodes)

    def _build_trainer(self, fingerprint: Fingerprint) -> None:
        if self._shares:
            self._engines.wait_ready(self._starting("engines"))
            if self._releases("engines"):
                self._engines.release_memory(TO_TRAINER[0].what)
        super()._build_trainer(fingerprint)

    # --- steps of the loop -------------------------------------------------------------------------------

    def start_generation(self, number: int) -> None:
        """See `Run`; the engines get the devices, and the newest weights."""
        self._give_to_engines()
        super().start_generation(number)

    def start_evaluation(self, number: int) -> None:
        """See `Run`; the engines get the devices, and the newest weights."""
        self._give_to_engines()
        super().start_evaluation(number)

    def train(self, rollout: Rollout) -> dict[str, float]:
        """See `Run`; the trainer gets the devices."""
        self._give_to_trainer()
        return super().train(rollout)

    def sync_weights(self) -> None:
        """Name the trainer's weights as the next version. The engines get them with their turn."""
        if self._shares:
            self._name_weights().wait()

    def _save(self, saver: Saver, rollouts_done: int) -> None:
        self._give_to_trainer()
        super()._save(saver, rollouts_done)

    def export_hf(self, folder: Path) -> None:
        """See `Run`; the trainer gets the devices."""
        self._give_to_trainer()
        super().export_hf(folder)

    def finish_step(self, rollout: Rollout, train_metrics: dict[str, float]) -> None:
        """See `Run`; also reports the turns that an evaluation or a checkpoint took since the step before."""
        super().finish_step(rollout, {**train_metrics, **self._of_turns})
        self._of_turns.clear()

    # --- turns -------------------------------------------------------------------------------------------

    def _give_to_trainer(self) -> None:
        if not self._shares or self._turn == "trainer":
            return
        held = self._go_through(TO_TRAINER)
        self._turn = "trainer"
        self._of_turns["memory/held_training"] = sum(held.values())

    def _give_to_engines(self) -> None:
        if not self._shares or self._turn == "engines":
            return
        self._go_through(BEFORE_SENDING)
        with timed(self._of_turns, "time/sync_weights"):
            self._send_weights()
        self._of_turns["synced_bytes"] += self._synced.pop("synced_bytes")
        self._of_turns.update(self._synced)  # of the newest: they are the senders' rates
        self._synced.clear()
        held = self._go_through(AFTER_SENDING)
        self._turn = "engines"
        self._of_turns["memory/held_generating"] = sum(held.values())

    def _releases(self, side: Side) -> bool:
        """Whether a side's memory is released while the other works."""
        cluster = self.config.cluster
        return cluster.offload_rollout if side == "engines" else cluster.offload_train

    def _go_through(self, stages: Sequence[Stage]) -> dict[str, float]:
        """Change the memory of both sides stage by stage; what is held afterwards."""
        held = self._held()
        with timed(self._of_turns, "time/colocate"):
            for stage in stages:
                if self._releases(stage.side):
                    held = self._change(stage, held)
        return held

    def _change(self, stage: Stage, before: dict[str, float]) -> dict[str, float]:
        """Go through one stage, log what it changed, and count what was released; what is held afterwards."""
        started = time.monotonic()
        if stage.side == "trainer":
            release = stage.verb == "release"
            method = TrainerProcess.release_memory if release else TrainerProcess.restore_memory
            parts = cast("tuple[Part, ...]", stage.what)
            self._trainer.begin(method, parts, doing=f"colocation: {stage}").wait()
        elif stage.verb == "release":
            self._engines.release_memory(stage.what)
        else:
            self._engines.restore_memory(stage.what)
        seconds, after = time.monotonic() - started, self._held()
        told = ", ".join(f"{who} {before[who] / _MIB:.0f} -> {after[who] / _MIB:.0f} MiB" for who in after)
        logger.info("colocation: %s in %.2f s; in use by %s", stage, seconds, told)
        if stage.verb == "release":
            self._of_turns[f"memory/{stage.side}_released"] += sum(before.values()) - sum(after.values())
        return after

    def _held(self) -> dict[str, float]:
        """Bytes in use where engines and trainer compute: of the GPUs, or of the host by each side."""
        held = self._trainer.begin(TrainerProcess.held_bytes, doing="measuring the trainer's memory").wait()
        if self.config.on_gpu:
            return {"the GPUs' processes": float(sum(held))}
        return {"the engines": float(self._engines.held_bytes()), "the trainer": float(sum(held))}
