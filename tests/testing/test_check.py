"""The contract kit on installed components: problems, and notes on what cannot be checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from slime.errors import ConfigError
from slime.registry.component import Component
from slime.registry.plugin_set import survey_plugins
from slime.testing import load_module_as_plugin
from slime.testing.check import check_component

HEAD = """
    import asyncio
    from pathlib import Path
    import slime.plugin as sp
    from slime.kit.readers import PromptFile
    from slime.errors import ConfigError

    slime_api = 1
    KEYS = {"input_key": "prompt", "label_key": "label", "metadata_key": "metadata"}

    class Options(sp.Options):
        limit: float = 1.0

    class NeedsKey(sp.Options):
        key: str

    class NeedsFile(sp.Options):
        rows_file: Path
"""
REWARD = """
    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="it", factory="{module}:It", options={options})]

    class It:
        def __init__(self, options, context):
            {init}

        async def score(self, samples):
            return [{reward} for sample in samples]
"""
SOURCE = """
    @sp.hookimpl
    def slime_register_datasources():
        return [sp.DataSourceSpec(name="it", factory="{module}:It", options=NeedsFile)]

    class It:
        def __init__(self, options, context):
            self.file, self.next = PromptFile(str(options.rows_file), **KEYS), 0
            self.count = context.config.rollout.n_samples_per_prompt

        def group(self, number):
            row, first = self.file[number % len(self.file)], number * self.count
            make = lambda i: sp.Sample(group_index=number, index=i, prompt=row.prompt, label=row.label, tokens=[1])
            return sp.Group(number, [make(i) for i in range(first, first + self.count)])

        def take(self, n):
            first, self.next = self.next, self.next + n
            return [self.group(number) for number in range(first, self.next)]

        def state_dict(self):
            return {{"next": self.next}}

        def load_state_dict(self, state):
            self.next = state["next"]
"""
Make = Callable[..., Component]


@pytest.fixture
def component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`component(init=..., reward=..., options=...)`: the one component of a module that was just written."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(
        body: str = REWARD, *, init: str = "pass", reward: str = "sp.Reward(1.0)", options: str = "Options"
    ) -> Component:
        module = f"kit_checked_{len(made)}"
        made.append(module)
        text = dedent(HEAD) + dedent(body).format(module=module, init=init, reward=reward, options=options)
        (tmp_path / f"{module}.py").write_text(text)
        [only] = load_module_as_plugin(module).components
        return only

    yield make
    for module in made:
        sys.modules.pop(module, None)


def test_a_good_component_has_neither_problems_nor_notes(component: Make) -> None:
    checked = check_component(component())
    assert (checked.problems, checked.notes) == ([], [])
    assert "gives one finite reward per sample" in checked.kept


def test_a_broken_rule_is_a_problem_with_the_rules_name(component: Make) -> None:
    [problem] = check_component(component(reward="sp.Reward(float('nan'))")).problems
    assert problem.startswith("gives one finite reward per sample: It.score, given 7 ordinary samples, returned value")


def test_a_class_that_cannot_be_built_is_a_problem(component: Make) -> None:
    [problem] = check_component(component(init="self.x = 1 / 0")).problems
    assert "ZeroDivisionError" in problem


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"options": "NeedsKey"}, "options without defaults"),
        ({"init": "raise ConfigError('say --judge-url')"}, "say --judge-url"),
        ({"init": "open('/nowhere/judge.txt')"}, "/nowhere/judge.txt"),
        ({"reward": "sp.Reward(sample.metadata['unit'])"}, "KeyError: 'unit'"),
    ],
)
def test_a_component_that_needs_data_is_a_note(component: Make, settings: dict[str, str], note: str) -> None:
    checked = check_component(component(**settings))
    assert checked.problems == []
    assert [note in line for line in checked.notes] == [True]


def test_options_may_be_given(component: Make) -> None:
    assert check_component(component(options="NeedsKey"), {"key": "x"}).notes == []
    assert check_component(component(init="self.x = 1 / options.limit"), {"limit": 0.0}).problems != []


def test_wrong_options_raise_an_error(component: Make) -> None:
    with pytest.raises(ConfigError, match="limt"):
        check_component(component(), {"limt": 1})


def test_a_data_source_that_needs_a_file_gets_one(component: Make) -> None:
    checked = check_component(component(SOURCE))
    assert (checked.problems, checked.notes) == ([], [])
    assert len(checked.kept) == 6


def test_the_numbers_of_a_family_are_compared_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real comparisons are in `tests/train/test_families.py`; here only what becomes of their result."""
    family = survey_plugins().find("family", "qwen3")
    asked: list[str] = []

    def compare(name: str) -> None:
        asked.append(name)
        raise error

    monkeypatch.setattr("slime.testing.check.assert_family_matches_transformers", compare)
    error: Exception = AssertionError("TP=2: log-probs differ")
    assert check_component(family).problems == asked == []
    assert check_component(family, numbers=True).problems == ["computes what transformers does: TP=2: log-probs differ"]
    error = ValueError("transformers has no class")
    checked = check_component(family, numbers=True)
    assert (checked.problems, checked.notes) == ([], ["not compared with transformers: transformers has no class"])
    assert asked == ["families/qwen3"] * 2
    assert check_component(survey_plugins().find("reward", "exact_match"), numbers=True).notes == []
    assert len(asked) == 2
