"""A training run as a textbook would write it: a float64 transformers model, one sample at a time, and Adam.

`TextbookRun` reads the flags of a command line and trains on the same samples as the trainer. It shares no code with
slime: the formulas are in `tests.train.textbook_formulas`, and the optimizer and its schedule are below.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.train import textbook_formulas as formulas
from tests.train.textbook_formulas import Flags, PerToken, Row, TokenLoss, number, switch
from torch import Tensor

from slime.types import Group, Sample, Status


def parse_flags(argv: Sequence[str]) -> dict[str, str]:
    """`--name value --switch --no-other` as a dictionary without dashes; switches are "true" or "false"."""
    flags: dict[str, str] = {}
    for here, following in zip(argv, [*argv[1:], "--"], strict=True):
        if not here.startswith("--"):
            continue
        name = here.removeprefix("--")
        if not following.startswith("--"):
            flags[name] = following
        elif name.startswith("no-"):
            flags[name.removeprefix("no-")] = "false"
        else:
            flags[name] = "true"
    return flags


class Optimizer:
    """AdamW, or SGD with momentum; weight decay on matrices, clipping of the gradient's norm, a schedule in steps."""

    def __init__(self, parameters: Iterable[Tensor], flags: Flags, lr: float, total_steps: int) -> None:
        self.parameters, self.flags, self.peak, self.total = list(parameters), flags, lr, total_steps
        self.steps = self.scheduled = 0
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]

    def learning_rate(self) -> float:
        """Of the next step."""
        n, least = self.scheduled, number(self.flags, "min-lr", 0.0)
        decay = int(number(self.flags, "lr-decay-iters", self.total))
        warmup = int(number(self.flags, "lr-warmup-iters", round(decay * number(self.flags, "lr-warmup-fraction", 0))))
        style = self.flags.get("lr-decay-style", "constant")
        if warmup and n <= warmup:
            return self.peak * n / warmup
        if style == "constant":
            return self.peak
        if n > decay:
            return least
        if style == "inverse-square-root":
            return max(least, self.peak * math.sqrt(max(warmup, 1) / max(n, 1)))
        done = (n - warmup) / (decay - warmup)
        left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[style]
        return least + (self.peak - least) * left

    def step(self) -> tuple[float, float]:
        """Update the parameters with their gradients; returns the norm before clipping, and the learning rate."""
        lr = self.learning_rate()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        limit = number(self.flags, "clip-grad", 1.0)
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        self.steps += 1
        self.scheduled += 1
        with torch.no_grad():
            for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
                decay = number(self.flags, "weight-decay", 0.01) if p.ndim > 1 else 0.0
                if self.flags.get("optimizer") == "sgd":
                    m.mul_(number(self.flags, "sgd-momentum", 0.9)).add_(g * scale + decay * p)
                    p -= lr * m
                else:
                    p -= lr * (self._adam(g * scale, m, v) + decay * p)
                p.grad = None
        return norm, lr

    def _adam(self, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        """Kingma and Ba, 2015, algorithm 1; the moments are updated in place."""
        beta1, beta2 = number(self.flags, "adam-beta1", 0.9), number(self.flags, "adam-beta2", 0.999)
        m.mul_(beta1).add_((1 - beta1) * g)
        v.mul_(beta2).add_((1 - beta2) * g * g)
        unbiased_m, unbiased_v = m / (1 - beta1**self.steps), v / (1 - beta2**self.steps)
        return unbiased_m / (unbiased_v.sqrt() + number(self.flags, "adam-eps", 1e-8))


class ValueModel(torch.nn.Module):
    """A transformer without output layer, and one vector."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.backbone = read_model("AutoModel", folder)
        self.head = torch.nn.Parameter(torch.zeros(1, self.backbone.config.hidden_size, dtype=torch.float64))

    def values(self, sample: Sample) -> list[Tensor]:
        """[T] the value of the state before each response token."""
        hidden = self.backbone(torch.tensor([sample.tokens])).last_hidden_state[0]
        return [(hidden[p - 1] * self.head[0]).sum() for p in range(sample.prompt_length, len(sample.tokens))]


@cache
def _read_model(kind: str, folder: Path) -> Any:
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def read_model(kind: str, folder: Path) -> Any:
    """A model of a Hugging Face folder in float64, by the class of transformers that reads it."""
    return copy.deepcopy(_read_model(kind, folder))


def deal(groups: Sequence[Group], steps: int) -> list[Row]:
    """The trainable samples with their optimizer step: the same number of groups in each, or else of rollouts."""
    found = [(group, sample) for group in groups for sample in group.samples]
    by_group = len(groups) % steps == 0
    units = [group.index if by_group else sample.rollout_id for group, sample in found]
    order = sorted(set(units), key=units.index)
    return [
        Row(sample, group.index, int(sample.rollout_id or 0), order.index(unit) * steps // len(order))
        for (group, sample), unit in zip(found, units, strict=True)
        if sample.status in (Status.COMPLETED, Status.TRUNCATED)
    ]


class TextbookRun:
    """The training of one run."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        folder = Path(flags["hf-checkpoint"])
        self.supervised = flags.get("loss-type") == "sft_loss"
        self.steps = int(number(flags, "num-steps-per-rollout", 1))
        self.policy = read_model("AutoModelForCausalLM", folder)
        self.reference: Any = None
        if not self.supervised and (switch(flags, "use-kl-loss") or number(flags, "kl-coef", 0.0)):
            self.reference = read_model("AutoModelForCausalLM", Path(flags.get("ref-load", folder)))
        self.critic = ValueModel(Path(flags.get("critic-load", folder))) if self._estimator == "ppo" else None
        rollouts, lr = int(flags["num-rollout"]), number(flags, "lr", 1e-6)
        self.warmup = int(number(flags, "num-critic-only-steps", 0)) if self.critic else 0
        self.optimizer = Optimizer(self.policy.parameters(), flags, lr, (rollouts - self.warmup) * self.steps)
        if self.critic:
            critic_lr = number(flags, "critic-lr", lr)
            self.critic_optimizer = Optimizer(self.critic.parameters(), flags, critic_lr, rollouts * self.steps)

    @property
    def _estimator(self) -> str | None:
        return None if self.supervised else self.flags["advantage-estimator"]

    def weights(self) -> dict[str, Tensor]:
        """The policy's, and the critic's under names that begin with `critic.`"""
        named = dict(self.policy.named_parameters())
        if self.critic:
            named |= {f"critic.model.{name}": p for name, p in self.critic.backbone.named_parameters()}
            named["critic.head"] = self.critic.head
        return {name: p.detach().clone() for name, p in named.items()}

    def score(self, model: Any, sample: Sample) -> tuple[list[Tensor], list[Tensor]]:
        """[T] log-probs of the response tokens, and [T] entropies."""
        temperature = 1.0 if self.supervised else number(self.flags, "rollout-temperature", 1.0)
        table = (model(torch.tensor([sample.tokens])).logits[0] / temperature).log_softmax(-1)
        rows = [table[p - 1] for p in range(sample.prompt_length, len(sample.tokens))]
        targets = sample.tokens[sample.prompt_length :]
        return (
            [row[token] for row, token in zip(rows, targets, strict=True)],
            [-(row.exp() * row).sum() for row in rows],
        )

    def log_probs(self, model: Any, rows: Sequence[Row]) -> PerToken:
        """Of every response token, as numbers."""
        with torch.no_grad():
            return [[float(value) for value in self.score(model, row.sample)[0]] for row in rows]

    def train(self, groups: Sequence[Group], rollout: int) -> dict[str, float]:
        """One rollout's optimizer steps; its metrics."""
        flags, rows = self.flags, deal(groups, self.steps)
        trains = [step for step in range(self.steps) if any(row.trained for row in rows if row.step == step)]
        metrics: dict[str, float] = {}
        advantages = old = ref = returns = values = None
        if not self.supervised:
            old = self.log_probs(self.policy, rows)
            ref = None if self.reference is None else self.log_probs(self.reference, rows)
            if self.critic:
                with torch.no_grad():
                    values = [[float(v) for v in self.critic.values(row.sample)] for row in rows]
            advantages = self._advantages(rows, old, ref, values)
            if values is not None:
                returns = [[a + v for a, v in zip(x, y, strict=True)] for x, y in zip(advantages, values, strict=True)]
            if switch(flags, "normalize-advantages"):
                advantages = formulas.whiten(rows, advantages)
            metrics |= advantage_metrics([advantages[i][t] for i, row in enumerate(rows) for t in row.trained])
        if self.critic and values is not None and returns is not None:
            metrics |= self._train_critic(rows, trains, values, returns)
        if rollout >= self.warmup:
            metrics |= self._train_policy(rows, trains, advantages, old, ref)
        if len(trains) < self.steps:
            metrics["skipped_steps"] = self.steps - len(trains)
        interval = int(number(flags, "ref-update-interval", 0))
        if self.reference is not None and interval and (rollout + 1) % interval == 0:
            self.reference = copy.deepcopy(self.policy)
        return metrics

    def _advantages(self, rows: list[Row], old: PerToken, ref: PerToken | None, values: PerToken | None) -> PerToken:
        kind = self.flags.get("kl-reward-type", "k1")
        kl = [
            [0.0 if ref is None else float(formulas.kl_estimate(kind, old[i][t], ref[i][t])) for t in range(len(part))]
            for i, part in enumerate(old)
        ]
        coef = number(self.flags, "kl-coef", 0.0)
        estimator = formulas.ESTIMATORS[str(self._estimator)]
        return estimator(rows, flags=self.flags, kl=kl, coef=coef, values=values)

    def _train_policy(
        self,
        rows: list[Row],
        trains: list[int],
        advantages: PerToken | None,
        old: PerToken | None,
        ref: PerToken | None,
    ) -> dict[str, float]:
        losses, norms, tokens, micro_batches = [], [], [], 0
        lr = 0.0
        for step in trains:
            members = [i for i, row in enumerate(rows) if row.step == step]
            terms: list[tuple[float, TokenLoss]] = []
            for i, weight in zip(members, formulas.loss_weights([rows[i] for i in members], self.flags), strict=True):
                log_probs, entropies = self.score(self.policy, rows[i].sample)
                if advantages is None or old is None:
                    found = formulas.supervised_loss(self.flags, rows[i], log_probs, entropies)
                else:
                    before = None if ref is None else ref[i]
                    found = formulas.row_loss(self.flags, rows[i], advantages[i], old[i], before, log_probs, entropies)
                terms += [(weight, one) for one in found]
            losses.append(backward(terms))
            tokens += [one.metrics for _, one in terms]
            micro_batches += self._micro_batches(len(members))
            norm, lr = self.optimizer.step()
            norms.append(norm)
        self.optimizer.scheduled += self.steps - len(trains)
        own = {"loss": formulas.mean(losses), "grad_norm": formulas.mean(norms), "lr": lr}
        return own | {"micro_batches": micro_batches, "tokens": len(tokens)} | token_metrics(tokens)

    def _micro_batches(self, samples: int) -> int:
        """Of one step on one rank. Tokens per micro-batch are either many, or fewer than any two samples have."""
        each = number(self.flags, "micro-batch-size", 1 if "max-tokens-per-gpu" in self.flags else samples)
        return math.ceil(samples / each)

    def _train_critic(
        self, rows: list[Row], trains: list[int], values: PerToken, returns: PerToken
    ) -> dict[str, float]:
        assert self.critic is not None
        clip = number(self.flags, "value-clip", 0.2)
        losses, norms, clipped, lr = [], [], [], 0.0
        for step in trains:
            members = [i for i, row in enumerate(rows) if row.step == step]
            terms = []
            for i, weight in zip(members, formulas.loss_weights([rows[i] for i in members], self.flags), strict=True):
                now = self.critic.values(rows[i].sample)
                terms += [
                    (weight, formulas.value_token(now[t], values[i][t], returns[i][t], clip)) for t in rows[i].trained
                ]
            losses.append(backward(terms))
            clipped += [one.metrics["value_clip_fraction"] for _, one in terms]
            norm, lr = self.critic_optimizer.step()
            norms.append(norm)
        self.critic_optimizer.scheduled += self.steps - len(trains)
        trained = [(i, t) for i, row in enumerate(rows) for t in row.trained]
        targets, errors = [returns[i][t] for i, t in trained], [returns[i][t] - values[i][t] for i, t in trained]
        spread = population_variance(targets)
        return {
            "value_loss": formulas.mean(losses),
            "critic_grad_norm": formulas.mean(norms),
            "critic_lr": lr,
            "value_clip_fraction": formulas.mean(clipped),
            "value_mean": formulas.mean([values[i][t] for i, t in trained]),
            "return_mean": formulas.mean(targets),
            "return_std": math.sqrt(spread),
            "explained_variance": 1 - population_variance(errors) / spread,
        }


def backward(terms: Sequence[tuple[float, TokenLoss]]) -> float:
    """Leave the gradient of the weighted sum in the parameters; returns the sum."""
    total = torch.stack([weight * one.loss for weight, one in terms]).sum()
    total.backward()
    return float(total.detach())


def token_metrics(tokens: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over tokens, maxima of names that end in `_max`, and what is made of several of them."""
    columns: dict[str, list[float]] = defaultdict(list)
    for token in tokens:
        for name, value in token.items():
            columns[name].append(float(value))
    gaps, weights = columns.pop("gap", None), columns.pop("weight", [])
    answers = {name: max(v) if name.endswith("_max") else formulas.mean(v) for name, v in columns.items()}
    if gaps:
        answers["engine_ppl_ratio"] = math.exp(-formulas.mean(gaps))
        answers["engine_ess"] = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    return answers


def population_variance(values: Sequence[float]) -> float:
    """Over n."""
    middle = formulas.mean(values)
    return formulas.mean([(v - middle) ** 2 for v in values])


def advantage_metrics(values: Sequence[float]) -> dict[str, float]:
    """Of the trained tokens' advantages."""
    return {
        "advantage_mean": formulas.mean(values),
        "advantage_std": math.sqrt(population_variance(values)),
        "advantage_min": min(values),
        "advantage_max": max(values),
        "advantage_zero_fraction": formulas.mean([float(v == 0) for v in values]),
    }
