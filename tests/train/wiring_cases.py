"""Command lines whose training is compared with a textbook's, and the samples that they train on.

Every estimator and every flag of the algorithm section has a case, which `tests.train.test_wiring` enforces.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from slime.types import Group, Sample, Status

#: flags of every case, before its own; the settings of the optimizer are far from their defaults
BASE = (
    "--hf-checkpoint {model} --prompt-data none.jsonl --reward exact_match --device cpu --threads-per-rank 1"
    " --rollout-batch-size 4 --n-samples-per-prompt 3 --num-steps-per-rollout 2 --rollout-temperature 0.8"
    " --lr 5e-3 --weight-decay 0.1 --clip-grad 0.3 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-3"
)
KL = "--use-kl-loss --ref-load {other}"


@dataclass(frozen=True)
class Case:
    """One run."""

    flags: str
    rollouts: int = 1
    #: standard deviation of the engine's log-probs around those of the initial weights
    noise: float = 0.3
    #: whether the second step of the first rollout trains no token
    empty_step: bool = False

    def argv(self, model: Path, other: Path) -> list[str]:
        """The command line of `slime train`; `other` is a folder with other weights of the same shape."""
        own = [f"--num-rollout {max(1, self.rollouts)}", self.flags]
        # A flag of the case replaces the one in BASE.
        stated = {word for word in shlex.split(self.flags) if word.startswith("--")}
        base = [f"--{part}" for part in BASE.removeprefix("--").split(" --") if f"--{part.split()[0]}" not in stated]
        return shlex.split(" ".join([*base, *own]).format(model=model, other=other))


CASES: dict[str, Case] = {
    # --- estimators
    "grpo": Case(f"--advantage-estimator grpo --kl-loss-coef 0.3 {KL}"),
    "grpo, centred only": Case("--advantage-estimator grpo --estimator.std-normalization false"),
    "grpo, eps": Case("--advantage-estimator grpo --estimator.eps 0.3"),
    "dr_grpo": Case("--advantage-estimator dr_grpo --loss-constant-length 7"),
    "gspo": Case("--advantage-estimator gspo"),
    "gspo, wide": Case(
        "--advantage-estimator gspo --eps-clip 0.05 --eps-clip-high 0.1 --estimator.eps 0.3 --use-rollout-logprobs"
    ),
    "gspo, no std": Case("--advantage-estimator gspo --eps-clip 0.05 --estimator.std-normalization false"),
    "cispo": Case("--advantage-estimator cispo --calculate-per-token-loss --use-rollout-logprobs", noise=1.5),
    "cispo, two bounds": Case("--advantage-estimator cispo --eps-clip 0.03 --estimator.std-normalization false"),
    "cispo, eps": Case("--advantage-estimator cispo --estimator.eps 0.3"),
    "dapo": Case("--advantage-estimator dapo --calculate-per-token-loss --estimator.eps 0.3", noise=0.5),
    "dapo, overlong": Case(
        "--advantage-estimator dapo --calculate-per-token-loss --estimator.overlong-buffer 6"
        " --estimator.overlong-penalty 0.3 --rollout-max-response-len 14"
    ),
    "rloo": Case("--advantage-estimator rloo --kl-coef 0.2 --ref-load {other}"),
    "ppo": Case(
        "--advantage-estimator ppo --kl-coef 0.2 --ref-load {other} --estimator.gamma 0.9 --estimator.lambd 0.8"
        " --critic-lr 1e-2 --value-clip 0.02 --normalize-advantages",
        rollouts=2,
    ),
    "ppo, warm-up": Case("--advantage-estimator ppo --num-critic-only-steps 1 --lr-decay-style linear", rollouts=3),
    "ppo, loaded critic": Case("--advantage-estimator ppo --critic-load {other}", rollouts=2),
    "ppo, per token": Case("--advantage-estimator ppo --calculate-per-token-loss --entropy-coef 0.1", rollouts=2),
    "reinforce_plus_plus": Case(
        "--advantage-estimator reinforce_plus_plus --estimator.gamma 0.9 --kl-coef 0.2 --ref-load {other}"
    ),
    "reinforce_plus_plus_baseline": Case(
        "--advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.2 --ref-load {other}"
    ),
    "supervised": Case("--loss-type sft_loss"),
    "supervised, per token": Case("--loss-type sft_loss --calculate-per-token-loss --entropy-coef 0.1"),
    "supervised, constant length": Case("--loss-type sft_loss --loss-constant-length 5"),
    # --- the clipped ratio
    "clip": Case("--advantage-estimator rloo --eps-clip 0.05 --use-rollout-logprobs"),
    "clip, higher": Case("--advantage-estimator rloo --eps-clip 0.05 --eps-clip-high 0.2 --use-rollout-logprobs"),
    "clip, only higher": Case("--advantage-estimator rloo --eps-clip-high 0.05 --use-rollout-logprobs"),
    "dual clip": Case("--advantage-estimator rloo --eps-clip 0.3 --eps-clip-c 1.5 --use-rollout-logprobs", noise=0.5),
    "dual clip, sequences": Case("--advantage-estimator gspo --eps-clip 0.3 --eps-clip-c 1.02"),
    "normalized": Case("--advantage-estimator grpo --eps-clip 0.02 --normalize-advantages"),
    "normalized, with KL": Case("--advantage-estimator rloo --kl-coef 0.3 --ref-load {other} --normalize-advantages"),
    "engine's log-probs": Case("--advantage-estimator rloo --use-rollout-logprobs"),
    "engine's log-probs, KL in the reward": Case(
        "--advantage-estimator rloo --use-rollout-logprobs --kl-coef 0.3 --ref-load {other}"
    ),
    "engine's log-probs, KL in the loss": Case(
        f"--advantage-estimator gspo --eps-clip 0.2 --use-rollout-logprobs --kl-loss-coef 0.3 --use-unbiased-kl {KL}"
    ),
    "async": Case("--advantage-estimator rloo --async"),
    "async, not the engine's": Case("--advantage-estimator rloo --async --no-use-rollout-logprobs"),
    "async, corrected": Case("--advantage-estimator rloo --async --use-tis"),
    # --- the reference
    "KL k1": Case(f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --kl-loss-type k1"),
    "KL k2": Case(f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --kl-loss-type k2"),
    "KL low_var_kl": Case(
        f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --kl-loss-type low_var_kl --rollout-temperature 0.3"
    ),
    "KL measured": Case(f"--advantage-estimator grpo {KL} --kl-loss-coef 0"),
    "KL unbiased": Case(f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --use-unbiased-kl"),
    "KL unbiased, low_var_kl": Case(
        f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --use-unbiased-kl --kl-loss-type low_var_kl"
        " --rollout-temperature 0.3"
    ),
    "KL unbiased, sequences": Case(
        f"--advantage-estimator gspo --eps-clip 0.05 {KL} --kl-loss-coef 0.3 --use-unbiased-kl"
    ),
    "KL in the reward k2": Case(
        "--advantage-estimator reinforce_plus_plus --kl-coef 0.2 --ref-load {other} --kl-reward-type k2"
    ),
    "KL in the reward k3": Case("--advantage-estimator rloo --kl-coef 0.2 --ref-load {other} --kl-reward-type k3"),
    "KL in the reward low_var_kl": Case(
        "--advantage-estimator ppo --kl-coef 0.2 --ref-load {other} --kl-reward-type low_var_kl"
        " --kl-loss-type k2 --rollout-temperature 0.3"
    ),
    "KL in the reward, own reference": Case("--advantage-estimator rloo --kl-coef 0.5", rollouts=2),
    "reference renewed": Case(
        f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --ref-update-interval 2", rollouts=3
    ),
    "entropy": Case("--advantage-estimator grpo --entropy-coef 0.2"),
    # --- aggregation
    "per token": Case("--advantage-estimator grpo --calculate-per-token-loss"),
    "per token, KL and entropy": Case(
        f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --calculate-per-token-loss --entropy-coef 0.1"
    ),
    "constant length": Case("--advantage-estimator grpo --loss-constant-length 20"),
    # --- engine and trainer disagree
    "TIS": Case("--advantage-estimator rloo --use-tis"),
    "TIS, bounds": Case("--advantage-estimator rloo --use-tis --tis-threshold 1.1 --tis-threshold-low 0.9"),
    "TIS, entropy and KL": Case(
        f"--advantage-estimator rloo --use-tis --tis-threshold 1.1 --entropy-coef 0.2 {KL} --kl-loss-coef 0.3"
    ),
    "masked tokens": Case(
        "--advantage-estimator rloo --off-policy-correction mask --tis-threshold 1.2 --tis-threshold-low 0.8"
    ),
    "masked sequences": Case(
        "--advantage-estimator rloo --off-policy-correction mask --off-policy-level sequence --tis-threshold 1.5"
    ),
    "truncated sequences": Case(
        "--advantage-estimator gspo --eps-clip 0.05 --off-policy-correction truncate --off-policy-level sequence"
        " --tis-threshold 1.3 --tis-threshold-low 0.5"
    ),
    "geometric": Case(
        "--advantage-estimator rloo --off-policy-correction mask --off-policy-level geometric"
        " --tis-threshold-low 0.9 --tis-threshold 1.1"
    ),
    "sequences left out": Case("--advantage-estimator rloo --off-policy-sequence-delta 0.01"),
    "sequences left out, by the engine": Case(
        "--advantage-estimator rloo --off-policy-sequence-delta 0.01 --use-rollout-logprobs"
    ),
    # --- what must change nothing but the number of micro-batches
    "one sample a micro-batch": Case("--advantage-estimator grpo --entropy-coef 0.1 --max-tokens-per-gpu 1"),
    "four samples a micro-batch": Case("--advantage-estimator grpo --entropy-coef 0.1 --micro-batch-size 4"),
    "recomputed": Case(
        "--advantage-estimator grpo --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "recomputed attention": Case("--advantage-estimator grpo --recompute-activations"),
    "overlapped": Case(
        "--advantage-estimator grpo --overlap-grad-reduce --overlap-param-gather --bucket-size 20000", rollouts=2
    ),
    "overlapped, reference": Case(
        f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --overlap-grad-reduce --overlap-param-gather", rollouts=2
    ),
    "undistributed optimizer": Case("--advantage-estimator grpo --no-use-distributed-optimizer", rollouts=2),
    "undistributed optimizer, small micro-batches": Case(
        "--advantage-estimator ppo --no-use-distributed-optimizer --micro-batch-size 2"
    ),
    # --- batches
    "one step": Case(f"--advantage-estimator grpo {KL} --kl-loss-coef 0.3 --num-steps-per-rollout 1", rollouts=2),
    "rollouts dealt to steps": Case(
        "--advantage-estimator grpo --rollout-batch-size 3 --n-samples-per-prompt 4", rollouts=2
    ),
    "an empty step": Case("--advantage-estimator grpo --lr-decay-style linear", rollouts=2, empty_step=True),
    "an empty step of the critic": Case(
        "--advantage-estimator ppo --lr-decay-style linear", rollouts=2, empty_step=True
    ),
    # --- optimizer and schedule
    "defaults of Adam": Case(
        "--advantage-estimator grpo --weight-decay 0.01 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.999"
    ),
    "SGD": Case("--advantage-estimator grpo --optimizer sgd --sgd-momentum 0.7 --lr 0.05", rollouts=2),
    "no clipping": Case("--advantage-estimator rloo --clip-grad 0 --weight-decay 0"),
    "linear": Case("--advantage-estimator grpo --lr-decay-style linear --lr-warmup-iters 1 --min-lr 1e-3", rollouts=2),
    "cosine": Case(
        "--advantage-estimator grpo --lr-decay-style cosine --lr-warmup-fraction 0.4 --lr-decay-iters 5", rollouts=2
    ),
    "inverse square root": Case("--advantage-estimator grpo --lr-decay-style inverse-square-root", rollouts=2),
}


def make_groups(case: Case, rollout: int, engine: Callable[[Sample], list[float]]) -> list[Group]:
    """Finished groups of random tokens, with one of each oddity that a batch may have.

    Masks with holes, a failed sample, a removed one, a second sample of one rollout, a group of equal rewards,
    rewards with fractions and rewards in a dictionary.

    Args:
        case: What the run is.
        rollout: Number of the rollout, which decides the draw.
        engine: The log-probs of a sample's response tokens under the weights that the engine has.
    """
    rng = np.random.default_rng(1000 + rollout)
    prompts, each = (3, 4) if "--rollout-batch-size 3" in case.flags else (4, 3)
    first = rollout * prompts
    groups = []
    for g in range(prompts):
        prompt = rng.integers(3, 128, rng.integers(2, 6)).tolist()
        samples = [_sample(rng, first + g, (first + g) * each + k, prompt) for k in range(each)]
        groups.append(Group(first + g, samples))
    for sample in groups[1].samples:
        sample.reward = 0.375
    groups[0].samples[1].status = Status.FAILED
    groups[0].samples[1].reward = None
    groups[2].samples[0].remove_sample = True
    groups[2].samples[2].reward = {"score": 0.625, "length": 3.0}
    sibling = _sample(rng, first, 900 + rollout, groups[0].samples[0].tokens[:3])
    sibling.rollout_id = groups[0].samples[0].rollout_id
    groups[0].samples.append(sibling)
    if case.empty_step and rollout == 0:
        for group in groups[2:]:
            for sample in group.samples:
                sample.remove_sample = True
    for group in groups:
        for sample in group.samples:
            exact = engine(sample)
            noise = rng.normal(0, case.noise, len(exact))
            used = sample.loss_mask or [1] * len(exact)
            sample.rollout_log_probs = [
                float(np.float32(x + n)) if m else 0.0 for x, n, m in zip(exact, noise, used, strict=True)
            ]
    return groups


def _sample(rng: np.random.Generator, group: int, index: int, prompt: list[int]) -> Sample:
    length = int(rng.integers(1, 16))
    mask = [int(m) for m in rng.random(length) < 0.8]
    mask[rng.integers(length)] = 1
    return Sample(
        group_index=group,
        index=index,
        rollout_id=index,
        tokens=[*prompt, *rng.integers(3, 128, length).tolist()],
        response_length=length,
        loss_mask=None if index % 4 == 0 else mask,
        reward=float(rng.integers(-8, 9)) / 8,
        status=Status.TRUNCATED if index % 5 == 0 else Status.COMPLETED,
    )


def relative_difference(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> float:
    """How far two sets of trained weights are apart, relative to how far training moved them: the worst tensor.

    What float32 cannot resolve of the weights themselves does not count.
    """
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    worst = 0.0
    for name, weights in theirs.items():
        resolution = 2 * torch.finfo(torch.float32).eps * weights.norm()
        apart = ((ours[name].double() - weights).norm() - resolution).clamp(min=0)
        moved = (weights - start[name]).norm()
        worst = max(worst, float(apart / moved) if apart else 0.0)
    return worst
