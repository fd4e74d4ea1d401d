"""Samples to packed micro-batches: sequences one after the other, padded only where the layout demands it.

The last token of a sample predicts nothing and is not run.  With P prompt and T response tokens, positions
P - 1 .. P + T - 2 predict the response.  Padding is there for context parallelism (each sequence a multiple of
2 x its size) and for sequence parallelism (the total a multiple of the tensor-parallel size), and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.errors import TrainerError
from slime.train.attention_plan import zigzag_positions
from slime.train.rotary import packed_positions

if TYPE_CHECKING:
    from slime.data import TrainBatch


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One packed micro-batch on this rank.  L local tokens, R response tokens in all, R_l of them predicted here."""

    #: positions in the batch of the samples packed here, in packing order
    samples: tuple[int, ...]
    #: False for one that only keeps this rank in step with the others; its response tokens count nothing
    counts: bool
    tokens: Tensor  #: [1, L] int64
    positions: Tensor  #: [1, L] int64
    packed: PackedSeqParams
    rows: Tensor  #: [R_l] int64, local positions that predict response tokens
    targets: Tensor  #: [R_l] int64, the tokens they predict
    #: [R_l] int64 where each of them stands among the R; None when all are here, in order
    slots: Tensor | None
    sequence_ids: Tensor  #: [R] int64, 0..len(samples)-1
    token_ids: Tensor  #: [R] int64, where each response token stands among all of the batch

    @property
    def response_tokens(self) -> int:
        """R: response tokens of the micro-batch, over all context-parallel ranks."""
        return self.sequence_ids.numel()


@dataclass(frozen=True)
class PackingRule:
    """The layout's demands, and this rank's place in it."""

    tensor_parallel_size: int
    sequence_parallel: bool
    cp_size: int
    cp_rank: int
    device: torch.device

    def pack(self, batch: TrainBatch, samples: Sequence[int], *, counts: bool = True) -> MicroBatch:
        """Pack some samples of the batch.

        Raises `TrainerError` for a sample whose first response token has nothing before it.
        """
        multiple = 2 * self.cp_size if self.cp_size > 1 else 1
        ids, lengths, rows, targets, sequence, tokens = [], [], [], [], [], []
        begins = np.cumsum(batch.response_lengths) - batch.response_lengths
        start = 0
        for number, i in enumerate(samples):
            whole = batch.tokens[i]
            response = int(batch.response_lengths[i])
            prompt = len(whole) - response
            if prompt < 1:
                raise TrainerError(
                    f"sample {i} of rollout {batch.rollout} has {len(whole)} tokens of which {response} are response;"
                    " at least one prompt token must come first, since the first response token is predicted from it."
                )
            run = max(1, len(whole) - 1)
            padded = -(-run // multiple) * multiple
            ids.append(np.pad(whole[:run], (0, padded - run)))
            rows.append(np.arange(start + prompt - 1, start + prompt - 1 + response))
            targets.append(whole[prompt:])
            sequence.append(np.full(response, number))
            tokens.append(np.arange(begins[i], begins[i] + response))
            lengths.append(padded)
            start += padded
        # Sequence parallelism divides this rank's tokens; pad the total as one more sequence that nothing refers to.
        extra = -start % (multiple * (self.tensor_parallel_size if self.sequence_parallel else 1))
        if extra:
            ids.append(np.zeros(extra, dtype=np.int32))
            lengths.append(extra)
        return self._local(
            samples=tuple(samples),
            counts=counts,
            ids=_int64(np.concatenate(ids)),
            lengths=lengths,
            rows=_int64(np.concatenate(rows)),
            targets=_int64(np.concatenate(targets)),
            sequence=_int64(np.concatenate(sequence)),
            token_ids=_int64(np.concatenate(tokens)),
        )

    def _local(
        self,
        *,
        samples: tuple[int, ...],
        counts: bool,
        ids: Tensor,
        lengths: list[int],
        rows: Tensor,
        targets: Tensor,
        sequence: Tensor,
        token_ids: Tensor,
    ) -> MicroBatch:
        """This rank's share of a micro-batch described over whole sequences."""
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        slots = None
        if self.cp_size > 1:
            mine = torch.cat(
                [
                    int(start) + zigzag_positions(length, self.cp_size, self.cp_rank)
                    for start, length in zip(ends[:-1], lengths, strict=True)
                ]
            )
            local_of = torch.full((int(ends[-1]),), -1)
            local_of[mine] = torch.arange(mine.numel())
            slots = (local_of[rows] >= 0).nonzero().squeeze(1)
            ids, rows, targets = ids[mine], local_of[rows[slots]], targets[slots]
        positions = packed_positions(ends, self.cp_size, self.cp_rank)
        ends_here = ends.to(self.device)
        longest = max(lengths)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends_here,
            cu_seqlens_kv=ends_here,
            cu_seqlens_q_padded=ends_here if self.cp_size > 1 else None,
            cu_seqlens_kv_padded=ends_here if self.cp_size > 1 else None,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return MicroBatch(
            samples=samples,
            counts=counts,
            tokens=ids.unsqueeze(0).to(self.device),
            positions=positions.unsqueeze(0).to(self.device),
            packed=packed,
            rows=rows.to(self.device),
            targets=targets.to(self.device),
            slots=None if slots is None else slots.to(self.device),
            sequence_ids=sequence.to(self.device),
            token_ids=token_ids.to(self.device),
        )


def flat_column(parts: Sequence[Any], device: torch.device) -> Tensor:
    """A per-sample column, N x [T_i], as one float32 vector over the batch's response tokens, on the device."""
    flat = torch.cat(list(parts)) if isinstance(parts[0], Tensor) else torch.from_numpy(np.concatenate(parts))
    return flat.to(device, torch.float32)


def _int64(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
