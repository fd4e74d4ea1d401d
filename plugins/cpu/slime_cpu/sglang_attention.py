"""Attention for SGLang's plain-torch backend in one call per layer instead of one per sequence.

Sequences of a batch are padded to the longest, and the padding is masked. Each function here wraps
the backend's own, which it still uses for cases that padding does not cover (cross attention, sliding
windows) or where it would waste too much (very different lengths).

Where it is asked for, and with one thread, decoding gives a sequence the same bits whatever is in its batch, and so do
prompts if each is computed by itself. Several threads divide a batch between them, and round differently for another
number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from slime_cpu.sglang_siblings import Siblings, attend_siblings, find_siblings

#: a padded prompt batch may hold this many (query, key) pairs, and ...
_MAX_PAIRS = 2**23
#: ... this many times the pairs it would hold without padding
_MAX_WASTE = 2.0
#: keys (or values) gathered for one call may have this many elements (256 MiB in float32)
_MAX_GATHERED = 2**26
#: keys and values of running sequences are kept up to this many elements, over all layers (1 GiB in float32)
_MAX_KEPT = 2**28
#: room to grow: as many tokens as the longest sequence has of its own, but at most this many
_MOST_ROOM = 64
#: the keys of a decoding batch are padded to a multiple of this; a sum over another number of keys is rounded otherwise
_KEYS = 16


def _is_plain(encoder_lens: Any, is_cross_attn: bool, sliding_window_size: int | None) -> bool:
    windowed = sliding_window_size is not None and sliding_window_size > -1
    return encoder_lens is None and not is_cross_attn and not windowed


class Places:
    """Where the keys and values of the sequences of one forward pass are: the same in all layers, so found once."""

    def __init__(self) -> None:
        #: first and last sequence, positions -> which exist [B, S], and the slot of each [B, S] (0 if it does not)
        self._known: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        """Another forward pass begins."""
        self._known.clear()

    def of(
        self, part: slice, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Which of `longest` positions of the sequences in `part` exist, and the slots of all."""
        key = (part.start, part.stop, longest)
        if (known := self._known.get(key)) is None:
            valid = torch.arange(longest) < seq_lens[part, None]
            slots = req_to_token[req_pool_indices[part], :longest].long()
            slots = pad(slots, (0, longest - slots.shape[1])).masked_fill(~valid, 0)
            known = self._known[key] = valid, slots
        return known


@dataclass(frozen=True)
class Held:
    """Keys and values of one layer for the sequences that are being decoded.

    Attributes:
        own: [B, heads, S, head] each.
        valid: [B, S] which of them exist.
        siblings: Sequences whose first tokens are common; None: all tokens are their own.
        shared: [N, heads, P, head] each, of the common tokens.
    """

    own: tuple[Tensor, Tensor]
    valid: Tensor
    siblings: Siblings | None = None
    shared: tuple[Tensor, Tensor] | None = None

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """Attention of queries [B, heads, head]: faster than torch's for one query each."""
        heads = self.own[0].shape[1]
        grouped = query.view(len(query), heads, -1, query.shape[2]) * (scaling or query.shape[2] ** -0.5)
        if self.siblings is not None and self.shared is not None:
            return attend_siblings(self.siblings, grouped, self.shared, self.own, self.valid).flatten(1, 2)
        scores = torch.matmul(grouped, self.own[0].transpose(-1, -2))
        scores.masked_fill_(~self.valid[:, None, None], -torch.inf)
        return torch.matmul(scores.softmax(-1), self.own[1]).flatten(1, 2)


