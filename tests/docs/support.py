"""Writes docs/support.md: what is tested, and by which test.

python -m tests.docs.support
"""

from __future__ import annotations

from pathlib import Path

from tests.engine.test_model_families import NOT_SERVED
from tests.support.tiny_models import FAMILIES
from tests.train.models_table import family_of, layouts_of
from tests.weights.test_live_engine import TRANSPORTS
from tests.weights.test_live_mixtures import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
AXES = ("TP", "PP", "CP", "EP", "ETP")
#: columns of the table of models -> the test that fills them
MODEL_TESTS = {
    "parallelism": "tests/train/test_families.py::test_a_family_computes_what_transformers_does",
    "engine": "tests/engine/test_model_families.py::test_an_engine_computes_what_transformers_computes",
    "sync": (
        "tests/weights/test_live_mixtures.py::test_a_checked_sync_leaves_the_engine_with_the_weights_that_were_sent"
    ),
    "whole runs": "tests/integration/test_every_family.py::test_a_family_takes_two_grpo_steps",
}
#: what a row is about -> the test
LAYOUT_TESTS = {
    "loss and gradients of every layout and aggregation equal those of one rank": (
        "tests/train/test_layouts.py::test_loss_and_gradients_equal_those_of_one_rank"
    ),
    "whole rollouts of training equal those of one rank": (
        "tests/train/test_layouts.py::test_training_equals_that_of_one_rank"
    ),
    "checkpoints are continued under another layout": (
        "tests/train/test_checkpoint_io.py::test_loading_continues_exactly"
    ),
    "whole runs with two tensor-parallel or pipeline ranks": (
        "tests/integration/test_runs.py::test_the_loop_runs_on_two_ranks"
    ),
    "LoRA under tensor, sequence, pipeline, context and data parallelism": (
        "tests/train/test_lora.py::test_loss_gradients_and_merged_weights_equal_pefts_formula"
    ),
    "multi-token prediction under parallelism": "tests/train/test_predicting.py::test_a_step_equals_one_of_plain_torch",
}
TRANSPORT_TEST = "tests/weights/test_live_engine.py::test_engine_computes_with_the_weights_that_were_sent"
#: of mixtures of experts and latent attention; whole runs on one machine without a GPU use the transport `tensor`
MIXTURES = {"distributed": MODEL_TESTS["sync"], "tensor": MODEL_TESTS["whole runs"], "disk": None}
MODES = {
    "synchronous run": (
        "tests/integration/test_runs.py::test_a_synchronous_run_trains_syncs_evaluates_saves_and_ends_cleanly"
    ),
    "`--async`": (
        "tests/integration/test_runs.py::test_an_asynchronous_run_generates_ahead_and_trains_on_every_rollout_in_order"
    ),
    "`--colocate`": (
        "tests/integration/test_colocation.py::"
        "test_a_colocated_run_frees_memory_and_computes_the_same_also_when_its_engine_is_lost"
    ),
    "`--deterministic`, killed and resumed": (
        "tests/integration/test_runs.py::test_a_resumed_deterministic_run_equals_an_uninterrupted_one_to_the_bit"
    ),
    "`--true-on-policy-mode`": (
        "tests/integration/test_true_on_policy.py::test_engine_and_trainer_agree_after_weight_updates"
    ),
    "a critic (PPO)": "tests/integration/test_algorithms.py::test_algorithms_train_on_the_real_engines",
    "`--lora-rank`": "tests/integration/test_lora.py::test_the_engine_computes_with_merged_adapters",
    "`--use-rollout-routing-replay`": (
        "tests/integration/test_routing_replay.py::test_replay_closes_the_gap_that_other_experts_make"
    ),
    "engines and router that die": (
        "tests/integration/test_engine_recovery.py::"
        "test_engines_and_router_are_restarted_and_no_sample_is_lost_or_of_old_weights"
    ),
    "`--use-fault-tolerance`: a rank that dies": (
        "tests/integration/test_restarts.py::test_a_killed_trainer_rank_restarts_the_run"
    ),
    "supervised fine-tuning": (
        "tests/integration/test_runs.py::test_supervised_fine_tuning_starts_no_engine_and_lowers_the_loss"
    ),
    "tensor-parallel engines": "tests/engine/test_model_families.py::test_two_ranks_compute_what_transformers_computes",
    "several machines": None,
}
_HEAD = """\
# Support matrix

What is tested on a CPU names its test; what is not tested says so. **On a GPU, only training steps of one
rank were measured** ([their speed](measurements.md#gpu), not their numbers): the other code paths exist, and `make
gpu-proof` is the program that will measure them. The models are small and random, with every feature of the published
ones ([what is checked](models.md#what-is-checked)). `python -m tests.docs.support` writes this page.
"""


def written() -> str:
    """The page."""
    lines = [_HEAD, "## Models and parallelism", ""]
    lines += [
        "Log-probs, and weights after an optimizer step, compared with transformers. The layouts themselves, and the",
        "differences, are in [Models](models.md#what-is-checked).",
        "",
    ]
    columns = ["one rank", *AXES, "engine", "sync", "whole runs", "GPU"]
    lines += [f"| small model | {' | '.join(columns)} |", f"| --- | {' | '.join(['---'] * len(columns))} |"]
    lines += [_row(model) for model in FAMILIES]
    lines += ["", 'A column is filled by one test; "no" means that the test does not cover it:', ""]
    lines += [f"- {what}: {_code(test)}" for what, test in MODEL_TESTS.items()]
    lines += ["", "## Layouts", "", "| what | tested on a CPU by | GPU |", "| --- | --- | --- |"]
    lines += [f"| {what} | {_code(test)} | not measured |" for what, test in LAYOUT_TESTS.items()]
    lines += ["", "## Transports of weights", "", "| models | transport | tested on a CPU by | GPU |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [f"| dense | `{name}` | {_code(TRANSPORT_TEST)} | not measured |" for name in TRANSPORTS]
    lines += [
        f"| mixtures, latent attention | `{name}` | {_code(MIXTURES[name])} | not measured |" for name in TRANSPORTS
    ]
    lines += ["", "## Kinds of runs", "", "| run | tested on a CPU by | GPU |", "| --- | --- | --- |"]
    lines += [f"| {what} | {_code(test)} | not measured |" for what, test in MODES.items()]
    return "\n".join(lines) + "\n"


def named_tests() -> list[str]:
    """Every test that the page names."""
    found = [*MODEL_TESTS.values(), *LAYOUT_TESTS.values(), TRANSPORT_TEST, *MODES.values()]
    return [test for test in found if test is not None]


def _row(model: str) -> str:
    axes = {part.partition("=")[0] for layout in layouts_of(model) for part in layout.split() if "=" in part}
    family = family_of(model)
    cells = ["yes", *("yes" if axis in axes else "no" for axis in AXES)]
    cells.append("not served" if model in NOT_SERVED else "yes")
    cells.append("yes" if model in PARTS else "no")
    cells.append("yes" if model == family and model not in NOT_SERVED else "no")
    return f"| `{model}` | {' | '.join(cells)} | not measured |"


def _code(test: str | None) -> str:
    if test is None:
        return "not tested"
    file, _, name = test.partition("::")
    return f"`{file}`: {name.removeprefix('test_').replace('_', ' ')}"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
