"""Log-probability and entropy against torch, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from tests.train.harness import RankLauncher, run_ranks
from torch import Tensor

from slime.train import output_layer
from slime.train.output_layer import log_probs_and_entropy

VOCAB, PADDED, ROWS = 50, 56, 24


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [ROWS, PADDED], targets, and weights of the two results in a scalar."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, PADDED, generator=generator) * 4
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    targets[:2] = torch.tensor([0, VOCAB - 1])
    return logits, targets, torch.randn(ROWS, generator=generator), torch.randn(ROWS, generator=generator)


def expected(temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets, a, b = inputs()
    logits = logits.double().requires_grad_()
    log_p = (logits[:, :VOCAB] / temperature).log_softmax(-1)
    log_probs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((log_probs * a).sum() + (entropy * b).sum()).backward()
    assert logits.grad is not None
    return log_probs.detach(), entropy.detach(), logits.grad


def ours(
    part: Tensor, temperature: float, group: torch.distributed.ProcessGroup | None, piece_elements: int
) -> tuple[Tensor, Tensor, Tensor]:
    _, targets, a, b = inputs()
    part = part.clone().requires_grad_()
    before = part.detach().clone()
    log_probs, entropy = log_probs_and_entropy(
        part,
        targets,
        temperature=temperature,
        vocab_size=VOCAB,
        group=group,
        piece_elements=piece_elements,
    )
    ((log_probs * a).sum() + (entropy * b).sum()).backward()
    assert torch.equal(part.detach(), before), "logits were modified"
    assert part.grad is not None
    return log_probs.detach(), entropy.detach(), part.grad


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one - other).abs().max() < 5e-6


@pytest.mark.parametrize("piece_elements", [1, 200, 1 << 24])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_log_softmax(temperature: float, piece_elements: int) -> None:
    assert_equal(ours(inputs()[0], temperature, None, piece_elements), expected(temperature))


def test_rows_are_worked_on_in_parts_that_keep_to_the_limit() -> None:
    def parts(limit: int) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in output_layer._pieces(10, 7, limit)]

    assert parts(27) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert parts(70) == [(0, 10)]
    assert parts(6) == [(row, row + 1) for row in range(10)], "one row at least"


def test_entropy_has_no_gradient_if_none_is_needed() -> None:
    logits, targets, a, _ = inputs()
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    log_probs, _ = log_probs_and_entropy(mine, targets, temperature=1.0, vocab_size=VOCAB)
    (log_probs * a).sum().backward()
    log_p = theirs[:, :VOCAB].log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    (log_p * a).sum().backward()
    assert mine.grad is not None and theirs.grad is not None
    assert (mine.grad - theirs.grad).abs().max() < 1e-6


def test_a_part_with_one_word_of_the_vocabulary_is_certain_of_it() -> None:
    logits = torch.tensor([[-3.0, 50.0, 50.0], [7.0, 50.0, 50.0]])  # the other columns are padding
    log_probs, entropy = log_probs_and_entropy(logits, torch.zeros(2, dtype=torch.long), temperature=0.5, vocab_size=1)
    assert log_probs.tolist() == [0.0, 0.0] and entropy.tolist() == [0.0, 0.0]


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits, targets, _, _ = inputs()
    half = logits.bfloat16()
    log_probs, entropy = log_probs_and_entropy(half, targets, temperature=1.0, vocab_size=VOCAB)
    want = half.float()[:, :VOCAB].log_softmax(-1)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert (log_probs - want.gather(-1, targets[:, None]).squeeze(-1)).abs().max() < 2e-6


def _vocabulary_in_two(launcher: RankLauncher) -> list[tuple[Tensor, Tensor, Tensor]]:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{launcher.port}", rank=launcher.rank, world_size=launcher.world_size
    )
    part = inputs()[0].chunk(2, dim=-1)[launcher.rank]
    answers = [ours(part, temperature, dist.group.WORLD, 100) for temperature in (1.0, 0.6)]
    dist.barrier()
    dist.destroy_process_group()
    return answers


@pytest.mark.engine
def test_two_vocabulary_parts_give_the_values_and_gradients_of_one() -> None:
    answers = run_ranks(_vocabulary_in_two, 2)
    for number, temperature in enumerate((1.0, 0.6)):
        log_probs, entropy, grad = expected(temperature)
        for rank in range(2):
            part = grad.chunk(2, dim=-1)[rank]
            assert_equal(answers[rank][number], (log_probs, entropy, part))
