"""What is changed, and which tests should notice: quick ones first."""

from __future__ import annotations

from dataclasses import dataclass

#: from command lines to trained weights; the slowest and the last resort
WIRING = "tests/train/test_wiring.py"


@dataclass(frozen=True)
class Area:
    """Files and their tests, as patterns from the root of the repository."""

    files: tuple[str, ...]
    #: run one after the other until one fails; of the first, those without engines and ranks before the others
    tests: tuple[tuple[str, ...], ...]


AREAS: dict[str, Area] = {
    "estimators": Area(
        ("plugins/estimators/slime_estimators/*.py",),
        (
            ("tests/estimators",),
            (
                "tests/oracles/test_advantages.py",
                "tests/oracles/test_policy_losses.py",
                "tests/train/test_clip_range.py",
            ),
            (WIRING,),
        ),
    ),
    "losses": Area(
        (
            "core/slime/train/loss.py",
            "core/slime/train/off_policy.py",
            "core/slime/train/advantages.py",
            "core/slime/train/step.py",
            "core/slime/train/rank.py",
            "core/slime/registry/estimator_contract.py",
        ),
        (
            (
                "tests/train/test_objective.py",
                "tests/train/test_ratio.py",
                "tests/train/test_correction.py",
                "tests/train/test_whitening.py",
                "tests/train/test_value_loss.py",
                "tests/train/test_advantages.py",
                "tests/train/test_engine_log_probs.py",
                "tests/train/test_clip_range.py",
                "tests/train/test_rank_alone.py",
                "tests/testing/test_estimator_contract.py",
            ),
            (WIRING,),
            (
                "tests/train/test_edges.py",
                "tests/train/test_rank.py",
                "tests/train/test_reference.py",
                "tests/train/test_critic_checkpoint.py",
                "tests/train/test_offload.py",
            ),
            ("tests/oracles",),
            ("tests/train/test_layouts.py", "tests/train/test_families.py"),
            ("tests/integration/test_algorithms.py", "plugins/quantised/tests"),
        ),
    ),
    "packing": Area(
        (
            "core/slime/train/packing.py",
            "core/slime/train/schedule.py",
            "core/slime/train/output_layer.py",
            "core/slime/train/micro_batches.py",
            "core/slime/rollout/train_batch.py",
        ),
        (
            (
                "tests/rollout/test_train_batch.py",
                "tests/rollout/test_loss_weights.py",
                "tests/train/test_batch_plan.py",
                "tests/train/test_shared_prompts.py",
                "tests/train/test_packing.py",
                "tests/train/test_splitting.py",
                "tests/train/test_logprob.py",
                "tests/train/test_flops.py",
                "tests/train/test_rank_alone.py",
            ),
            (
                "tests/train/test_output_layer.py",
                "tests/train/test_families.py",
                WIRING,
            ),
            ("tests/train/test_layouts.py",),
        ),
    ),
    "weights": Area(
        ("core/slime/weights/*.py", "core/slime/kit/models/*.py", "plugins/families/slime_families/*.py"),
        (
            ("tests/weights",),
            ("tests/train/test_families.py",),
            ("tests/train/test_rank.py", "tests/train/test_layouts.py"),
        ),
    ),
    "ledger": Area(
        ("core/slime/rollout/ledger.py", "core/slime/rollout/collect.py", "core/slime/rollout/batch_in_progress.py"),
        (
            (
                "tests/rollout/test_ledger.py",
                "tests/rollout/test_staleness.py",
                "tests/rollout/test_exactly_once.py",
                "tests/rollout/test_collect.py",
                "tests/rollout/test_first_finished.py",
                "tests/rollout/test_source.py",
                "tests/rollout/test_make_rollout.py",
                "tests/rollout/test_make_rollout_filters.py",
                "tests/rollout/test_partial_engines.py",
            ),
            ("tests/rollout",),
        ),
    ),
    "rewards": Area(
        (
            "plugins/rewards/slime_rewards/exact_match.py",
            "plugins/rewards/slime_rewards/extraction.py",
            "plugins/rewards/slime_rewards/f1.py",
            "plugins/rewards/slime_rewards/format.py",
            "plugins/rewards/slime_rewards/json_schema.py",
            "plugins/rewards/slime_rewards/length.py",
            "plugins/rewards/slime_rewards/math_answer.py",
            "plugins/rewards/slime_rewards/multiple_choice.py",
            "plugins/rewards/slime_rewards/code_tests.py",
            "core/slime/rollout/scoring.py",
        ),
        (
            (
                "tests/rollout/test_rewards.py",
                "tests/rollout/test_rewards_combined.py",
                "tests/rewards/test_answer_tables.py",
                "tests/rewards/test_format_tables.py",
                "tests/rewards/test_verdict_tables.py",
                "tests/rewards/test_answers.py",
                "tests/rewards/test_math.py",
                "tests/rewards/test_json_schema.py",
                "tests/rewards/test_code.py",
            ),
            ("tests/rewards", "tests/rollout"),
        ),
    ),
}
