"""The contract of an estimator's own objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.plugin import EstimatorSpec, TokenBatch
from slime.testing.rules import Rule, attributed, check

if TYPE_CHECKING:
    from torch import Tensor

Objective = Callable[[TokenBatch], tuple["Tensor", dict[str, "Tensor"]]]

_LENGTHS = (5, 1, 9, 3)
_EXTREME = 30.0
#: the trainer holds `TokenBatch.log_ratio` within this
_BOUND = 20.0


def objective_rules(estimator: Any, spec: EstimatorSpec) -> list[Rule]:
    """The rules for `Estimator.objective`; spec.ratio says what `TokenBatch.log_ratio` is."""
    tried = _Tried(estimator.objective, f"{type(estimator).__name__}.objective", spec.ratio == "sequence")
    return [
        Rule("has a loss and metrics of one entry per token", tried.shapes),
        Rule("has a finite loss and gradient at extreme ratios", tried.extremes),
        Rule("gives tokens outside the mask no gradient, and others none because of them", tried.masked),
        Rule("does not hang on which sequences share a micro-batch", tried.split),
    ]


def make_tokens(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, lengths: Sequence[int], *, mean: bool
) -> TokenBatch:
    """A micro-batch of whole sequences as the trainer makes it.

    [M] each; lengths: tokens of every sequence; mean: `log_ratio` is the sequence's mean (spec.ratio "sequence").
    """
    import torch

    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = torch.where(mask > 0, old_log_probs, log_probs.detach())
    log_ratio = (log_probs - old) * mask
    if mean:
        zeros = torch.zeros(len(lengths))
        trained = zeros.index_add(0, ids, mask).clamp(min=1)
        log_ratio = (zeros.index_add(0, ids, log_ratio) / trained)[ids] * mask
    return TokenBatch(
        log_probs=log_probs,
        old_log_probs=old,
        log_ratio=log_ratio.clamp(-_BOUND, _BOUND),
        advantages=advantages * mask,
        loss_mask=mask,
        sequence_ids=ids,
        num_sequences=len(lengths),
        eps_clip=0.2,
        eps_clip_high=0.28,
    )


@dataclass(frozen=True)
class _Tried:
    """An objective under test."""

    objective: Objective
    call: str
    mean: bool

    def shapes(self) -> None:
        new, old, advantages, mask = _columns(0.3)
        loss, metrics = self._loss(self._tokens(new, old, advantages, mask), "an ordinary micro-batch")
        for name, values in {"the loss": loss, **metrics}.items():
            self._check_shape(name, values, new)

    def extremes(self) -> None:
        import torch

        for log_ratio in (-_EXTREME, _EXTREME):
            new, old, advantages, mask = _columns(0.0)
            new = (old + log_ratio).requires_grad_()
            case = f"log-ratios of {log_ratio:g}"
            loss, _ = self._loss(self._tokens(new, old, advantages, mask), case)
            (gradient,) = torch.autograd.grad((loss * mask).sum(), new, allow_unused=True)
            for what, values in (("a loss", loss), ("a gradient", gradient)):
                check(
                    values is None or bool(torch.isfinite(values).all()),
                    f"{self.call}, given {case}, has {what} that is not finite; expected finite numbers",
                )

    def masked(self) -> None:
        import torch

        new, old, advantages, mask = _columns(0.3)
        other = torch.where(mask == 0, new - 2.0, new)
        first, again = (self._gradient(column, old, advantages, mask) for column in (new, other))
        check(
            torch.allclose(first, again, atol=1e-6),
            f"{self.call}: the gradient changes with log-probs of tokens whose mask is 0; expected that they count for"
            " nothing (use TokenBatch.loss_mask in every sum and mean)",
        )
        check(
            bool((first[mask == 0] == 0).all()),
            f"{self.call}: a token whose mask is 0 has a gradient; expected 0",
        )

    def split(self) -> None:
        import torch

        columns = _columns(0.3)
        together, _ = self._loss(self._tokens(*columns), "four sequences in one micro-batch")
        new, old, advantages, mask = (torch.split(column, list(_LENGTHS)) for column in columns)
        alone = []
        for place, length in enumerate(_LENGTHS):
            one = make_tokens(new[place], old[place], advantages[place], mask[place], [length], mean=self.mean)
            alone.append(self._loss(one, "a micro-batch of one sequence")[0])
        check(
            torch.allclose(together * columns[-1], torch.cat(alone) * columns[-1], atol=1e-6),
            f"{self.call}: a token's loss is another when its sequence is alone in the micro-batch; expected the same"
            " (what is shared by a batch belongs into advantages())",
        )

    # --- asking --------------------------------------------------------------------------------------

    def _tokens(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenBatch:
        return make_tokens(new, old, advantages, mask, _LENGTHS, mean=self.mean)

    def _gradient(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """[M] of the loss that the trainer sums over the mask."""
        import torch

        leaf = new.clone().requires_grad_()
        loss, _ = self._loss(self._tokens(leaf, old, advantages, mask), "an ordinary micro-batch")
        (gradient,) = torch.autograd.grad((loss * mask).sum(), leaf)
        return gradient

    def _loss(self, tokens: TokenBatch, case: str) -> tuple[Tensor, Mapping[str, Tensor]]:
        with attributed(self.call, case):
            answer = self.objective(tokens)
        check(
            isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping),
            f"{self.call}, given {case}, returned {type(answer).__name__}; expected (loss [M], metrics: name -> [M])",
        )
        self._check_shape("the loss", answer[0], tokens.log_probs)
        return answer

    def _check_shape(self, name: str, values: object, like: Tensor) -> None:
        got = tuple(getattr(values, "shape", ())) if hasattr(values, "shape") else type(values).__name__
        check(
            got == tuple(like.shape),
            f"{self.call}: {name} is {got}; expected one entry per token, {tuple(like.shape)} (the kernel weighs and"
            " sums the tokens)",
        )


def _columns(spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probs, advantages and mask: [M] each."""
    import torch

    dice = torch.Generator().manual_seed(0)
    count = sum(_LENGTHS)
    old = -torch.rand(count, generator=dice) - 0.1
    new = old + spread * torch.randn(count, generator=dice)
    mask = (torch.rand(count, generator=dice) < 0.7).float()
    mask[torch.tensor(_LENGTHS).cumsum(0) - 1] = 1.0  # no sequence without a trained token
    advantages = torch.repeat_interleave(torch.randn(len(_LENGTHS), generator=dice), torch.tensor(_LENGTHS))
    return new, old, advantages, mask
