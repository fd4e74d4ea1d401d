"""Routers of mixture-of-experts layers: their load is counted, and they can replay the engine's choice of experts.

An engine and the trainer compute a router's logits with different rounding, so they sometimes choose different
experts, and the log-probs of those tokens then differ by far more than rounding does. A trainer that replays the
engine's choice takes the engine's experts but weighs them with its own probabilities, so gradients reach the router
as before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from slime.errors import TrainerError
from slime.train.parallel import of_all_ranks

#: what is counted of each layer besides the tokens of its experts
_COUNTS = ("tokens", "dropped", "entropy", "aux_loss", "z_loss")


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRows:
    """What the routers must know of a micro-batch's T rows on this rank."""

    #: the micro-batch's part of the step's tokens, by which its auxiliary losses count; 0 if it does not count
    share: float = 0.0
    #: tokens of the micro-batch on all ranks that hold a part of it
    tokens: int = 0
    #: [T] bool, True where the row only pads; None if no row does
    padding: Tensor | None = None
    #: [T, routers of this rank, K] experts that the engine chose, or -1 where it chose none; None if routers choose for
    #: themselves
    routes: Tensor | None = None


#: rows that do not count, none of which pads
NO_ROUTES = RoutedRows()


class TrainingRouter(TopKRouter):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's router, told of each micro-batch by `expect` before the forward pass.

    In a step's first pass over a micro-batch it counts; when activations are computed again in the backward pass, it
    does the same as in the first pass and counts nothing.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._rows = NO_ROUTES
        #: rows of the passes that are still to be computed again: backward passes come in the order of forward passes
        self._again: deque[RoutedRows] = deque()
        self._counting = False
        #: its number among this rank's that replay; None: the engine does not run it (multi-token prediction)
        self.place: int | None = None
        self.router_replay = _Choice()
        self.load: Tensor | None = None  #: [experts] tokens since `take_load`
        self.counts = dict.fromkeys(_COUNTS, 0.0)

    def expect(self, rows: RoutedRows) -> None:
        """The next forward pass is over these rows."""
        self._rows = rows

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Choose experts for each row.

        Args:
            input: [T, 1, H] hidden states.
            padding_mask: Not used; `expect` tells which rows only pad.

        Returns:
            Weights and choice of each expert, both [T, experts].
        """
        rows, self._counting = self._rows, self.training
        if self.training and not torch.is_grad_enabled():
            self._again.append(rows)  # the layer keeps no activations and will be computed again
        elif self.training and self._again:
            rows, self._counting = self._again.popleft(), False
        self._current = rows
        routes = None if self.place is None else rows.routes
        self.router_replay.choice = None if routes is None else routes[:, self.place]
        answer: tuple[Tensor, Tensor] = super().forward(input, rows.padding)
        return answer

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `TopKRouter.routing`."""
        weights, chosen = super().routing(logits, padding_mask)
        if self._counting and self._current.share:
            self._count(logits.detach().view(chosen.shape), chosen, padding_mask)
        return weights, chosen

    def _count(self, logits: Tensor, chosen: Tensor, padding: Tensor | None) -> None:
        logits = logits.float()
        if self.score_function == "sigmoid":
            scores = logits.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        else:
            scores = logits.softmax(-1)
        entropy = torch.special.entr(scores).sum(-1)
        if padding is not None:
            chosen, entropy = chosen & ~padding.unsqueeze(-1), entropy.masked_fill(padding, 0)
        tokens = chosen.size(0) - (0 if padding is None else int(padding.sum()))
        load = chosen.sum(0).double()
        self.load = load if self.load is None else self.load + load
        self._add("tokens", tokens)
        self._add("dropped", self.topk * tokens - load.sum())
        self._add("entropy", entropy.sum().double())

    def _add(self, name: str, value: Any) -> None:
        self.counts[name] = self.counts[name] + value

    def take_load(self) -> Tensor:
        """[experts + counts] float64 on the CPU: what was counted since the last call."""
        load = torch.zeros(self.num_experts) if self.load is None else self.load
        found = torch.cat([load.cpu().double(), torch.tensor([float(self.counts[name]) for name in _COUNTS]).double()])
        self.load, self.counts = None, dict.fromkeys(_COUNTS, 0.0)
        return found

    # --- auxiliary losses: their scale, and the choice of rows ---

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        *rest: Any,
        **keywords: Any,
    ) -> Tensor:
        """Add a micro-batch's loss to the step's in proportion to its tokens.

        Megatron multiplies by the rows of this rank and divides gradients by the step's tokens at the end, which slime
        does not: its token losses are divided already.
        """
        if not self._current.share:
            return activation  # a micro-batch that does not count
        self._add("aux_loss", self._current.share * aux_loss.detach().double() / aux_loss_coeff)
        keywords["valid_token_count"] = self._current.share
        answer: Tensor = super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, *rest, **keywords
        )
        return answer

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The z loss, added to the step's as the balancing losses are; Megatron's mean is wrong where ranks pad."""
        coefficient, share = self.config.moe_z_loss_coeff, self._current.share
        if coefficient is None or not share or not (self.training and torch.is_grad_enabled()):
            return logits
        squares = logits.logsumexp(-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0)
        loss = coefficient * squares.sum() / self._current.tokens  # this rank's part of the mean over tokens
        self._add("z_loss", share * loss.detach().double() / coefficient)
        answer: Tensor = MoEAuxLossAutoScaler.apply(logits, loss * share)
        return answer

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count tokens for the update of the expert bias; 0.16.1 cannot mask [T, experts] with [T]."""
        mask = None if padding_mask is None else padding_mask.unsqueeze(-1)
        super()._apply_expert_bias(routing_map, padding_mask=mask)


