"""Attention that reads common tokens once equals attention of each sequence; equal prompts are computed once."""

from __future__ import annotations

from array import array
from dataclasses import InitVar, dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime_cpu import sglang_siblings
from slime_cpu.sglang_attention import Places, Running, batched_decode
from slime_cpu.sglang_siblings import Firsts, find_siblings, keep_out_short_answers, prompts_once

HEADS, KV_HEADS, HEAD, ROWS, WIDTH = 4, 2, 8, 40, 400


@pytest.fixture(autouse=True)
def every_saving_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_siblings, "_WORTH", 1)


@dataclass
class Engine:
    """The table of slots and a cache of two layers, for sequences given as (name of the prompt, its tokens, others)."""

    table: Tensor
    rows: Tensor
    lengths: Tensor
    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, sequences: list[tuple[str, int, int]], begins: dict[str, tuple[str, int]] | None = None) -> Engine:
        """`begins`: prompt -> the prompt that it begins like, and for how many tokens."""
        generator = torch.Generator().manual_seed(0)
        slots = iter((torch.randperm(ROWS * WIDTH * 2, generator=generator) + 1).tolist())
        prompts: dict[str, list[int]] = {}
        table = torch.full((ROWS, WIDTH), 10**6, dtype=torch.int32)  # garbage after the end
        rows = torch.randperm(ROWS, generator=generator)[: len(sequences)]
        for row, (name, tokens, others) in zip(rows, sequences, strict=True):
            like, count = (begins or {}).get(name, ("", 0))
            prompt = prompts.setdefault(name, prompts.get(like, [])[:count])
            prompt += [next(slots) for _ in range(tokens - len(prompt))]
            table[row, : tokens + others] = torch.tensor(prompt[:tokens] + [next(slots) for _ in range(others)])
        size = ROWS * WIDTH * 2 + 1
        layers = [
            (
                torch.randn(size, KV_HEADS, HEAD, generator=generator),
                torch.randn(size, KV_HEADS, HEAD, generator=generator),
            )
            for _ in range(2)
        ]
        return cls(table, rows, torch.tensor([tokens + others for _, tokens, others in sequences]), layers)

    def slots(self) -> Tensor:
        """[B, S], 0 after the end."""
        longest = int(self.lengths.max()) + 3
        return self.table[self.rows, :longest].long().masked_fill(torch.arange(longest) >= self.lengths[:, None], 0)

    def groups(self) -> set[tuple[int, ...]] | None:
        """Which sequences are looked at together."""
        found = find_siblings(self.slots(), self.lengths, KV_HEADS * HEAD)
        if found is None:
            return None
        count = len(found.valid)
        most = len(found.members) // count
        seated: dict[int, list[int]] = {}
        for sequence, seat in enumerate(found.seats.tolist()):
            assert found.members[seat] == sequence
            seated.setdefault(seat // most, []).append(sequence)
        return {tuple(members) for members in seated.values()}

    def decode(self, running: Running) -> None:
        """One pass; each sequence's attention is compared with its own alone."""
        generator = torch.Generator().manual_seed(int(self.lengths.sum()))
        decode = batched_decode(lambda *_: pytest.fail("one by one"), Places(), running, exact=lambda: False)
        running.begin(decoding=True)
        for keys, values in self.layers:
            query = torch.randn(len(self.rows), HEADS, HEAD, generator=generator)
            arguments = keys, values, self.table, self.rows, self.lengths
            found = decode(None, query, torch.empty_like(query), *arguments, scaling=0.3, enable_gqa=True)
            for i, (row, length) in enumerate(zip(self.rows.tolist(), self.lengths.tolist(), strict=True)):
                mine = self.table[row, :length].long()
                own = keys[mine].transpose(0, 1), values[mine].transpose(0, 1)
                alone = scaled_dot_product_attention(query[i, :, None], *own, scale=0.3, enable_gqa=True)[:, 0]
                torch.testing.assert_close(found[i], alone, atol=1e-5, rtol=1e-5)

    def grow(self) -> None:
        """Each sequence gets a token."""
        self.table[self.rows, self.lengths] = torch.randperm(ROWS * WIDTH * 2)[: len(self.rows)].int() + 1
        self.lengths = self.lengths + 1


#: name -> the sequences, which of them belong together, and how prompts begin
CASES = {
    "groups of one prompt each": (
        [("a", 20, 3), ("b", 30, 1), ("a", 20, 5), ("b", 30, 9), ("a", 20, 1), ("b", 30, 2)],
        {(0, 2, 4), (1, 3, 5)},
        {},
    ),
    "one that is alone": ([("a", 20, 3), ("b", 50, 1), ("a", 20, 5)], {(0, 2), (1,)}, {}),
    "one that is alone and short": ([("a", 20, 3), ("b", 1, 1), ("a", 20, 5)], {(0, 2), (1,)}, {}),
    "prompts of one template": (
        [("a", 100, 3), ("b", 100, 1), ("a", 100, 5), ("b", 100, 9)],
        {(0, 2), (1, 3)},
        {"b": ("a", 30)},
    ),
    "prompts that hardly differ": (
        [("a", 100, 3), ("b", 100, 1), ("a", 100, 5), ("b", 100, 9)],
        {(0, 1, 2, 3)},
        {"b": ("a", 90)},
    ),
    "too short to be worth it": ([("a", 15, 3), ("a", 15, 5)], None, {}),
    "one group among many alone": ([*[("a", 20, 1)] * 6, *[(str(i), 20, 1) for i in range(20)]], None, {}),
    "nothing in common": ([("a", 20, 3), ("b", 20, 5)], None, {}),
    "one sequence": ([("a", 20, 3)], None, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sequences_that_begin_alike(case: str) -> None:
    sequences, groups, begins = CASES[case]
    engine = Engine.of(sequences, begins)
    assert engine.groups() == groups
    running = Running()
    for _ in range(100):  # more than there is room for
        engine.decode(running)
        engine.grow()
    engine.rows, engine.lengths = engine.rows[1:], engine.lengths[1:]  # one has ended
    if len(engine.rows):
        engine.decode(running)


@pytest.mark.parametrize(("others", "room"), [(1, 16 + 16), (100, 112 + 64)])
def test_common_tokens_are_held_once(others: int, room: int) -> None:
    """`room`: own tokens, in sixteens, and as many again, but at most 64."""
    engine = Engine.of([("a", 128, others)] * 8)
    running = Running()
    engine.decode(running)
    assert running._kept_elements == 0  # the batch may be another one in the next pass
    engine.grow()
    engine.decode(running)
    common = 128 * 2
    own = 8 * room * 2
    assert running._kept_elements == len(engine.layers) * (common + own) * KV_HEADS * HEAD


def test_a_small_saving_is_not_worth_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.of([("a", 20, 3), ("a", 20, 5), ("a", 20, 5)])
    saved = 2 * 20 * KV_HEADS * HEAD
    monkeypatch.setattr(sglang_siblings, "_WORTH", saved)
    assert engine.groups() is not None
    monkeypatch.setattr(sglang_siblings, "_WORTH", saved + 1)
    assert engine.groups() is None


@dataclass(eq=False)
class Waiting:
    """A request as SGLang's scheduler has it."""

    prompt: InitVar[list[int]]
    output_ids: list[int] = field(default_factory=list)
    extra_key: str | None = None
    cache_salt: str | None = None
    return_logprob: bool = True
    #: None: as SGLang sets it where log-probs of the answer, but none of the prompt, are asked for
    logprob_start_len: int | None = None
    positional_embed_overrides: object = None

    def __post_init__(self, prompt: list[int]) -> None:
        self.origin_input_ids = array("q", prompt)
        if self.logprob_start_len is None:
            self.logprob_start_len = len(prompt) if self.return_logprob else -1


@dataclass
class Scheduler:
    """What is needed of SGLang's: each call computes the prompts of the first requests that wait, at most `most`."""

    waiting_queue: list[Waiting]
    most: int = 100
    chunked_req: Waiting | None = None
    room: int = 100

    def get_num_allocatable_reqs(self, running: int, running_batch: Batch) -> int:
        assert running == len(running_batch)
        return self.room - running

    def choose(self, _delayer: None, running: Batch) -> tuple[list[Waiting] | None, Batch]:
        batch = self.waiting_queue[: self.most]
        self.waiting_queue = self.waiting_queue[self.most :]
        return batch or None, running


class Batch(list[Waiting]):
    batch_is_full = False

    @property
    def reqs(self) -> list[Waiting]:
        return self

    def is_empty(self) -> bool:
        return not self


def group(prompt: int, size: int = 8, tokens: int = 100) -> list[Waiting]:
    return [Waiting([prompt] * tokens) for _ in range(size)]


def test_the_first_of_each_prompt_is_computed_before_the_others() -> None:
    first, second = group(1), group(2)
    scheduler, running = Scheduler([*first, *second]), Batch()
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: True)
    assert choose(scheduler, None, running)[0] == [first[0], second[0]]
    assert scheduler.waiting_queue == [*first[1:], *second[1:]]
    running.extend(
        (first[0], second[0])
    )  # SGLang chooses the next batch before it looks at the answers of the last one
    assert choose(scheduler, None, running)[0] is None
    first[0].output_ids.append(5)
    assert choose(scheduler, None, running)[0] == first[1:]
    assert scheduler.waiting_queue == second[1:]
    second[0].output_ids.append(5)
    assert choose(scheduler, None, running)[0] == second[1:]


def test_requests_without_log_probs_of_their_prompt_wait() -> None:
    waiting = [Waiting([1] * 100, logprob_start_len=99) for _ in range(8)]
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: True)
    assert choose(Scheduler(list(waiting)), None, Batch())[0] == waiting[:1]


def test_requests_keep_their_order_and_none_is_lost() -> None:
    first, second, other = group(1), group(2), group(3, size=1)
    scheduler = Scheduler([*first[:4], *second, *first[4:], *other], most=2)
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: True)
    assert choose(scheduler, None, Batch())[0] == [first[0], second[0]]
    assert scheduler.waiting_queue == [*first[1:4], *second[1:], *first[4:], *other]
    assert choose(scheduler, None, Batch([first[0]]))[0] == other


