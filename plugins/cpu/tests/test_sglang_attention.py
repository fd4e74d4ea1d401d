"""Attention over a whole batch in one call equals attention over each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime_cpu import sglang_attention
from slime_cpu.sglang_attention import Places, Running, batched_decode, batched_extend
from slime_cpu.sglang_patches import padded

HEADS, KV_HEADS, HEAD = 4, 2, 8


@dataclass
class Cache:
    """A paged cache with sequences of the given lengths, scattered over its slots."""

    keys: Tensor
    values: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor

    @classmethod
    def of(cls, lengths: list[int]) -> Cache:
        generator = torch.Generator().manual_seed(0)
        total = sum(lengths)
        slots = torch.randperm(total, generator=generator) + 1  # slot 0 is unused
        table = torch.full((len(lengths) + 3, max(lengths) + 5), 10**6, dtype=torch.int32)  # garbage after the end
        rows = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)]
        for row, length, mine in zip(rows, lengths, slots.split(lengths), strict=True):
            table[row, :length] = mine.int()
        keys, values = (torch.randn(total + 1, KV_HEADS, HEAD, generator=generator) for _ in range(2))
        return cls(keys, values, table, rows, torch.tensor(lengths))

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV_HEADS, S, HEAD] of one sequence."""
        slots = self.req_to_token[self.req_pool_indices[index], : self.seq_lens[index]].long()
        return self.keys[slots].transpose(0, 1), self.values[slots].transpose(0, 1)

    def arguments(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.req_to_token, self.req_pool_indices, self.seq_lens


def decoder(running: Running | None = None, *, exact: bool = True, instead: Any = None) -> Callable[..., Tensor]:
    return batched_decode(instead or refuse, Places(), running or Running(), exact=lambda: exact)


def refuse(*_args: Any, **_kwargs: Any) -> Tensor:
    pytest.fail("fell back to one call per sequence")


def test_decoding_ragged_sequences() -> None:
    cache = Cache.of([5, 1, 17, 9])
    query = torch.randn(4, HEADS, HEAD, generator=torch.Generator().manual_seed(1))
    output = torch.empty_like(query)
    decoder()(None, query, output, *cache.arguments(), scaling=0.3, enable_gqa=True)
    for i in range(4):
        keys, values = cache.sequence(i)
        alone = scaled_dot_product_attention(query[i, :, None], keys, values, scale=0.3, enable_gqa=True)[:, 0]
        torch.testing.assert_close(output[i], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("prefixes", "news"),
    [([0, 0, 0], [4, 4, 4]), ([0, 0, 0, 0], [3, 7, 5, 6]), ([6, 0, 3], [2, 8, 5])],
    ids=["equal", "ragged", "after-cached-prefixes"],
)
def test_extending_prompts(prefixes: list[int], news: list[int]) -> None:
    cache = Cache.of([p + n for p, n in zip(prefixes, news, strict=True)])
    query = torch.randn(sum(news), HEADS, HEAD, generator=torch.Generator().manual_seed(1))
    output = torch.full_like(query, float("nan"))
    extend = batched_extend(refuse, Places(), exact=lambda: False)
    extend(
        None, query, output, *cache.arguments(), torch.tensor(prefixes), torch.tensor(news),
        scaling=0.3, enable_gqa=True, causal=True,
    )  # fmt: skip
    start = 0
    for i, (prefix, new) in enumerate(zip(prefixes, news, strict=True)):
        keys, values = cache.sequence(i)
        visible = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix)
        mine = query[start : start + new].transpose(0, 1)
        alone = scaled_dot_product_attention(mine, keys, values, attn_mask=visible, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(output[start : start + new], alone.transpose(0, 1), atol=1e-6, rtol=1e-6)
        start += new


def test_layers_share_the_places_until_the_next_forward_pass() -> None:
    places, running = Places(), Running()
    decoding = batched_decode(refuse, places, running, exact=lambda: True)
    before, after = Cache.of([5, 1, 17, 9]), Cache.of([6, 2, 18, 10])
    query = torch.randn(4, HEADS, HEAD, generator=torch.Generator().manual_seed(1))

    def layer(cache: Cache, other_table: Tensor | None = None) -> Tensor:
        keys, values, table, rows, lengths = cache.arguments()
        arguments = keys, values, table if other_table is None else other_table, rows, lengths
        return decoding(None, query, torch.empty_like(query), *arguments, enable_gqa=True)

    first = layer(before)
    assert torch.equal(layer(before, torch.zeros_like(before.req_to_token)), first)  # the table is not read again
    places.forget()
    running.begin(decoding=False)
    alone = decoder()(None, query, torch.empty_like(query), *after.arguments(), enable_gqa=True)
    assert torch.equal(layer(after), alone)


class Recorder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_args: Any, **_kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.empty(0)


def decode(cache: Cache, fallback: Callable[..., Tensor], **options: Any) -> None:
    query = torch.randn(len(cache.seq_lens), HEADS, HEAD)
    decoder(instead=fallback)(None, query, torch.empty_like(query), *cache.arguments(), enable_gqa=True, **options)


def extend(cache: Cache, fallback: Callable[..., Tensor], *, exact: bool = False, **options: Any) -> None:
    lengths = cache.seq_lens
    query = torch.randn(int(lengths.sum()), HEADS, HEAD)
    batched_extend(fallback, Places(), exact=lambda: exact)(
        None, query, torch.empty_like(query), *cache.arguments(), torch.zeros_like(lengths), lengths,
        enable_gqa=True, **{"causal": True, **options},
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"sliding_window_size": 4}, {"is_cross_attn": True}, {"encoder_lens": torch.tensor([1, 1])}]
)
def test_other_cases_use_the_original(options: dict[str, Any]) -> None:
    for run in (decode, extend):
        original = Recorder()
        run(Cache.of([3, 4]), original, **options)
        assert original.calls == 1


