"""The samples of a group have the same prompt: it is computed once, and its keys and values are read once.

SGLang's prefix cache keeps a prompt once, but computes it for each of the samples that arrive together, and attention
reads it for each of them. On a CPU, decoding is limited by reading keys and values from memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: sequences have at least so many tokens in common, or are not looked at together
_LEAST = 16
#: keys (or values) of a layer that need not be read, so that the additional operators pay (1 MiB in float32)
_WORTH = 2**18
#: rows of queries, filled up to those of the largest group, for each sequence
_MAX_FILLED = 2

#: prompt tokens that must be saved for requests to wait: the additional forward pass costs as much as some hundred
_LEAST_SAVED = 256
#: answers of at most so many tokens are not kept in the cache: to add one takes longer than to compute it again
_NOT_KEPT = 16
#: a first request that has been out of the queue for so many calls without a token was aborted: nobody waits for it
_PATIENCE = 3


@dataclass(frozen=True)
class Siblings:
    """The B sequences of a batch in N groups of at most M, each with P or fewer tokens in common.

    Attributes:
        slots: [N, P] places of the common tokens in the cache; 0 where a group has fewer.
        valid: [N, P] which of them exist.
        starts: [B] the number of common tokens of each sequence.
        members: [N * M] the sequence at each place of the groups; any where a group has fewer.
        seats: [B] the place of each sequence.
    """

    slots: Tensor
    valid: Tensor
    starts: Tensor
    members: Tensor
    seats: Tensor


def find_siblings(slots: Tensor, lengths: Tensor, key_size: int) -> Siblings | None:
    """The siblings among sequences, or None if there are too few to be worth it.

    Args:
        slots: [B, S] the places of all tokens of each sequence; only common tokens have the same.
        lengths: [B] tokens of each sequence.
        key_size: Elements of a token's keys in one layer.
    """
    table, length = slots.numpy(), lengths.numpy()
    count, longest = table.shape
    if count < 2:
        return None
    # Sorted as bytes, sequences that begin alike are neighbours.
    order = np.argsort(np.ascontiguousarray(table).view(f"V{table.itemsize * longest}")[:, 0], kind="stable")
    alike = table[order[1:]] == table[order[:-1]]
    common = np.where(alike.all(1), longest, alike.argmin(1))  # [B - 1] of each with the next
    # Two neighbours with much less in common than either has with its other one belong to two prompts.
    beside = np.maximum(np.append(common[1:], 0), np.insert(common[:-1], 0, 0))
    joined = (common >= _LEAST) & (2 * common >= beside)
    group = np.insert(np.cumsum(~joined), 0, 0)  # [B] of the sorted sequences
    sizes = np.bincount(group)
    groups, most = len(sizes), int(sizes.max())
    shared = np.full(groups, longest)
    np.minimum.at(shared, group[1:][joined], common[joined])
    longest_shared = int(shared[sizes > 1].max(initial=0))
    saved = int((shared * (sizes - 1))[sizes > 1].sum()) * key_size
    if saved < _WORTH or groups * most > _MAX_FILLED * count:
        return None
    # One that is alone needs no place for its tokens elsewhere; the newest is its own.
    firsts = np.searchsorted(group, np.arange(groups))
    shared = np.where(sizes > 1, shared, np.minimum(length[order[firsts]] - 1, longest_shared))
    valid = np.arange(longest_shared) < shared[:, None]
    seat = group * most + np.arange(count) - firsts[group]
    members, seats, starts = np.zeros(groups * most, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    members[seat], seats[order], starts[order] = order, seat, shared[group]
    common_slots = np.where(valid, table[order[firsts], :longest_shared], 0)
    return Siblings(*map(torch.from_numpy, (common_slots, valid, starts, members, seats)))


def attend_siblings(
    siblings: Siblings, query: Tensor, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], valid: Tensor
) -> Tensor:
    """Attention of scaled queries to common and own tokens.

    Args:
        siblings: Who belongs to whom.
        query: [B, key heads, queries of a key head, head].
        shared: Keys and values [N, key heads, P, head] of the common tokens.
        own: Keys and values [B, key heads, S, head] of the others.
        valid: [B, S] which of the others exist.

    Returns:
        As `query`.
    """
    groups, tokens = siblings.valid.shape

    def gather(rows: Tensor) -> Tensor:
        """[B, heads, queries, X] to [N, heads, M * queries, X]."""
        members = rows.index_select(0, siblings.members).view(groups, -1, *rows.shape[1:])
        return members.transpose(1, 2).flatten(2, 3)

    def scatter(rows: Tensor) -> Tensor:
        """The way back."""
        members = rows.view(*rows.shape[:2], -1, *query.shape[2:3], rows.shape[3]).transpose(1, 2).flatten(0, 1)
        return members.index_select(0, siblings.seats)

    scores_of_shared = torch.matmul(gather(query), shared[0].transpose(-1, -2))
    scores_of_shared.masked_fill_(~siblings.valid[:, None, None], -torch.inf)
    scores_of_own = torch.matmul(query, own[0].transpose(-1, -2)).masked_fill_(~valid[:, None, None], -torch.inf)
    weights = torch.cat((scatter(scores_of_shared), scores_of_own), -1).softmax(-1)
    of_shared = torch.matmul(gather(weights[..., :tokens]), shared[1])
    return torch.matmul(weights[..., tokens:], own[1]).add_(scatter(of_shared))


class Firsts:
    """Of waiting requests with the same prompt, one is computed first; the others then find the prompt in the cache.

    SGLang computes the prompts of all requests that wait at the same time, also equal ones: eight times for a group of
    eight.
    """

    def __init__(self) -> None:
        self._calls = 0
        #: prompt -> the request that is computed first, and the number of the last call that had reason to expect it
        self._first: dict[Hashable, tuple[Any, int]] = {}

    def divide(self, waiting: Sequence[Any], in_chunks: Any) -> tuple[list[Any], list[Any]]:
        """The requests that may be computed now, and those that have to wait for the first of their prompt.

        Args:
            waiting: Requests of SGLang (`Req`), in the order in which they are computed.
            in_chunks: The request of which a part of the prompt is computed, if there is one.
        """
        self._calls += 1
        self._first = {key: one for key, one in self._first.items() if self._calls - one[1] <= _PATIENCE}
        now: list[Any] = []
        later: list[Any] = []
        for request in waiting:
            if not _can_use_cache(request):
                now.append(request)
                continue
            key = _prompt(request)
            first, _ = self._first.get(key, (request, 0))
            if first is request or first is in_chunks or first.output_ids:
                self._first[key] = first, self._calls
            (now if first is request or first.output_ids else later).append(request)
        if sum(len(request.origin_input_ids) - 1 for request in later) < _LEAST_SAVED:
            return list(waiting), []
        return now, later


def _can_use_cache(request: Any) -> bool:
    """Whether the whole prompt can come from the cache. A request that has begun to answer is like no other."""
    # Where only log-probs of the answer are asked for, SGLang sets the start to the length of the prompt. The
    # last token never comes from the cache.
    wants_prompt = request.return_logprob and 0 <= request.logprob_start_len < len(request.origin_input_ids) - 1
    return not (request.output_ids or wants_prompt or request.positional_embed_overrides is not None)


def _prompt(request: Any) -> Hashable:
    if (key := getattr(request, "slime_prompt", None)) is None:
        digest = hashlib.blake2b(request.origin_input_ids.tobytes(), digest_size=16).digest()
        key = request.slime_prompt = digest, request.extra_key, request.cache_salt
    return key


def prompts_once(
    original: Callable[..., tuple[Any, Any]], firsts: Firsts, *, shared: Callable[[], bool]
) -> Callable[..., tuple[Any, Any]]:
    """`Scheduler._get_new_batch_prefill_raw`, which chooses the prompts of the next pass among the waiting requests.

    Args:
        original: SGLang's own.
        firsts: Who waits for whom.
        shared: Whether there is a prefix cache, and requests are computed in the order in which they came.
    """

    def choose(self: Any, prefill_delayer_single_pass: Any, running_batch: Any) -> tuple[Any, Any]:
        everything, idle = self.waiting_queue, running_batch.is_empty()
        if not everything or not shared() or (running_batch.batch_is_full and not idle):
            return original(self, prefill_delayer_single_pass, running_batch)
        # One that waits keeps its place: otherwise there would be room for one sample of each of many prompts, and the
        # samples of a prompt would neither run at the same time nor end together.
        room = self.get_num_allocatable_reqs(len(running_batch.reqs), running_batch=running_batch)
        now, later = firsts.divide(everything[: max(0, room)], self.chunked_req)
        if not later or (idle and not now):  # nothing runs that anybody could wait for
            return original(self, prefill_delayer_single_pass, running_batch)
        self.waiting_queue = now
        try:
            return original(self, prefill_delayer_single_pass, running_batch)
        finally:
            taken = set(map(id, now)) - set(map(id, self.waiting_queue))
            arrived = self.waiting_queue[len(now) - len(taken) :]
            self.waiting_queue = [request for request in everything if id(request) not in taken] + arrived

    return choose


def keep_out_short_answers(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """`Scheduler._get_new_batch_prefill_raw`, marking requests that SGLang need not add to the cache.

    They are those whose prompt was found in the cache, and whose answer will be short.
    """

    def choose(self: Any, prefill_delayer_single_pass: Any, running_batch: Any) -> tuple[Any, Any]:
        batch, running = original(self, prefill_delayer_single_pass, running_batch)
        for request in () if batch is None else batch.reqs:
            found = not request.output_ids and request.prefix_len >= len(request.origin_input_ids) - 1
            if found and request.sampling_params.max_new_tokens <= _NOT_KEPT:
                request.skip_radix_cache_insert = True
        return batch, running

    return choose