def test_nobody_waits_for_a_request_that_is_gone() -> None:
    first = group(1)
    scheduler, firsts = Scheduler(list(first)), Firsts()
    choose = prompts_once(Scheduler.choose, firsts, shared=lambda: True)
    other = Batch([Waiting([9])])
    assert choose(scheduler, None, other)[0] == first[:1]  # and then it is aborted
    assert choose(scheduler, None, Batch())[0] == first[1:]  # nothing runs

    scheduler = Scheduler(group(2))
    choose(scheduler, None, other)
    waiting = list(scheduler.waiting_queue)
    found = [choose(scheduler, None, other)[0] for _ in range(4)]
    assert [one for one in found if one] == [[waiting[0]]]  # the next is the first, after some calls
    assert found[:3] == [None] * 3


def test_others_wait_for_a_prompt_that_is_computed_in_chunks() -> None:
    first = group(1)
    scheduler = Scheduler(list(first))
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: True)
    assert choose(scheduler, None, Batch())[0] == first[:1]
    scheduler.chunked_req = first[0]
    busy = Batch([first[0]])
    assert [choose(scheduler, None, busy)[0] for _ in range(20)] == [None] * 20
    scheduler.chunked_req = None
    first[0].output_ids.append(5)
    assert choose(scheduler, None, busy)[0] == first[1:]