def test_prompts_of_very_different_lengths_are_not_padded() -> None:
    original = Recorder()
    extend(Cache.of([2, 2, 2, 100]), original)
    assert original.calls == 1


def test_prompt_batches_too_large_to_gather_use_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_attention, "_MAX_GATHERED", 3 * 4 * KV_HEADS * HEAD - 1)
    original = Recorder()
    extend(Cache.of([4, 4, 4]), original)
    assert original.calls == 1
    extend(Cache.of([3, 3, 3]), refuse)


def test_exact_prompts_use_the_original() -> None:
    original = Recorder()
    extend(Cache.of([4, 4]), original, exact=True)
    assert original.calls == 1


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("most_kept", [2**28, 0])
def test_keys_kept_from_pass_to_pass_are_those_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, exact: bool, most_kept: int
) -> None:
    """Many tokens are decoded; sequences end, come and are computed anew meanwhile, also at the places of others."""
    monkeypatch.setattr(sglang_attention, "_MAX_KEPT", most_kept)
    generator = torch.Generator().manual_seed(2)
    lengths = [3, 60, 31, 14]
    table = torch.arange(1, 8 * 256 + 1, dtype=torch.int32).view(8, 256)
    layers = [[torch.randn(8 * 256 + 1, KV_HEADS, HEAD, generator=generator) for _ in "kv"] for _ in range(2)]
    rows, running = torch.tensor([6, 1, 4, 3]), Running()
    for step in range(120):
        if step in (40, 41, 90):  # a prompt is computed, at a row that was another's, and whatever it wrote to is new
            rows, lengths = (rows.roll(1), lengths[-1:] + lengths[:-1]) if step != 90 else (rows[:3], lengths[:3])
            running.begin(decoding=False)
            for keys, values in layers:
                keys.add_(1.0)
                values.add_(1.0)
        if step == 70:  # one has ended
            rows, lengths = rows[1:], lengths[1:]
        lengths = [length + 1 for length in lengths]
        here = torch.tensor(lengths)
        running.begin(decoding=True)
        for keys, values in layers:
            for row, length in zip(rows.tolist(), lengths, strict=True):  # the new token
                slot = int(table[row, length - 1])
                keys[slot], values[slot] = (torch.randn(KV_HEADS, HEAD, generator=generator) for _ in "kv")
            query = torch.randn(len(lengths), HEADS, HEAD, generator=generator)
            arguments = query, keys, values, table, rows, here
            kept, fresh = (
                decoder(one, exact=exact)(None, arguments[0], torch.empty_like(query), *arguments[1:], enable_gqa=True)
                for one in (running, Running())
            )
            assert torch.equal(kept, fresh), step
            for i, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
                of = table[row, :length].long()
                expected = scaled_dot_product_attention(
                    query[i][:, None], keys[of].transpose(0, 1), values[of].transpose(0, 1), enable_gqa=True
                )
                assert torch.allclose(kept[i], expected[:, 0], atol=1e-5), step


def test_layers_with_the_same_cache_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers: list[int] = []
    gather = sglang_attention._gather
    monkeypatch.setattr(sglang_attention, "_gather", lambda *of: gathers.append(0) or gather(*of))
    generator = torch.Generator().manual_seed(2)
    table = torch.arange(1, 65, dtype=torch.int32).view(1, 64)
    keys, values = (torch.randn(65, KV_HEADS, HEAD, generator=generator) for _ in "kv")
    running, rows = Running(), torch.tensor([0])
    for length in range(5, 9):
        gathers.clear()
        running.begin(decoding=True)
        for _ in range(2):
            query = torch.randn(1, HEADS, HEAD, generator=generator)
            arguments = query, keys, values, table, rows, torch.tensor([length])
            kept, fresh = (
                decoder(one, exact=False)(None, arguments[0], torch.empty_like(query), *arguments[1:], enable_gqa=True)
                for one in (running, Running())
            )
            assert torch.equal(kept, fresh)
    assert len(gathers) == 2, "those of the fresh ones"


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_decoding_gives_a_sequence_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    lengths = [1, 7, 15, 16, 17, 40, 200, 513]
    cache = Cache.of(lengths)
    query = torch.randn(len(lengths), HEADS, HEAD, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(sglang_attention, "_MAX_GATHERED", at_once * 528 * KV_HEADS * HEAD)
    together = decoder()(None, query, torch.empty_like(query), *cache.arguments(), enable_gqa=True)
    for i in range(len(lengths)):
        rows = cache.req_pool_indices[i : i + 1], cache.seq_lens[i : i + 1]
        arguments = cache.keys, cache.values, cache.req_to_token, *rows
        mine = query[i : i + 1]
        alone = decoder()(None, mine, torch.empty_like(mine), *arguments, enable_gqa=True)
        assert torch.equal(together[i], alone[0]), lengths[i]


@pytest.mark.parametrize("product", [torch.nn.functional.linear, lambda rows, weight: torch.matmul(rows, weight.T)])
def test_products_give_a_row_the_same_bits_among_any_others(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(70, 64, generator=generator), torch.randn(95, 64, generator=generator)
    multiply = padded(product)
    among_all = multiply(rows, weight)
    for count in range(1, 71):
        assert torch.equal(multiply(rows[:count], weight), among_all[:count]), count
    assert torch.equal(multiply(rows, weight), product(rows, weight))
