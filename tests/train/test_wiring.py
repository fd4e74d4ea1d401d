"""From the command line to trained weights: slime's trainer does what the documentation of each flag says.

Each case is a command line. slime's own configuration reads it, and a real Megatron rank trains on samples with
recorded log-probs, as `slime train` would. The same samples go through `tests.train.textbook`, written from the
documentation without slime's code. Weights and all metrics must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.model_folders import Folders
from tests.train.harness import RankLauncher, run_ranks
from tests.train.textbook import TextbookRun, parse_flags
from tests.train.wiring_cases import CASES, Case, make_groups, relative_difference
from torch import Tensor

from slime.config import RunConfig, load_config
from slime.config.options import AlgorithmOptions
from slime.errors import SlimeError
from slime.registry.plugin_set import survey_plugins
from slime.types import Group, Sample

SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "tied": True}
#: of the weights' movement; float32 gives less than a third of it
TOLERANCE = 1e-4
#: flags that change nothing but the number of micro-batches, which is compared too
PACKING = {"max-tokens-per-gpu", "micro-batch-size"}
#: flags that only decide whether the run stops: `test_true_on_policy_mode_trains_or_stops`
REFUSING = {"true-on-policy-mode", "true-on-policy-tolerance"}
#: flags that do not change the policy; `test_predicting.py` and `test_shared_prompts.py` have them
BESIDE = {"enable-mtp-training", "share-prompts"}
#: flags that cannot be left out -> what stands for leaving them out
INSTEAD = {
    "advantage-estimator": {"advantage-estimator": "reinforce_plus_plus"},
    "loss-type": {"advantage-estimator": "rloo"},
    "use-rollout-logprobs": {"use-rollout-logprobs": "false"},
}


class Outcome(NamedTuple):
    """What training left."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]


class Textbooks:
    """Command lines, samples and the textbook's training of each case, computed once."""

    def __init__(self, model: Path, other: Path) -> None:
        self._model, self._other = model, other
        self._made: dict[Case, tuple[list[str], list[list[Group]], Outcome]] = {}

    def __call__(self, case: Case) -> tuple[list[str], list[list[Group]], Outcome]:
        if case not in self._made:
            argv = case.argv(self._model, self._other)
            groups = self._groups(case, argv)
            self._made[case] = argv, groups, textbook_training(parse_flags(argv), groups)
        return self._made[case]

    def _groups(self, case: Case, argv: Sequence[str]) -> list[list[Group]]:
        """Of each rollout; the engine keeps the initial weights."""
        run = TextbookRun(parse_flags(argv))

        def engine(sample: Sample) -> list[float]:
            with torch.no_grad():
                return [float(value) for value in run.score(run.policy, sample)[0]]

        return [make_groups(case, rollout, engine) for rollout in range(case.rollouts)]


def textbook_training(flags: dict[str, str], groups: list[list[Group]]) -> Outcome:
    """What `tests.train.textbook` makes of a command line."""
    run = TextbookRun(flags)
    metrics = [run.train(rollout, number) for number, rollout in enumerate(groups)]
    return Outcome(metrics, run.weights())


@pytest.fixture(scope="module")
def textbooks(model_folder: Folders) -> Textbooks:
    return Textbooks(model_folder("qwen3", **SHAPE), model_folder("qwen3", seed=2, **SHAPE))


def slime_training(launcher: RankLauncher, config: RunConfig, groups: list[list[Group]], run_dir: Path) -> Outcome:
    """What `slime train` makes of these groups, without the processes of a run."""
    from tests.train.critics import backbone, head_of

    from slime.registry.plugin_set import load_plugins
    from slime.rollout.train_batch import TrainBatch
    from slime.run.trainer import build_estimator

    rank = launcher.start(config, *build_estimator(config, run_dir, load_plugins(config.plugins)), run_dir)
    metrics = []
    for number, rollout in enumerate(groups):
        batch = TrainBatch.from_groups(rollout, rollout=number, num_steps=config.batch.steps)
        metrics.append({k: v for k, v in rank.train(batch).items() if not k.startswith("time/")})
    weights = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    if rank.critic is not None:
        weights |= {f"critic.{name}": tensor for name, tensor in backbone(rank).items()}
        weights["critic.head"] = head_of(rank)
    rank.close()
    return Outcome(metrics, weights)


