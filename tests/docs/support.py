"""Writes docs/support.md: what is tested, and by which test.

python -m tests.docs.support
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_proof.__main__ import PARTS as PROOF
from benchmarks.gpu_proof.cards import PASSED, Card, read_cards
from tests.engine.test_model_families import NOT_SERVED
from tests.support.tiny_models import FAMILIES
from tests.train.models_table import family_of, layouts_of
from tests.weights.live_engines import TRANSPORTS
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
    "whole runs with two tensor-parallel ranks": (
        "tests/integration/test_without_shops.py::test_a_run_of_two_ranks_without_all_of_them_trains_and_is_profiled"
    ),
    "whole runs with two pipeline stages": (
        "tests/integration/test_nodes.py::test_two_stages_on_one_machine_send_their_weights_and_are_profiled"
    ),
    "LoRA under tensor, sequence, pipeline, context and data parallelism": (
        "tests/train/test_lora.py::test_loss_gradients_and_merged_weights_equal_pefts_formula"
    ),
    "multi-token prediction under parallelism": "tests/train/test_predicting.py::test_a_step_equals_one_of_plain_torch",
}
TRANSPORT_TEST = "tests/weights/test_live_engine.py::test_engine_computes_with_the_weights_that_were_sent"
#: of mixtures of experts and latent attention; whole runs on one machine without a GPU use the transport `tensor`
_MIXTURES = "mixtures, latent attention"
MIXTURES = {"distributed": MODEL_TESTS["sync"], "tensor": MODEL_TESTS["whole runs"], "disk": MODEL_TESTS["sync"]}
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
    "`--sglang-enable-dp-attention`, `--sglang-attn-dp-size`, `--sglang-ep-size`: log-probs and weights": (
        "tests/weights/test_divided_engines.py::"
        "test_ranks_that_divide_requests_or_experts_get_the_weights_and_serve_them"
    ),
    "`--layer-backend fused`": "plugins/fused/tests/test_training.py::test_a_step_of_every_kind_of_model",
    "`--colocate` over two nodes, weights through memory (`tensor`)": (
        "tests/integration/test_nodes.py::test_colocated_over_two_nodes_the_run_computes_the_same"
    ),
    "`--rollout-external-engine-addrs`: engines that somebody else started": (
        "tests/integration/test_external_engines.py::"
        "test_a_run_equals_one_with_an_engine_of_its_own_over_disk_and_broadcast"
    ),
    "`--rollout-quantization fp8`, experts divided among the trainer's ranks": (
        "plugins/quantised/tests/test_gap.py::test_experts_that_ranks_divide_are_quantised_as_those_of_one_rank"
    ),
    "drafts of the model's own layers that engines hold as trained; speculation itself was not run": (
        "tests/weights/test_drafts.py::test_the_engines_drafts_are_those_that_were_trained"
    ),
    "`--disk-delta`, also with an engine that dies": (
        "tests/integration/test_disk_deltas.py::test_a_run_with_deltas_equals_one_without"
    ),
    "two nodes, the engine and the trainer over both": (
        "tests/integration/test_nodes.py::test_a_run_over_two_nodes_computes_what_one_machine_computes"
    ),
}
#: row -> the part of `make gpu-proof` whose card fills its column of GPUs; no part shows the other rows
PROVEN_BY = {
    "dense `tensor`": "sync, tensor",
    "dense `distributed`": "sync, distributed",
    "`--colocate`": "colocated loop",
}
#: parts of `make gpu-proof` -> what they show
SHOWN_BY = {
    "three-way": "engine, trainer and transformers give the same tokens the same log-probs",
    "sync": "an engine has the weights that were sent",
    "colocated": "engine and trainer take turns on one GPU; its memory",
    "engine": "tokens per second of SGLang alone, through slime's client, and in the loop",
    "training": "the speed of a training step, by kind of layers",
    "quickstart": "the quickstart learns",
    "long": "Qwen2.5-1.5B's shape trains on responses of 8,192 tokens",
}
_NOT_MEASURED = "not measured"
_HEAD = """\
# Support matrix

What is tested on a CPU names its test; what is not tested says so. **On a GPU, only what a card of `make gpu-proof`
says was measured**, and before there were cards [the speed of training steps](measurements.md#gpu) of one rank. The
other code paths exist. The models are small and random, with every feature of the published ones ([what is
checked](models.md#what-is-checked)). `python -m tests.docs.support` writes this page.
"""


def written(cards: Sequence[Card]) -> str:
    """The page, with the cards of GPUs that are checked in."""

    def on_gpu(row: str) -> str:
        return next((_proof(card) for card in reversed(cards) if card.part == PROVEN_BY.get(row)), _NOT_MEASURED)

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
    lines += [f"| {what} | {_code(test)} | {on_gpu(what)} |" for what, test in LAYOUT_TESTS.items()]
    lines += ["", "## Transports of weights", "", "| models | transport | tested on a CPU by | GPU |"]
    lines += ["| --- | --- | --- | --- |"]
    for models, tests in (("dense", dict.fromkeys(TRANSPORTS, TRANSPORT_TEST)), (_MIXTURES, MIXTURES)):
        rows = [(name, _code(tests[name]), on_gpu(f"{models} `{name}`")) for name in TRANSPORTS]
        lines += [f"| {models} | `{name}` | {test} | {gpu} |" for name, test, gpu in rows]
    lines += ["", "## Kinds of runs", "", "| run | tested on a CPU by | GPU |", "| --- | --- | --- |"]
    lines += [f"| {what} | {_code(test)} | {on_gpu(what)} |" for what, test in MODES.items()]
    lines += _gpu_table(cards)
    return "\n".join(lines) + "\n"


def _gpu_table(cards: Sequence[Card]) -> list[str]:
    """The newest card of each part on each kind of GPU."""
    columns = ["part", "shows", "GPU", "result", "numbers", "peak GiB", "date, commit"]
    lines = ["", "## `make gpu-proof`", ""]
    lines += ["Each part leaves a card: command, commit, date, versions, numbers, and the peak memory of a GPU."]
    lines += ["Those in `benchmarks/gpu_proof/cards` fill this table and the columns above."]
    lines += ["", f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for part in PROOF:
        newest = {card.device: card for card in cards if card.part == part.name}
        shows = f"| {part.name} | {SHOWN_BY[part.group]}"
        if not newest:
            lines.append(f"{shows} | {_NOT_MEASURED} | {' | '.join([''] * 4)} |".replace("  ", " "))
        for card in newest.values():
            rows = ("; ".join(f"{name} {value}" for name, value in row.items()) for row in card.numbers)
            cells = [card.device, _cell(card.result), _cell("<br>".join(rows)), f"{card.peak_memory_gib:.2f}"]
            lines.append(f"{shows} | {' | '.join(cells)} | {card.date}, {card.commit} |")
    return lines


def _proof(card: Card) -> str:
    return f"{'passed' if card.result == PASSED else 'failed'} on {card.device}, {card.date}"


def _cell(text: str) -> str:
    return text.replace("|", "/")


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
    return f"| `{model}` | {' | '.join(cells)} | {_NOT_MEASURED} |"


def _code(test: str | None) -> str:
    if test is None:
        return "not tested"
    file, _, name = test.partition("::")
    return f"`{file}`: {name.removeprefix('test_').replace('_', ' ')}"


if __name__ == "__main__":
    PAGE.write_text(written(read_cards()), encoding="utf-8")