class _Choice:
    """Stands in for Megatron's `RouterReplay`, which knows nothing of rows without a route and of 1F1B schedules."""

    choice: Tensor | None = None  #: [T, K] experts to take, -1 where the router chooses for itself

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        """([T, K] scores, [T, K] numbers) of the chosen experts; called where Megatron would take the best K."""
        chosen = _best_experts(scores, topk, num_groups or 1, group_topk or 1)
        if self.choice is not None:
            engines = self.choice.to(device=scores.device, dtype=torch.int64)
            chosen = torch.where(engines[:, :1] < 0, chosen, engines)
        return scores.gather(1, chosen), chosen


def _best_experts(scores: Tensor, topk: int, groups: int, best_groups: int) -> Tensor:
    """[T, K] the best experts, of the best groups only; a group counts as much as its two best experts.

    Megatron's own count as many experts of a group as are chosen from each on average, which is another model if that
    is not two.
    """
    if groups > best_groups:
        by_group = scores.view(scores.size(0), groups, -1)
        worth = by_group.topk(min(2, by_group.size(-1)), dim=-1).values.sum(-1)
        out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, worth.topk(best_groups, dim=-1).indices, False)
        scores = by_group.masked_fill(out.unsqueeze(-1), -math.inf).flatten(1)
    return scores.topk(topk, dim=1).indices


def check_routes(
    sample: int,
    shape: Sequence[int],
    routes: np.ndarray[Any, Any],
    layers: Sequence[int],
    transformer: Any,
) -> None:
    """Refuse experts of a sample that are not this model's.

    Args:
        sample: Its number.
        shape: (tokens, layers, K) of all that the engine reported.
        routes: [tokens, some layers, K] of them.
        layers: Which layers these are; all have experts.
        transformer: Megatron's configuration of the model.

    Raises:
        TrainerError: The model has other layers, experts per token or numbers of experts, or a token has the same
            expert twice in a layer.
    """
    experts, expected = transformer.num_moe_experts, (transformer.num_layers, transformer.moe_router_topk)
    if tuple(shape[1:]) != expected or routes.max(initial=0) >= experts:
        raise TrainerError(
            f"sample {sample}: its routed experts have (layers, experts per token) {tuple(shape[1:])} and numbers up to"
            f" {routes.max(initial=0)}; the trainer's model has {expected} and {experts} experts. Do engines and"
            " trainer have the same model?"
        )
    ordered = np.sort(routes, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if twice.any():
        token, place = (int(index[0]) for index in np.nonzero(twice))
        raise TrainerError(
            f"sample {sample}: token {token} was routed to the experts {routes[token, place].tolist()} in layer"
            f" {layers[place]}, expected different ones. Its rollout_routed_experts were changed on the way from the"
            " engine"
        )


def routers_of(chunk: torch.nn.Module) -> list[TrainingRouter]:
    """The routers of a chunk of a model, in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, TrainingRouter)]


def router_metrics(routers: Iterable[TrainingRouter], *, steps: int) -> dict[str, float]:
    """What the routers of all ranks counted since the last call (collective); nothing for a dense model.

    Args:
        routers: This rank's.
        steps: Optimizer steps since the last call.

    Returns:
        `expert_load` is the load of the busiest expert relative to the mean over experts, in the layer where that is
        worst; `router_entropy` the mean over tokens and layers of the entropy over experts, in nats; `dropped_tokens`
        the part of choices that a capacity factor dropped; `moe_aux_loss` and `moe_z_loss` means over layers and steps.
    """
    mine = {router.layer_number: router.take_load() for router in routers}
    layers: dict[int, Tensor] = {}
    for one in of_all_ranks(mine):
        for number, found in one.items():
            layers[number] = layers[number] + found if number in layers else found
    if not layers:
        return {}
    table = torch.stack([layers[number] for number in sorted(layers)])
    load = table[:, : -len(_COUNTS)]
    counts = dict(zip(_COUNTS, table[:, -len(_COUNTS) :].sum(0).tolist(), strict=True))
    choices = load.sum().item() + counts["dropped"]
    return {
        "expert_load": (load.amax(1) / load.mean(1).clamp(min=1e-9)).max().item(),
        "router_entropy": counts["entropy"] / max(counts["tokens"], 1.0),
        "dropped_tokens": counts["dropped"] / max(choices, 1.0),
        **{f"moe_{name}": counts[name] / len(layers) / steps for name in ("aux_loss", "z_loss") if counts[name]},
    }
