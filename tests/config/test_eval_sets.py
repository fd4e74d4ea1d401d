"""Evaluation sets: shared options, options of one set, and error messages."""

from __future__ import annotations

import pytest

from slime.config import config_from_toml
from slime.config.checks import config_notes
from slime.config.eval_sets import eval_sets, evaluation, powers_of_two, rewards_of_sets
from slime.errors import ConfigError
from slime.registry.resolve import components_used

TWO = """
[rollout]
rollout_top_p = 0.9
rollout_stop = ["\\n"]
[evaluation]
eval_prompt_data = [["plain", "a.jsonl"]]
eval_temperature = 0.6
n_samples_per_eval_prompt = 4
[[evaluation.sets]]
name = "own"
path = "b.jsonl"
n-samples = 16
temperature = 1.0
top_p = 0.5
top_k = 20
max_response_len = 7
max_prompt_len = 5
stop = ["x"]
stop_token_ids = [3]
pass_threshold = 0.5
pass_k = [8, 1]
reward = { name = "f1", timeout-s = 5 }
generator = "tool_loop"
input_key = "question"
label_key = "none"
"""


def problems(text: str) -> list[str]:
    config = config_from_toml(text)
    return [*evaluation(config), *rewards_of_sets(config)]


def one_set(more: str) -> str:
    return f'[reward]\nname = "math"\n[[evaluation.sets]]\nname = "own"\npath = "b.jsonl"\n{more}\n'


def test_a_set_overrides_some_options_and_inherits_the_others() -> None:
    plain, own = eval_sets(config_from_toml(TWO))
    assert (plain.name, plain.n_samples, plain.temperature, plain.top_p, plain.stop) == ("plain", 4, 0.6, 0.9, ("\n",))
    assert (plain.input_key, plain.label_key, plain.reward, plain.pass_k) == ("prompt", "label", None, (1, 2, 4))
    assert (own.n_samples, own.temperature, own.top_p, own.top_k) == (16, 1.0, 0.5, 20)
    assert (own.max_response_len, own.max_prompt_len, own.stop, own.stop_token_ids) == (7, 5, ("x",), (3,))
    assert (own.pass_threshold, own.pass_k, own.input_key, own.label_key) == (0.5, (1, 8), "question", None)


def test_greedy_sampling_ignores_top_p_and_top_k_of_training() -> None:
    [greedy] = eval_sets(config_from_toml('rollout-top-p = 0.5\nrollout-top-k = 3\neval-prompt-data = [["a", "f"]]'))
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, -1)


def test_the_run_uses_the_components_of_its_sets() -> None:
    uses = [use for use in components_used(config_from_toml(TWO)) if use.eval_set == "own"]
    assert [(use.slot, use.kind, use.name, use.options) for use in uses] == [
        ("reward[eval.own]", "reward", "f1", {"timeout_s": 5}),
        ("generator[eval.own]", "generator", "tool_loop", {}),
    ]


def test_default_pass_k_are_powers_of_two() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 16, 17)] == [(1,), (1, 2), (1, 2), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)]


def test_sets_survive_a_round_trip_through_a_run_file() -> None:
    config = config_from_toml(TWO)
    assert config_from_toml(config.to_toml()) == config


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("pass_k = [4]", "pass@4 needs at least 4 responses per prompt, got 1"),
        ('[[evaluation.sets]]\nname = "own"\npath = "c.jsonl"', "2 evaluation sets are called 'own'"),
        ('[[evaluation.sets]]\nname = "plugin"\npath = "c.jsonl"', "'plugin' cannot name an evaluation set"),
        ("max_response_len = 100\n[rollout]\nrollout_max_context_len = 64\nrollout_max_response_len = 8", "no room"),
    ],
)
def test_sets_that_cannot_work_are_reported(more: str, message: str) -> None:
    assert [problem for problem in problems(one_set(more)) if message in problem]


def test_a_set_with_its_own_reward_does_not_need_that_of_the_run() -> None:
    text = '[[evaluation.sets]]\nname = "own"\npath = "b.jsonl"\n'
    assert problems(text) == ["[[evaluation.sets]] own needs --reward (or a reward of its own) to score the"
                              " responses"]  # fmt: skip
    assert problems(text + 'reward = "math"\n') == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("temprature = 1.0", "unknown key 'temprature' in the set 'own'. Did you mean temperature?"),
        ("temperature = true", "sets[0].temperature: got true, expected a number"),
        ("temperature = -1.0", "sets[0].temperature: got -1.0, expected at least 0"),
        ("pass_threshold = nan", "sets[0].pass_threshold: got NaN, expected a finite number"),
        ('pass_threshold = "high"', "sets[0].pass_threshold: got 'high', expected a number"),
        ("pass_k = [0]", "sets[0].pass_k[0]: got 0, expected at least 1"),
        ("n_samples = 0", "sets[0].n_samples: got 0, expected at least 1"),
        ("top_k = 0", "got 0, expected at least 1, or -1 for all tokens"),
    ],
)
def test_a_wrong_value_is_reported_with_its_table_and_key(more: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_toml(one_set(more))
    assert message in str(caught.value)


def test_several_greedy_responses_are_noted() -> None:
    notes = config_notes(config_from_toml(one_set("n_samples = 4")))
    assert any("4 responses per prompt are identical at temperature 0" in note for note in notes)
