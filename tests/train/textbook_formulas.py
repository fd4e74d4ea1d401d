"""The formulas of docs/algorithms.md, training.md and off-policy.md, one token at a time and in float64.

Written from the documentation and the papers it names, for tests that compare them with the trainer: nothing here
calls slime, vectors are lists, and loops run over tokens. Slow, and meant to be read beside the documentation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.types import Sample

#: what the flags of a command line say, without the dashes: `{"eps-clip": "0.1", "use-tis": "true"}`
Flags = Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One trainable sample: T response tokens."""

    sample: Sample
    group: int
    rollout: int
    step: int

    @property
    def mask(self) -> list[bool]:
        """[T] whether a token is trained on."""
        given = self.sample.loss_mask or [1] * self.sample.response_length
        return [bool(m) and not self.sample.remove_sample for m in given]

    @property
    def trained(self) -> list[int]:
        """The indices of the trained tokens."""
        return [t for t, used in enumerate(self.mask) if used]

    @property
    def engine(self) -> list[float]:
        """[T] log-probs of the engine."""
        assert self.sample.rollout_log_probs is not None
        return self.sample.rollout_log_probs

    @property
    def reward(self) -> float:
        """The score."""
        reward = self.sample.reward
        assert reward is not None
        return float(reward["score"] if isinstance(reward, dict) else reward)


def switch(flags: Flags, name: str) -> bool:
    """Whether a switch is on."""
    return flags.get(name, "false") == "true"


def number(flags: Flags, name: str, default: float) -> float:
    """A flag's number."""
    return float(flags.get(name, default))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def unbiased_variance(values: Sequence[float]) -> float:
    """Over n - 1; 0 for one value."""
    middle = mean(values)
    return sum((v - middle) ** 2 for v in values) / max(1, len(values) - 1)


# --- advantages -------------------------------------------------------------------------------------

#: N lists of one number per response token, 0 at tokens that are not trained on
PerToken = list[list[float]]


def kl_estimate(kind: str, log_prob: Any, ref: Any, ratio: Any = 1.0) -> Any:
    """Of one token, with d = log pi_ref - log pi; `ratio` multiplies it before the clamp of low_var_kl."""
    d = torch.as_tensor(ref - log_prob, dtype=torch.float64)
    estimate = {"k1": -d, "k2": d * d / 2}.get(kind, torch.exp(d) - 1 - d) * ratio
    return torch.clamp(estimate, -10, 10) if kind == "low_var_kl" else estimate


def outcomes(rows: Sequence[Row], value: Callable[[Row], float]) -> dict[int, dict[int, float]]:
    """group -> rollout -> the mean of `value` over the rollout's samples."""
    parts: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        parts[row.group][row.rollout].append(value(row))
    return {group: {one: mean(values) for one, values in members.items()} for group, members in parts.items()}


def spread(rows: Sequence[Row], values: Sequence[float]) -> PerToken:
    """The same number for all trained tokens of a sample."""
    return [[value if used else 0.0 for used in row.mask] for row, value in zip(rows, values, strict=True)]


def group_relative(rows: Sequence[Row], value: Callable[[Row], float], eps: float | None) -> list[float]:
    """(R - mean) / (std + eps) of each sample's rollout within its group; without eps, R - mean."""
    table = outcomes(rows, value)
    answers = []
    for row in rows:
        group = list(table[row.group].values())
        centred = table[row.group][row.rollout] - mean(group)
        answers.append(centred if eps is None else centred / (math.sqrt(unbiased_variance(group)) + eps))
    return answers


def whiten(rows: Sequence[Row], values: PerToken) -> PerToken:
    """(x - mean) / sqrt(variance + 1e-8) over all trained tokens of the batch."""
    trained = [values[i][t] for i, row in enumerate(rows) for t in row.trained]
    middle, scale = mean(trained), math.sqrt(unbiased_variance(trained) + 1e-8)
    return [
        [(x - middle) / scale if used else 0.0 for x, used in zip(part, row.mask, strict=True)]
        for part, row in zip(values, rows, strict=True)
    ]


