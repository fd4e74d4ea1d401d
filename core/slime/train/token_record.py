"""What the loss sees of each token: kept for the samples that are logged, and brought together from the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.observe.logged_tokens import FIXED_BYTES, LoggedTokens, Marks, choose
from slime.plugin.columns import BUILT_IN
from slime.train.packing import PackedMicroBatch
from slime.train.parallel import counts_tokens

if TYPE_CHECKING:
    from slime.config.options import RunOptions
    from slime.rollout.train_batch import TrainBatch
    from slime.train.loss import LossColumns


#: metrics of an objective that are no columns: maxima, and clip fractions that follow from `clipped` and the advantage
_ELSEWHERE = re.compile(r"^clip_fraction_|_max$")


@dataclass(frozen=True, slots=True)
class _Seen:
    """The columns of a micro-batch, and what is needed of it, which is little, to know whose they are."""

    samples: tuple[int, ...]
    sequence_ids: Tensor  #: [R]
    token_ids: Tensor  #: [R]
    columns: dict[str, Tensor]  #: name -> [R]


class TokenRecord:
    """Collects the columns of the micro-batches of one rollout on this rank.

    Tensors stay where they are, a few bytes a token, until the samples to log are known.
    """

    def __init__(self) -> None:
        self._parts: list[_Seen] = []
        self._own: dict[str, None] = {}

    def add(
        self,
        micro_batch: PackedMicroBatch,
        mask: Tensor,
        columns: Mapping[str, Tensor],
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Keep columns of a micro-batch.

        Args:
            micro_batch: The micro-batch of R response tokens.
            mask: [R] above 0 where a token is trained on; others have no value.
            columns: slime's own, [R] each.
            own: What the estimator's objective reports of tokens, [R] each; `clip_fraction` becomes `clipped`.
        """
        mine = dict(columns)
        for name, values in (own or {}).items():
            if name == "clip_fraction":
                mine["clipped"] = values
            elif name.isidentifier() and name not in BUILT_IN and not _ELSEWHERE.search(name):
                self._own[name] = None
                mine[name] = values
        used = {name: torch.where(mask > 0, values.detach().float(), torch.nan) for name, values in mine.items()}
        self._parts.append(_Seen(micro_batch.samples, micro_batch.sequence_ids, micro_batch.token_ids, used))

    def collect(self, batch: TrainBatch, columns: LossColumns, options: RunOptions) -> LoggedTokens:
        """The columns of the samples to log (collective); the same on every rank.

        Args:
            batch: The rollout's samples.
            columns: What every rank has of each token.
            options: What may be logged, and the seed of the draw of samples.
        """
        everywhere = {
            "advantage": columns.advantages,
            "ref_logprob": columns.ref_log_probs,
            "value": columns.values,
            "returns": columns.returns,
        }
        mask = columns.mask
        known = {
            name: torch.where(mask > 0, values, torch.nan) for name, values in everywhere.items() if values is not None
        }
        device = mask.device
        parts = self._parts if counts_tokens() else []
        names = dict.fromkeys(name for part in parts for name in part.columns)
        marks = _marks(parts, batch)
        if dist.get_world_size() > 1:
            # Stages without the output layer have seen neither names nor values.
            everyone: list[tuple[list[str], list[str], Marks]] = [([], [], marks)] * dist.get_world_size()
            dist.all_gather_object(everyone, (list(names), list(self._own), marks))
            names = dict.fromkeys(name for one, _, _ in everyone for name in one)
            self._own = dict.fromkeys(name for _, own, _ in everyone for name in own)
            marks = Marks(
                np.sum([one.gap for _, _, one in everyone], axis=0),
                np.sum([one.clipped for _, _, one in everyone], axis=0),
            )
        a_token = 4 * (len(names) + len(known) + len(batch.columns)) + FIXED_BYTES
        most = None if options.log_token_columns == "all" else int(options.log_token_columns_mib * 2**20) // a_token
        samples, flags = choose(batch, marks, most_tokens=most, seed=options.seed)
        offsets = batch.loss_masks.offsets.tolist()
        # [sum of all T_i] where each logged token goes; -1: it is not logged
        goes = torch.full((offsets[-1],), -1)
        count = 0
        for i in samples:
            length = offsets[i + 1] - offsets[i]
            goes[offsets[i] : offsets[i + 1]] = torch.arange(count, count + length)
            count += length
        goes = goes.to(device)
        gathered = torch.zeros((len(names), count), device=device)
        for part in parts:
            to = goes[part.token_ids]
            logged = to >= 0
            for row, name in enumerate(names):
                if name in part.columns:
                    gathered[row, to[logged]] = part.columns[name][logged]
        if dist.get_world_size() > 1:
            # One rank has each entry and the others have 0, so the sum is a copy.
            dist.all_reduce(gathered)
        found = dict(zip(names, gathered.cpu().numpy(), strict=True))
        chosen = torch.zeros(count, dtype=torch.int64, device=device)
        chosen[goes[goes >= 0]] = (goes >= 0).nonzero().squeeze(1)
        found |= {name: values[chosen].float().cpu().numpy() for name, values in known.items()}
        steps = [int(batch.step_ids[i]) for i in samples]
        return LoggedTokens(samples, flags, steps, found, tuple(self._own))


def _marks(parts: list[_Seen], batch: TrainBatch) -> Marks:
    """Of the samples whose tokens this rank has; 0 for others."""
    marks = Marks(np.zeros(len(batch.tokens)), np.zeros(len(batch.tokens)))
    engine = None if batch.rollout_log_probs is None else batch.rollout_log_probs.flat
    for part in parts:
        samples = np.asarray(part.samples)[part.sequence_ids.cpu().numpy()]
        if engine is not None:
            gap = np.abs(part.columns["trainer_logprob"].cpu().numpy() - engine[part.token_ids.cpu().numpy()])
            np.maximum.at(marks.gap, samples, np.nan_to_num(gap))
        if "clipped" in part.columns:
            np.add.at(marks.clipped, samples, np.nan_to_num(part.columns["clipped"].cpu().numpy()))
    return marks