@pytest.mark.parametrize(
    "waiting",
    [
        group(1, tokens=30),  # too little to save
        [Waiting([1] * 100, extra_key=str(i)) for i in range(8)],
        [Waiting([1] * 100, cache_salt=str(i)) for i in range(8)],
        [Waiting([1] * 100, output_ids=[i]) for i in range(8)],  # answers that were interrupted
        [Waiting([1] * 100, logprob_start_len=98) for _ in range(8)],  # log-probs of the prompt are not in the cache
        [Waiting([1] * 100, positional_embed_overrides=object()) for _ in range(8)],
    ],
    ids=["short", "keys", "salts", "interrupted", "log-probs", "embeddings"],
)
def test_requests_that_do_not_wait(waiting: list[Waiting]) -> None:
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: True)
    assert choose(Scheduler(list(waiting)), None, Batch())[0] == waiting


@pytest.mark.parametrize(
    ("new_tokens", "in_cache", "output_ids", "left_out"),
    [(16, 99, [], True), (17, 99, [], False), (16, 98, [], False), (16, 99, [5], False)],
    ids=["short", "longer", "prompt not found", "interrupted"],
)
def test_short_answers_to_known_prompts_are_not_kept(
    new_tokens: int, in_cache: int, output_ids: list[int], left_out: bool
) -> None:
    request = SimpleNamespace(
        origin_input_ids=[1] * 100,
        output_ids=output_ids,
        prefix_len=in_cache,
        sampling_params=SimpleNamespace(max_new_tokens=new_tokens),
        skip_radix_cache_insert=False,
    )
    batch = SimpleNamespace(reqs=[request])
    assert keep_out_short_answers(lambda *_: (batch, "running"))(None, None, None) == (batch, "running")
    assert request.skip_radix_cache_insert == left_out
    assert keep_out_short_answers(lambda *_: (None, "running"))(None, None, None) == (None, "running")