def grpo(rows: Sequence[Row], flags: Flags, **_: Any) -> PerToken:
    """Shao et al., 2024."""
    eps = number(flags, "estimator.eps", 1e-6) if flags.get("estimator.std-normalization") != "false" else None
    return spread(rows, group_relative(rows, lambda row: row.reward, eps))


def dr_grpo(rows: Sequence[Row], **_: Any) -> PerToken:
    """Liu et al., 2025."""
    return spread(rows, group_relative(rows, lambda row: row.reward, None))


def dapo(rows: Sequence[Row], flags: Flags, **_: Any) -> PerToken:
    """Yu et al., 2025: as GRPO, with a penalty on long responses."""

    def value(row: Row) -> float:
        buffer, longest = number(flags, "estimator.overlong-buffer", 0), number(flags, "rollout-max-response-len", 1024)
        if not buffer:
            return row.reward
        over = (row.sample.response_length - (longest - buffer)) / buffer
        return row.reward - number(flags, "estimator.overlong-penalty", 1.0) * min(1.0, max(0.0, over))

    return spread(rows, group_relative(rows, value, number(flags, "estimator.eps", 1e-6)))


def rloo(rows: Sequence[Row], kl: PerToken, coef: float, **_: Any) -> PerToken:
    """Ahmadian et al., 2024: R minus the mean of the other rollouts' R."""
    rewards = outcomes(rows, lambda row: row.reward)
    for i, row in enumerate(rows):
        rewards[row.group][row.rollout] -= coef * sum(kl[i][t] for t in row.trained)
    answers = []
    for row in rows:
        others = [value for rollout, value in rewards[row.group].items() if rollout != row.rollout]
        answers.append(rewards[row.group][row.rollout] - mean(others) if others else 0.0)
    return spread(rows, answers)


def token_rewards(rows: Sequence[Row], kl: PerToken, coef: float) -> PerToken:
    """-coef KL of each trained token, and the sample's reward on the last of them."""
    answers = [[0.0] * len(row.mask) for row in rows]
    for i, row in enumerate(rows):
        for t in row.trained:
            answers[i][t] = -coef * kl[i][t] + (row.reward if t == row.trained[-1] else 0.0)
    return answers


def reinforce_plus_plus(rows: Sequence[Row], flags: Flags, kl: PerToken, coef: float, **_: Any) -> PerToken:
    """Hu et al., 2025: discounted returns, whitened."""
    returns = token_rewards(rows, kl, coef)
    for i, row in enumerate(rows):
        later = 0.0
        for t in reversed(row.trained):
            later = returns[i][t] = returns[i][t] + number(flags, "estimator.gamma", 1.0) * later
    return whiten(rows, returns)


def reinforce_plus_plus_baseline(rows: Sequence[Row], kl: PerToken, coef: float, **_: Any) -> PerToken:
    """Hu et al., 2025, with the group's mean as the baseline."""
    relative = group_relative(rows, lambda row: row.reward, None)
    raw = [
        [relative[i] - coef * kl[i][t] if used else 0.0 for t, used in enumerate(row.mask)]
        for i, row in enumerate(rows)
    ]
    return whiten(rows, raw)


def ppo(rows: Sequence[Row], flags: Flags, kl: PerToken, coef: float, values: PerToken, **_: Any) -> PerToken:
    """Schulman et al., 2015: generalised advantage estimation. The returns are these advantages plus the values."""
    gamma, lambd = number(flags, "estimator.gamma", 1.0), number(flags, "estimator.lambd", 1.0)
    rewards = token_rewards(rows, kl, coef)
    answers = [[0.0] * len(row.mask) for row in rows]
    for i, row in enumerate(rows):
        next_value = next_advantage = 0.0
        for t in reversed(row.trained):
            error = rewards[i][t] + gamma * next_value - values[i][t]
            next_advantage = answers[i][t] = error + gamma * lambd * next_advantage
            next_value = values[i][t]
    return answers