def differences(got: Outcome, expected: Outcome, start: dict[str, Tensor]) -> list[str]:
    """What differs by more than rounding."""
    found = []
    for number, (ours, theirs) in enumerate(zip(got.metrics, expected.metrics, strict=True)):
        for name in sorted(ours.keys() | theirs.keys()):
            pair = ours.get(name), theirs.get(name)
            if None in pair or pair[0] != pytest.approx(pair[1], rel=2e-5, abs=1e-6):
                found.append(f"rollout {number}, {name}: {pair[0]} instead of {pair[1]}")
    apart = relative_difference(got.weights, expected.weights, start)
    return found if apart < TOLERANCE else [*found, f"weights: {apart:.1e} of their movement apart"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.row("A1")
def test_a_command_line_trains_as_the_textbook_does(name: str, textbooks: Textbooks, tmp_path: Path) -> None:
    argv, groups, expected = textbooks(CASES[name])
    [got] = run_ranks(slime_training, 1, load_config(argv), groups, tmp_path, timeout_s=240)
    start = TextbookRun(parse_flags(argv)).weights()
    assert not differences(got, expected, start)


def stopped_or_trained(launcher: RankLauncher, config: RunConfig, groups: list[list[Group]], run_dir: Path) -> Any:
    """The outcome, or the error's text."""
    try:
        return slime_training(launcher, config, groups, run_dir)
    except SlimeError as error:
        return str(error)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [[], ["--true-on-policy-tolerance", "0.1"]], ids=["default", "wide"])
def test_true_on_policy_mode_trains_or_stops(tolerance: list[str], textbooks: Textbooks, tmp_path: Path) -> None:
    argv, groups, expected = textbooks(Case("--advantage-estimator rloo", noise=0.01))
    config = load_config([*argv, "--true-on-policy-mode", *tolerance])
    [got] = run_ranks(stopped_or_trained, 1, config, groups, tmp_path, timeout_s=240)
    if tolerance:
        assert not differences(got, expected, TextbookRun(parse_flags(argv)).weights())
    else:
        assert "trained tokens by more than --true-on-policy-tolerance 0.0001" in got


# --- no flag without a case -------------------------------------------------------------------------


def own_flags(case: Case) -> set[str]:
    """The flags that the case itself states, without dashes."""
    return {word.removeprefix("--").removeprefix("no-") for word in case.flags.split() if word.startswith("--")}


def flags_to_cover() -> dict[str, list[str]]:
    """Every flag of the algorithm section, and `estimator.OPTION` of each shipped estimator -> cases that set it."""
    found = {}
    for name in AlgorithmOptions.model_fields:
        flag = name.replace("_", "-")
        found[flag] = [case for case, one in CASES.items() if flag in own_flags(one)]
    for component in survey_plugins().components("estimator"):
        if component.found.own:
            for option in component.spec.options.model_fields:
                flag, chosen = f"estimator.{option.replace('_', '-')}", f"--advantage-estimator {component.name} "
                cases = [case for case, one in CASES.items() if flag in own_flags(one) and chosen in f"{one.flags} "]
                found[f"{component.name} {flag}"] = cases
    return found


COVERED = flags_to_cover()


def test_every_estimator_has_a_case() -> None:
    shipped = {component.name for component in survey_plugins().components("estimator") if component.found.own}
    tried = {parse_flags(case.flags.split()).get("advantage-estimator") for case in CASES.values()}
    assert tried - {None} == shipped


def test_every_flag_of_the_algorithm_section_has_a_case() -> None:
    assert {flag for flag, cases in COVERED.items() if not cases} == REFUSING | BESIDE


@pytest.mark.slow
@pytest.mark.parametrize("flag", sorted(COVERED.keys() - REFUSING - BESIDE))
def test_leaving_a_flag_out_would_be_noticed(flag: str, textbooks: Textbooks) -> None:
    name = flag.rpartition(" ")[2]
    for case in COVERED[flag]:
        argv, groups, expected = textbooks(CASES[case])
        flags = parse_flags(argv)
        without = {key: value for key, value in flags.items() if key != name} | INSTEAD.get(name, {})
        other = textbook_training(without, groups)
        found = differences(other, expected, TextbookRun(flags).weights())
        if any(text.startswith("weights") for text in found) or (found and name in PACKING):
            return
    pytest.fail(f"--{name} changes no weight in any of {COVERED[flag]}")
