"""What the loss sees of each token: kept for the samples that are logged, and brought together from the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.observe.logged_tokens import FIXED_BYTES, LoggedTokens, Marks, choose
from slime.plugin.columns import BUILT_IN
from slime.train.packing import PackedMicroBatch
from slime.train.parallel import counts_tokens, of_all_ranks

if TYPE_CHECKING:
    from slime.config.options import RunOptions
    from slime.rollout.train_batch import TrainBatch
    from slime.train.loss import LossColumns


#: metrics of an objective that are no columns: maxima, and clip fractions that follow from `clipped` and the advantage
_ELSEWHERE = re.compile(r"^clip_fraction_|_max$")


class TokenRecord:
    """What the loss saw of each token on this rank, for one rollout: name -> [sum of T_i], 0 where it saw nothing.

    Columns stay on the device, a few bytes a token, until the samples to log are known.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        """For so many response tokens, all of the batch."""
        self._columns: dict[str, Tensor] = {}
        self._seen = torch.zeros(tokens, dtype=torch.bool, device=device)

    def add(
        self,
        micro_batch: PackedMicroBatch,
        mask: Tensor,
        columns: Mapping[str, Tensor],
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Keep columns of a micro-batch.

        Args:
            micro_batch: The micro-batch of M response tokens.
            mask: [M] above 0 where a token is trained on; others have no value.
            columns: slime's own, [M] each.
            own: What the estimator's objective reports of tokens, [M] each; `clip_fraction` becomes `clipped`.
        """
        mine = dict(columns)
        for name, values in (own or {}).items():
            if name == "clip_fraction":
                mine["clipped"] = values
            elif name.isidentifier() and name not in BUILT_IN and not _ELSEWHERE.search(name):
                mine[name] = values
        here = micro_batch.places
        self._seen.index_fill_(0, here, True)  # an assignment would copy the value to the device, and wait for it
        for name, values in mine.items():
            if name not in self._columns:
                self._columns[name] = torch.zeros(self._seen.shape, device=self._seen.device)
            self._columns[name][here] = torch.where(mask > 0, values.detach().float(), torch.nan)

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
        mine = self._columns if counts_tokens() else {}
        names = dict.fromkeys(mine)
        marks = self._marks(mine, batch)
        if dist.get_world_size() > 1:
            # Stages without the output layer have seen neither names nor values.
            everyone = of_all_ranks((list(names), marks))
            names = dict.fromkeys(name for one, _ in everyone for name in one)
            marks = Marks(
                np.sum([one.gap for _, one in everyone], axis=0), np.sum([one.clipped for _, one in everyone], axis=0)
            )
        a_token = 4 * (len(names) + len(known) + len(batch.columns)) + FIXED_BYTES
        most = None if options.log_token_columns == "all" else int(options.log_token_columns_mib * 2**20) // a_token
        samples, flags = choose(batch, marks, most_tokens=most, seed=options.seed)
        offsets = batch.loss_masks.offsets
        places = [np.arange(offsets[i], offsets[i + 1]) for i in samples]
        chosen = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *places])).to(mask.device)
        gathered = torch.zeros((len(names), len(chosen)), device=mask.device)
        for row, name in enumerate(names):
            if name in mine:
                gathered[row] = mine[name][chosen]
        if dist.get_world_size() > 1:
            # One rank has each entry and the others have 0, so the sum is a copy.
            dist.all_reduce(gathered)
        found = dict(zip(names, gathered.cpu().numpy(), strict=True))
        found |= {name: values[chosen].float().cpu().numpy() for name, values in known.items()}
        steps = [int(batch.step_ids[i]) for i in samples]
        return LoggedTokens(samples, flags, steps, found)

    def _marks(self, mine: Mapping[str, Tensor], batch: TrainBatch) -> Marks:
        """Of the samples whose tokens this rank has; 0 for others."""
        zeros = np.zeros(len(self._seen), dtype=np.float32)
        gap, clipped = zeros, zeros
        if "trainer_logprob" in mine and batch.rollout_log_probs is not None:
            gap = np.abs(mine["trainer_logprob"].cpu().numpy() - batch.rollout_log_probs.flat)
            gap = np.where(self._seen.cpu().numpy(), np.nan_to_num(gap), 0)
        if "clipped" in mine:
            clipped = np.nan_to_num(mine["clipped"].cpu().numpy())
        begins = batch.loss_masks.offsets[:-1]
        return Marks(
            np.maximum.reduceat(gap, begins).astype(np.float64), np.add.reduceat(clipped, begins, dtype=np.float64)
        )