ESTIMATORS: dict[str, Callable[..., PerToken]] = {
    "grpo": grpo,
    "gspo": grpo,
    "cispo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "ppo": ppo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
#: how far the ratio may go below and above 1, of estimators with a range of their own
CLIP_RANGES = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "dapo": (0.2, 0.28)}


# --- the loss ---------------------------------------------------------------------------------------


def loss_weights(rows: Sequence[Row], flags: Flags) -> list[float]:
    """The weight of a trained token of each sample, by the rows of one optimizer step."""
    tokens: dict[int, int] = defaultdict(int)
    for row in rows:
        tokens[row.rollout] += len(row.trained)
    counted = sum(1 for n in tokens.values() if n)
    if switch(flags, "calculate-per-token-loss"):
        return [1 / max(1, sum(tokens.values()))] * len(rows)
    if "loss-constant-length" in flags:
        return [1 / number(flags, "loss-constant-length", 1) / max(1, counted)] * len(rows)
    return [1 / max(1, tokens[row.rollout]) / max(1, counted) for row in rows]


def clip_range(flags: Flags) -> tuple[float, float]:
    """How far the ratio may go below and above 1."""
    low, high = CLIP_RANGES.get(flags["advantage-estimator"], (0.2, 0.2))
    if "eps-clip" in flags:
        low = high = number(flags, "eps-clip", 0)
    return low, number(flags, "eps-clip-high", high)


@dataclass
class TokenLoss:
    """The loss of one token with its metrics."""

    loss: Tensor
    metrics: dict[str, float]


def policy_token(flags: Flags, log_prob: Tensor, ratio: Tensor, advantage: float) -> TokenLoss:
    """The policy loss of one token."""
    low, high = clip_range(flags)
    r = float(ratio.detach())
    if flags["advantage-estimator"] == "cispo":
        below, above = r < 1 - low, r > 1 + high
        metrics = {
            "clip_fraction": below + above,
            "clip_fraction_low": float(below),
            "clip_fraction_high": float(above),
        }
        return TokenLoss(-min(max(r, 1 - low), 1 + high) * advantage * log_prob, metrics)
    bounded = torch.clamp(ratio, 1 - low, 1 + high)
    loss = torch.maximum(-ratio * advantage, -bounded * advantage)
    over, under = advantage > 0 and r > 1 + high, advantage < 0 and r < 1 - low
    metrics = {"clip_fraction_low": float(under), "clip_fraction_high": float(over)}
    dual = False
    if "eps-clip-c" in flags:
        bound = number(flags, "eps-clip-c", 0)
        dual = advantage < 0 and r > bound
        metrics["clip_fraction_dual"] = float(dual)
        if dual:
            loss = torch.tensor(-bound * advantage, dtype=torch.float64) + 0 * log_prob
    metrics["clip_fraction"] = float(over or under or dual)
    return TokenLoss(loss, metrics)


def correction_level(flags: Flags) -> str:
    """Of the importance weights between engine and trainer."""
    return flags.get("off-policy-level", "token") if correction_kind(flags) else "token"


def correction_kind(flags: Flags) -> str | None:
    """truncate, mask or none."""
    return flags.get("off-policy-correction", "truncate" if switch(flags, "use-tis") else None)


def engine_weights(row: Row, trainer: Sequence[float], level: str) -> list[float]:
    """[T] w of each trained token between trainer and engine."""
    gaps = [trainer[t] - row.engine[t] for t in range(len(trainer))]
    total = sum(gaps[t] for t in row.trained)
    by_level = {"sequence": total, "geometric": total / max(1, len(row.trained))}
    return [math.exp(by_level.get(level, gap)) for gap in gaps]


