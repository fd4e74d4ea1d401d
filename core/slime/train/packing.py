"""Micro-batches of packed sequences: the samples of the batch as one rank computes them.

The last token of a sample predicts nothing and is not run. With P prompt and T response tokens, positions
P - 1 .. P + T - 2 predict the response. Samples of one prompt can share its tokens (`slime.train.micro_batches`).
Padding is only for context parallelism (each sequence a multiple of twice its size), for sequence parallelism (the
total a multiple of the tensor-parallel size), and for HybridEP (the total equal on all ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slime.train.attention import NO_PREFIX, PackedSequences, Prefix
from slime.train.layers import packed_positions
from slime.train.routing import NO_ROUTES, RoutedRows

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch
    from slime.train.micro_batches import PrefixGroup

#: HybridEP moves a rank's tokens in chunks of so many
_HYBRIDEP_CHUNK = 128


@dataclass(frozen=True, eq=False)
class PackedMicroBatch:
    """One packed micro-batch on this rank: L local tokens; M response tokens in all, M_l of them predicted here."""

    #: indices in the batch of the samples packed here, in packing order
    samples: tuple[int, ...]
    #: False if the micro-batch only keeps this rank in step with the others and its tokens must not be counted
    counts: bool
    tokens: Tensor  #: [1, L] int64
    positions: Tensor  #: [1, L] int64, within each sample
    packed: PackedSequences
    rows: Tensor  #: [M_l] int64, local positions that predict response tokens
    targets: Tensor  #: [M_l] int64, the tokens they predict
    #: [M_l] int64, the index of each of them among the M; None if all are here, in order
    slots: Tensor | None
    sequence_ids: Tensor  #: [M] int64, 0..len(samples)-1
    places: Tensor  #: [M] int64, the index of each response token among all of the batch
    #: [number of them] int64, which of the M_l tokens are trained on; None if all are
    trained_indices: Tensor | None = None
    routed: RoutedRows = NO_ROUTES  #: for the routers of a mixture of experts


@dataclass(frozen=True)
class PackingRule:
    """What the parallel layout requires of a micro-batch, and the position of this rank in it."""

    tensor_parallel_size: int
    sequence_parallel: bool
    cp_size: int
    cp_rank: int
    device: torch.device
    tp_rank: int
    #: whether all ranks must have equally many tokens in a micro-batch, in whole chunks of HybridEP
    equal_totals: bool = False

    def length(self, batch: TrainBatch, groups: Sequence[PrefixGroup]) -> int:
        """Tokens of samples that share none, each padded as a sequence must be."""
        return sum(
            -(-(len(batch.tokens[i]) - 1) // self._multiple) * self._multiple for one in groups for i in one.samples
        )

    @property
    def _multiple(self) -> int:
        """The length of each sequence is a multiple of this."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    def pack(
        self,
        batch: TrainBatch,
        groups: Sequence[PrefixGroup],
        *,
        counts: bool = True,
        step_tokens: int | None = None,
        least: int = 0,
        routes: Sequence[np.ndarray[Any, Any]] | None = None,
    ) -> PackedMicroBatch:
        """Pack samples, the tokens that a group shares only once.

        Args:
            batch: The rollout's samples.
            groups: Which of them. None may share tokens under context parallelism, or with routed experts.
            counts: False for a micro-batch that only keeps this rank in step with the others.
            step_tokens: Tokens of the whole optimizer step, over all ranks; None outside of training.
            least: The `length` of the longest of all ranks' micro-batches, if totals must be equal.
            routes: Of each sample, in order, the experts [tokens, routers of this rank, K] that the engine chose.
        """
        whole_prompts = self.cp_size > 1 or routes is not None
        assert not (whole_prompts and any(group.shared for group in groups)), "these need each prompt by itself"
        multiple = self._multiple
        #: of each packed sequence, where its tokens are in the batch, -1 for padding; and what it continues
        sources: list[np.ndarray[Any, Any]] = []
        prefixes: list[Prefix] = []
        rows, targets, sequence_ids, places = [], [], [], []
        samples: list[int] = []
        whole, responses = batch.tokens.offsets.tolist(), batch.loss_masks.offsets.tolist()
        start = 0

        def add(begin: int, end: int, prefix: Prefix) -> int:
            """Pack the batch's tokens from begin to end as one sequence, and return its padded length."""
            source = np.arange(begin, begin - (begin - end) // multiple * multiple)
            source[end - begin :] = -1
            sources.append(source)
            prefixes.append(prefix)
            return len(source)

        for group in groups:
            prefix = Prefix(start, group.shared) if group.shared else NO_PREFIX
            if group.shared:
                begin = whole[group.samples[0]]
                start += add(begin, begin + group.shared, NO_PREFIX)
            for i in group.samples:
                begin, end, response = whole[i] + group.shared, whole[i + 1], responses[i + 1] - responses[i]
                first = start + end - begin - response - 1
                rows.append(np.arange(first, first + response))
                targets.append(np.arange(end - response, end))
                sequence_ids.append(np.full(response, len(samples)))
                places.append(np.arange(responses[i], responses[i + 1]))
                samples.append(i)
                start += add(begin, end - 1, prefix)
        # Sequence parallelism divides this rank's tokens; pad the total by one more sequence that nothing refers to.
        whole_parts = multiple * (self.tensor_parallel_size if self.sequence_parallel else 1)
        whole_parts *= _HYBRIDEP_CHUNK if self.equal_totals else 1
        extra = -(-max(start, least) // whole_parts) * whole_parts - start
        if extra:
            sources.append(np.full(extra, -1))
            prefixes.append(NO_PREFIX)
        lengths = [len(one) for one in sources]
        source, taken = np.concatenate(sources), np.concatenate(places)
        run = int(np.count_nonzero(source >= 0))
        tokens = torch.from_numpy(np.where(source < 0, 0, batch.tokens.flat[source]).astype(np.int64))
        trained = torch.from_numpy(batch.loss_masks.flat[taken] > 0)
        padding = torch.from_numpy(source < 0) if run < len(source) else None
        chosen = None if routes is None else _packed_routes(routes, len(source), lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = packed_positions(ends, self.cp_size, self.cp_rank)
        predicting = torch.from_numpy(np.concatenate(rows))
        predicted = torch.from_numpy(batch.tokens.flat[np.concatenate(targets)].astype(np.int64))
        slots = None
        if self.cp_size > 1:
            mine = positions + ends[:-1].repeat_interleave(ends.diff() // self.cp_size)
            local_of = torch.full((int(ends[-1]),), -1)
            local_of[mine] = torch.arange(mine.numel())
            slots = (local_of[predicting] >= 0).nonzero().squeeze(1)
            predicting, predicted = local_of[predicting[slots]], predicted[slots]
            tokens, trained = tokens[mine], trained[slots]
            padding = None if padding is None else padding[mine]
            chosen = None if chosen is None else chosen[mine]
        before = torch.tensor([prefix.length for prefix in prefixes])
        positions = positions + before.repeat_interleave(ends.diff() // self.cp_size)
        positions = self._there(positions)
        share = run / step_tokens if counts and step_tokens else 0.0
        return PackedMicroBatch(
            samples=tuple(samples),
            counts=counts,
            tokens=self._there(tokens.unsqueeze(0)),
            positions=positions.unsqueeze(0),
            packed=self._sequences(self._there(ends), lengths, prefixes, positions),
            rows=self._there(predicting),
            targets=self._there(predicted),
            slots=None if slots is None else self._there(slots),
            sequence_ids=self._there(torch.from_numpy(np.concatenate(sequence_ids))),
            places=self._there(torch.from_numpy(taken)),
            trained_indices=None if trained.all() else self._there(trained.nonzero().squeeze(1)),
            routed=RoutedRows(share, run, self._this_part(padding), self._this_part(chosen)),
        )

    def _there(self, tensor: Tensor) -> Tensor:
        """On the device; the host does not wait until the device has done what it was given before."""
        return tensor.to(self.device, non_blocking=True)

    def _this_part(self, rows: Tensor | None) -> Tensor | None:
        """Of one entry for each token, those that this rank's layers see: a part under sequence parallelism."""
        if rows is None:
            return None
        if self.sequence_parallel:
            rows = rows.chunk(self.tensor_parallel_size)[self.tp_rank]
        return self._there(rows)

    def _sequences(
        self, ends: Tensor, lengths: Sequence[int], prefixes: Sequence[Prefix], positions: Tensor
    ) -> PackedSequences:
        padded = ends if self.cp_size > 1 else None
        continues = any(prefix.length for prefix in prefixes)
        longest = max(prefix.length + length for prefix, length in zip(prefixes, lengths, strict=True))
        ends.slime_positions = positions  # type: ignore[attr-defined]  # `rotary_thd` reads it
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            prefixes=tuple(prefixes) if continues else None,
            lengths=tuple(lengths),
        )


def _packed_routes(routes: Sequence[np.ndarray[Any, Any]], total: int, lengths: Sequence[int]) -> Tensor:
    """[total, layers, K] experts for each packed token; -1 for padding."""
    packed = np.full((total, *routes[0].shape[1:]), -1, dtype=np.int16)
    start = 0
    for own, length in zip(routes, lengths, strict=False):  # the last length may be of padding
        packed[start : start + len(own)] = own
        start += length
    return torch.from_numpy(packed)