class Running:
    """Keys and values of the sequences that are being decoded, layer by layer, as attention reads them.

    Gathering them from the cache takes longer than attention, and from one decoding pass to the next only one position
    of each sequence is new. They are gathered again if the batch is another one, or if another pass, which may write to
    the cache, came between. Those of a new batch are kept from its second pass on: where answers are short, the batch
    changes at every pass.
    """

    def __init__(self) -> None:
        #: of this forward pass; the next number means that the layers of the last one are up to date
        self._pass = 0
        self._seen = False
        #: whether the last pass had the same batch
        self._lasts = False
        self._rows = self._lengths = torch.empty(0)
        self._siblings: Siblings | None = None
        #: [B] the newest token of each sequence: its slot, and its place among the sequence's own tokens
        self._newest = self._place = torch.empty(0)
        #: [B, S] which of the own tokens exist
        self._valid = torch.empty(0)
        #: own tokens that layers have room for
        self._room = 0
        #: address of a layer's keys in the cache -> the pass, own keys and values [B, heads, room, head], shared ones
        self._layers: dict[int, tuple[int, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]] = {}
        self._kept_elements = 0

    def begin(self, *, decoding: bool) -> None:
        """A forward pass begins."""
        self._pass += 1 if decoding else 2
        self._seen = False

    def of(
        self,
        caches: tuple[Tensor, Tensor],
        slots: Tensor,
        rows: Tensor,
        lengths: Tensor,
        dtype: torch.dtype,
        share: bool,
    ) -> Held:
        """Keys and values at `slots` [B, S] of the `caches`, of sequences that have these rows and lengths.

        Args:
            share: Whether common tokens may be held once.
        """
        if not self._seen:
            self._look_at(slots, rows, lengths, caches[0].shape[1:].numel() if share else 0)
        valid, longest = self._valid, self._valid.shape[1]
        kept = self._layers.get(caches[0].data_ptr())
        # Of two layers that share a cache, the first one was here in this pass.
        if kept is not None and kept[0] >= self._pass - 1:
            _, own, shared = kept
            every = torch.arange(len(lengths))
            for held, cache in zip(own, caches, strict=True):
                held[every, :, self._place] = cache.index_select(0, self._newest).to(dtype)
        else:
            gathered = _gather(caches, self._own(slots), dtype)
            shared = None if self._siblings is None else _contiguous(_gather(caches, self._siblings.slots, dtype))
            # Room that was never used is zero, because what is masked is still multiplied, by zero.
            needed = sum(one.numel() for one in gathered) * self._room // longest
            needed += sum(one.numel() for one in shared or ())
            if not self._lasts or self._kept_elements + needed > _MAX_KEPT:
                return Held(_contiguous(gathered) if share else gathered, valid, self._siblings, shared)
            self._kept_elements += needed
            keys, values = (one.new_zeros((*one.shape[:2], self._room, one.shape[3])) for one in gathered)
            keys[:, :, :longest], values[:, :, :longest] = gathered
            own = keys, values
        self._layers[caches[0].data_ptr()] = self._pass, own, shared
        return Held((own[0][:, :, :longest], own[1][:, :, :longest]), valid, self._siblings, shared)

    def _look_at(self, slots: Tensor, rows: Tensor, lengths: Tensor, key_size: int) -> None:
        """Decide at the first layer of a pass whether the layers of the last one can be used."""
        self._seen = True
        self._lasts = torch.equal(self._rows, rows) and torch.equal(self._lengths + 1, lengths)
        if self._lasts:
            self._measure(slots, lengths)
        if not self._lasts or self._valid.shape[1] > self._room:
            self._pass += 1
        if all(one[0] < self._pass - 1 for one in self._layers.values()):
            self._layers.clear()
            self._siblings = find_siblings(slots, lengths, key_size) if key_size else None
            self._measure(slots, lengths)
            longest = self._valid.shape[1]
            self._kept_elements, self._room = 0, longest + min(longest, _MOST_ROOM)
        self._rows, self._lengths = rows.clone(), lengths.clone()

    def _measure(self, slots: Tensor, lengths: Tensor) -> None:
        """Find where each sequence's newest token is, which is the same in all layers of a pass."""
        positions, longest = lengths.long() - 1, slots.shape[1]
        self._newest = slots.gather(1, positions[:, None])[:, 0]
        self._place = positions
        if self._siblings is not None:
            self._place = positions - self._siblings.starts
            longest = -(-(int(self._place.max()) + 1) // _KEYS) * _KEYS
        self._valid = torch.arange(longest) <= self._place[:, None]

    def _own(self, slots: Tensor) -> Tensor:
        """The slots [B, S] of each sequence's own tokens, from those of all its tokens."""
        if self._siblings is None:
            return slots
        positions = self._siblings.starts[:, None] + torch.arange(self._valid.shape[1])
        return slots.gather(1, positions.clamp_(max=slots.shape[1] - 1)).masked_fill_(~self._valid, 0)


def _gather_cache(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, heads, S, head] from a cache [slots, heads, head] and `slots` [B, S]."""
    # `cache[slots]` gives the same, and takes longer.
    return cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:]).transpose(1, 2).to(dtype)


def _contiguous(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].contiguous(), pair[1].contiguous()


def _gather(caches: tuple[Tensor, Tensor], slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _gather_cache(caches[0], slots, dtype), _gather_cache(caches[1], slots, dtype)


def batched_decode(
    one_by_one: Callable[..., Tensor], places: Places, running: Running, *, exact: Callable[[], bool]
) -> Callable[..., Tensor]:
    """The backend's decode (one new token for each of B sequences) in one attention call.

    `places` and `running` are told when a forward pass begins. `exact`: whether a sequence's bits must not depend on
    the others of its batch.
    """

    def decode(
        self: Any,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        if causal or not _is_plain(encoder_lens, is_cross_attn, sliding_window_size):
            return one_by_one(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        longest = -(-int(seq_lens.max()) // _KEYS) * _KEYS
        at_once = max(1, _MAX_GATHERED // (longest * k_cache.shape[1:].numel()))
        for part in map(slice, range(0, len(seq_lens), at_once), range(at_once, len(seq_lens) + at_once, at_once)):
            valid, slots = places.of(part, req_to_token, req_pool_indices, seq_lens, longest)
            caches, fast = (k_cache, v_cache), query.dtype == torch.float32 and not exact()
            if at_once >= len(seq_lens):
                held = running.of(caches, slots, req_pool_indices, seq_lens, query.dtype, share=fast)
            else:
                held = Held(_gather(caches, slots, query.dtype), valid)
            if fast:
                output[part] = held.attend(query[part], scaling)
                continue
            attended = scaled_dot_product_attention(
                query[part, :, None],
                *held.own,
                attn_mask=held.valid[:, None, None, :],
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            output[part] = attended[:, :, 0]
        return output

    return decode


def batched_extend(
    one_by_one: Callable[..., Tensor], places: Places, *, exact: Callable[[], bool]
) -> Callable[..., Tensor]:
    """The backend's extend (B prompts, each with or without a cached prefix) in one attention call.

    `places` is told when a forward pass begins. `exact`: whether each prompt is to be computed by itself.
    """

    def extend(
        self: Any,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        batch = seq_lens.shape[0]
        longest_query, longest_key = int(extend_seq_lens.max()), int(seq_lens.max())
        padded_pairs = batch * longest_query * longest_key
        useful_pairs = int((extend_seq_lens.long() * seq_lens.long()).sum())
        if (
            batch == 1
            or exact()
            or not causal
            or not _is_plain(encoder_lens, is_cross_attn, sliding_window_size)
            or batch * longest_key * k_cache.shape[1:].numel() > _MAX_GATHERED
            or padded_pairs > min(_MAX_PAIRS, _MAX_WASTE * useful_pairs)
        ):
            return one_by_one(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa, causal,
                is_cross_attn, sliding_window_size,
            )  # fmt: skip
        valid_key, slots = places.of(slice(0, batch), req_to_token, req_pool_indices, seq_lens, longest_key)
        query_index = torch.arange(longest_query)
        valid_query = query_index < extend_seq_lens[:, None]  # [B, Q]
        position = extend_prefix_lens[:, None] + query_index  # [B, Q] position of each query in its sequence
        # A padded query sees at least key 0, so that no row is masked entirely (its softmax would be NaN).
        visible = torch.arange(longest_key) <= position[:, :, None]
        visible &= valid_key[:, None, :]
        queries = query.new_zeros((batch, longest_query, *query.shape[1:]))
        queries[valid_query] = query
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2),
            *_gather((k_cache, v_cache), slots, query.dtype),
            attn_mask=visible[:, None],
            scale=scaling,
            enable_gqa=enable_gqa,
        )
        output.copy_(attended.transpose(1, 2)[valid_query])
        return output

    return extend