def test_samples_of_a_prompt_run_together_where_room_is_scarce() -> None:
    first, second = group(1), group(2)
    scheduler, running = Scheduler([*first, *second], room=8), Batch()
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: True)
    assert choose(scheduler, None, running)[0] == first[:1]
    running.append(first[0])
    assert choose(scheduler, None, running)[0] is None  # the room is the others', not the second prompt's
    first[0].output_ids.append(5)
    scheduler.most = 7
    assert choose(scheduler, None, running)[0] == first[1:]
    assert scheduler.waiting_queue == second


def test_nothing_waits_for_a_first_one_where_there_is_less_than_no_room() -> None:
    first = group(1)
    scheduler = Scheduler(list(first), room=-3)
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: True)
    assert choose(scheduler, None, Batch())[0] == first  # SGLang's own rules decide


def test_a_prompt_that_was_computed_is_known_as_long_as_somebody_waits_for_room() -> None:
    first = group(1, size=30)
    scheduler, running = Scheduler(list(first), room=15), Batch()
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: True)
    assert choose(scheduler, None, running)[0] == first[:1]
    first[0].output_ids.append(5)
    scheduler.most = 0
    for _ in range(10):
        choose(scheduler, None, Batch(first[:1]))
    scheduler.most = 14
    assert choose(scheduler, None, Batch(first[:1]))[0] == first[1:15]


def test_a_full_batch_looks_at_no_request() -> None:
    scheduler, firsts, full = Scheduler(group(1), most=0), Firsts(), Batch([Waiting([9])])
    full.batch_is_full = True
    assert prompts_once(Scheduler.choose, firsts, shared=lambda: True)(scheduler, None, full)[0] is None
    assert len(scheduler.waiting_queue) == 8 and firsts._calls == 0


def test_without_a_prefix_cache_nobody_waits() -> None:
    waiting = group(1)
    choose = prompts_once(Scheduler.choose, Firsts(), shared=lambda: False)
    assert choose(Scheduler(list(waiting)), None, Batch())[0] == waiting
