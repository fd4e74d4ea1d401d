"""The one seam of what a trainer may do beside training weights: adapters, further layers, a critic.

A feature is one object in one file (`slime.train.lora`, `slime.train.predicting`, `slime.train.critic`). The rank makes
those that the run uses, and calls their hooks; it also asks the adapters for merged weights and the critic for values.
What a feature reads of the samples is a column of the batch; the experts that routers replay (`slime.train.routing`)
are such a column and need no hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.train.checkpoint_io import Write
    from slime.train.loss import LossColumns
    from slime.train.model import TrainableModel
    from slime.train.schedule import LossFunction, TokenHead


class Feature:
    """Hooks in the order in which they are called, on all ranks alike; each does nothing unless a feature says so."""

    def build(self, chunks: Sequence[Any]) -> None:
        """The policy's bare chunks were built and have no weights yet."""

    def start(self, chunks: Sequence[Any]) -> None:
        """The chunks have the weights of the model folder, from which training starts."""

    def head(self, head: TokenHead, chunk: Any) -> TokenHead:  # noqa: ARG002 - a feature's
        """What is read from the output of this rank's last chunk."""
        return head

    def models(self) -> Sequence[TrainableModel]:
        """Models that are trained beside the policy."""
        return ()

    def before_step(self, model: TrainableModel) -> None:
        """An optimizer step of the policy begins."""

    def loss(self, loss: LossFunction, columns: LossColumns) -> LossFunction:  # noqa: ARG002 - a feature's
        """The loss of a micro-batch, given that of the policy and the columns of the batch."""
        return loss

    def save(self, folder: Path, write: Write) -> None:
        """Write what belongs to the feature into the trainer's part of a checkpoint."""

    def check(self, folder: Path, *, weights_only: bool) -> None:
        """Refuse a checkpoint that does not fit the feature, before anything of it is read (`CheckpointError`).

        Args:
            folder: The trainer's part of a checkpoint.
            weights_only: Whether a new run starts from the weights.
        """

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Read what `save` wrote, once the policy has its weights."""