def corrected(flags: Flags, weight: float) -> tuple[float, dict[str, float]]:
    """The weight that is used, and its metrics."""
    low, high = number(flags, "tis-threshold-low", 0.0), number(flags, "tis-threshold", 2.0)
    outside = not low <= weight <= high
    if correction_kind(flags) == "mask":
        used, name = 0.0 if outside else weight, "correction_mask_fraction"
    else:
        used, name = min(max(weight, low), high), "correction_clip_fraction"
    return used, {"correction_weight": used, name: float(outside)}


def uses_engine_log_probs(flags: Flags) -> bool:
    """Whether the engine's log-probs are those in the ratio."""
    stale = switch(flags, "async") and correction_kind(flags) is None
    return switch(flags, "use-rollout-logprobs") if "use-rollout-logprobs" in flags else stale


def row_loss(
    flags: Flags,
    row: Row,
    advantages: Sequence[float],
    old: Sequence[float],
    ref: Sequence[float] | None,
    log_probs: Sequence[Tensor],
    entropies: Sequence[Tensor],
) -> list[TokenLoss]:
    """The loss of each trained token of one sample, before the weights of the aggregation."""
    by_engine = uses_engine_log_probs(flags)
    before = row.engine if by_engine else old
    current = [float(value.detach()) for value in log_probs]
    token_logs = {t: log_probs[t] - before[t] for t in row.trained}
    trainer = current if by_engine else old
    weights = engine_weights(row, trainer, correction_level(flags))
    drop = mean([row.engine[t] - current[t] for t in row.trained]) if row.trained else 0.0
    answers = []
    for t in row.trained:
        log_ratio = token_logs[t]
        if flags["advantage-estimator"] == "gspo":
            log_ratio = torch.stack(list(token_logs.values())).mean()
        ratio = torch.exp(torch.clamp(log_ratio, -20, 20))
        one = policy_token(flags, log_probs[t], ratio, advantages[t])
        gap = trainer[t] - row.engine[t]
        one.metrics |= {
            "ratio": float(ratio.detach()),
            "ratio_max": float(ratio.detach()),
            "entropy": float(entropies[t].detach()),
            "logprob_gap_mean": abs(gap),
            "logprob_gap_max": abs(gap),
            "engine_kl": math.exp(gap) - 1 - gap,
            "gap": gap,
            "weight": weights[t],
        }
        if correction_kind(flags):
            used, metrics = corrected(flags, weights[t])
            one.loss = one.loss * used
            one.metrics |= metrics
        if "off-policy-sequence-delta" in flags:
            out = advantages[t] < 0 and drop > number(flags, "off-policy-sequence-delta", 0)
            one.loss = one.loss * (not out)
            one.metrics["off_policy_sequence_fraction"] = float(out)
        if ref is not None:
            token_ratio = torch.exp(token_logs[t]) if switch(flags, "use-unbiased-kl") else 1.0
            kl = kl_estimate(flags.get("kl-loss-type", "k3"), log_probs[t], ref[t], token_ratio)
            one.metrics["kl"] = float(kl.detach())
            if switch(flags, "use-kl-loss"):
                one.loss = one.loss + number(flags, "kl-loss-coef", 0.0) * kl
        one.loss = one.loss - number(flags, "entropy-coef", 0.0) * entropies[t]
        answers.append(one)
    return answers


def supervised_loss(
    flags: Flags, row: Row, log_probs: Sequence[Tensor], entropies: Sequence[Tensor]
) -> list[TokenLoss]:
    """-log pi of each trained token."""
    coef = number(flags, "entropy-coef", 0.0)
    return [
        TokenLoss(-log_probs[t] - coef * entropies[t], {"entropy": float(entropies[t].detach())}) for t in row.trained
    ]


def value_token(value: Tensor, old: float, target: float, clip: float) -> TokenLoss:
    """The critic's loss of one token."""
    plain = (value - target) ** 2
    clipped = (old + torch.clamp(value - old, -clip, clip) - target) ** 2
    metrics = {"value_clip_fraction": float((clipped > plain).detach())}
    return TokenLoss(torch.maximum(plain, clipped) / 2, metrics)
