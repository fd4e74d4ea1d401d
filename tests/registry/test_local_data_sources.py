"""`--data-source-path`: subclasses of the documented base classes, and classes of other frameworks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tests.registry.local_runs import build, run_config, write, write_prompts

from slime.data import RolloutDataSource, RolloutDataSourceWithBuffer, Sample
from slime.errors import CheckpointError, DataError, PluginContractError
from slime.kit.readers import PromptDataset
from slime.plugin import Group, Status
from slime.registry.contracts import check_groups, check_state

pytestmark = pytest.mark.usefixtures("probed_here")

DOCUMENTED = '''
    from slime.data import RolloutDataSource, Sample

    class RolloutDataSource:
        def __init__(self, dataset, args):
            self.dataset = dataset
            self.args = args

        def get_samples(self, num_samples: int) -> list[Sample]:
            """Fetch prompts from dataset."""
            return [Sample(prompt=p) for p in self.dataset.sample(num_samples)]

        def add_samples(self, samples: list[Sample]) -> None:
            """Called after generation (no-op by default)."""
            pass
'''
DOCUMENTED_BUFFER = '''
    from slime.data import RolloutDataSource

    class RolloutDataSourceWithBuffer(RolloutDataSource):
        def __init__(self, dataset, args):
            super().__init__(dataset, args)
            self.buffer = []

        def add_samples(self, samples) -> None:
            """Store generated samples for reuse."""
            self.buffer.extend(samples)

        def buffer_filter(self, args, buffer, num_samples):
            """Custom selection logic."""
            # Example: prioritized sampling based on reward
            sorted_buffer = sorted(buffer, key=lambda s: s.reward, reverse=True)
            return sorted_buffer[:num_samples]
'''
DERIVED = """
    from slime.data import RolloutDataSource

    class Mine(RolloutDataSource):
        pass
"""


def make(folder: Path, source: str, **data: Any) -> Any:
    path = write(folder, "source.py", source)
    prompts = write_prompts(folder)
    return build(
        run_config(data={"data_source_path": str(path), "prompt_data": str(prompts)} | data), "datasource", folder
    )


def take(source: Any, n: int) -> list[Group]:
    groups: list[Group] = source.take(n)
    check_groups(groups, n, 2)
    check_state(source.state_dict())
    return groups


def prompts(groups: list[Group]) -> list[Any]:
    return [group.samples[0].prompt for group in groups]


@pytest.mark.slow
@pytest.mark.parametrize("source", [DOCUMENTED, DOCUMENTED_BUFFER, DERIVED])
@pytest.mark.row("D4")
def test_documented_classes_provide_prompts_with_labels(tmp_path: Path, source: str) -> None:
    groups = take(made := make(tmp_path, source), 4)
    assert prompts(groups) == ["0+1=", "1+1=", "2+1=", "0+1="]
    assert [group.samples[1].label for group in groups] == ["1", "2", "3", "1"]
    assert groups[2].samples[0].tokens == [ord(letter) for letter in "2+1="]
    assert [sample.index for group in take(made, 1) for sample in group.samples] == [8, 9]


def test_dataset_and_args_are_set_after_a_constructor_without_parameters(tmp_path: Path) -> None:
    source = """
        from slime.data import RolloutDataSourceWithBuffer

        class Mine(RolloutDataSourceWithBuffer):
            def __init__(self):
                self.buffer = []

            def get_samples(self, num_samples):
                assert self.args.n_samples_per_prompt == 2
                return super().get_samples(num_samples)
    """
    assert prompts(take(make(tmp_path, source), 2)) == ["0+1=", "1+1="]


@pytest.mark.row("D5")
def test_a_buffer_filter_method_becomes_the_runs_filter(tmp_path: Path) -> None:
    path = write(tmp_path, "source.py", DOCUMENTED_BUFFER)
    config = run_config(data={"data_source_path": str(path), "prompt_data": str(write_prompts(tmp_path))})
    assert config.rollout.buffer_filter == config.data.data_source
    buffer = [Group(i, [Sample(reward=reward), Sample(reward=0.0)]) for i, reward in enumerate((0.1, 0.9, 0.5))]
    assert build(config, "buffer_filter", tmp_path).select(buffer, 2).keep == [1, 2]


def test_an_inherited_buffer_filter_is_ignored(tmp_path: Path) -> None:
    source = "from slime.data import RolloutDataSourceWithBuffer\nclass Mine(RolloutDataSourceWithBuffer): ..."
    path = write(tmp_path, "source.py", source)
    assert run_config(data={"data_source_path": str(path)}).rollout.buffer_filter is None


def test_a_class_may_return_lists_of_samples_per_prompt(tmp_path: Path) -> None:
    source = """
        import copy
        from slime.data import Sample

        class Mine:
            def __init__(self, args):
                self.args, self.given, self.shown = args, 0, []

            def get_samples(self, n):
                one = Sample(prompt=f"p{self.given}", label="x")
                self.given += 1
                return [[copy.deepcopy(one) for _ in range(self.args.n_samples_per_prompt)]]

            def add_samples(self, groups):
                self.shown += [len(group) for group in groups]

            def save(self, rollout_id): raise AssertionError("slime's checkpoints hold the state")
            def load(self, rollout_id): raise AssertionError("slime's checkpoints hold the state")
    """
    made = make(tmp_path, source)
    groups = take(made, 3)
    assert prompts(groups) == ["p0", "p1", "p2"]
    made.generated(groups)
    assert made._source.shown == [2, 2, 2]


def test_samples_with_one_group_index_are_one_prompt(tmp_path: Path) -> None:
    source = """
        from slime.data import Sample

        class Mine:
            def get_samples(self, n):
                done = dict(tokens=[97, 98, 99], response="c", response_length=1, status=Sample.Status.COMPLETED)
                old = [Sample(group_index=5, index=i, prompt="ab", reward=1.0, **done) for i in (10, 11)]
                return [*old, Sample(prompt="xy")]
    """
    first, second = take(make(tmp_path, source), 2)
    assert [(s.tokens, s.response, s.reward, s.status) for s in first.samples] == [
        ([97, 98], "", None, Status.PENDING)
    ] * 2
    assert (first.index, second.index, second.samples[0].prompt) == (0, 1, "xy")


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_source_gives_the_same_next_groups(tmp_path: Path, shuffle: bool) -> None:
    one = make(tmp_path, DOCUMENTED_BUFFER, rollout_shuffle=shuffle)
    take(one, 2)
    two = make(tmp_path, DOCUMENTED_BUFFER, rollout_shuffle=shuffle)
    two.load_state_dict(check_state(one.state_dict()))
    assert take(two, 5) == take(one, 5)


@pytest.mark.slow
def test_the_state_of_the_class_is_saved_and_a_missing_one_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        from slime.data import Sample

        class Mine:
            def __init__(self): self.n = 0
            def get_samples(self, num):
                self.n += 1
                return [Sample(prompt=str(self.n))]
"""
    keeps = source + (
        "            def state_dict(self): return {'n': self.n}\n"
        "            def load_state_dict(self, state): self.n = state['n']\n"
    )
    for text, expected in ((keeps, "3"), (source, "1")):
        one, two = make(tmp_path, text), make(tmp_path, text)
        take(one, 2)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            two.load_state_dict(check_state(one.state_dict()))
        assert prompts(take(two, 1)) == [expected]
        assert ("saves no state" in caplog.text) is (text is source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("None", "returned a NoneType from get_samples"),
        ("[]", r"returned nothing from get_samples\(1\)"),
        ("['text']", "returned a str in the list of get_samples"),
        ("[[]]", "returned an empty list in the list"),
    ],
)
def test_results_that_are_not_samples_are_named(tmp_path: Path, answer: str, message: str) -> None:
    made = make(tmp_path, f"class Mine:\n    def get_samples(self, n): return {answer}")
    with pytest.raises(PluginContractError, match=message):
        made.take(1)


def test_a_prompt_that_is_too_long_names_the_class(tmp_path: Path) -> None:
    source = """
        from slime.data import Sample

        class Mine:
            def get_samples(self, n): return [Sample(prompt="x" * 9)]
    """
    path = write(tmp_path, "source.py", source)
    config = run_config(data={"data_source_path": str(path)}, rollout={"rollout_max_prompt_len": 8})
    with pytest.raises(DataError, match=r"get_samples of source.py:Mine: the prompt has 9 tokens, expected at most 8"):
        build(config, "datasource", tmp_path).take(1)


def test_rows_that_share_a_prompt_are_not_confused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"  # its reader gives equal strings of one character as one object
    table = pyarrow.table({"prompt": ["a", "a", "b", "b"], "label": ["1", "2", "3", "3"]})
    pyarrow.parquet.write_table(table, path)
    dataset = PromptDataset(path, input_key="prompt", label_key="label")
    [first, _, third, _] = dataset.sample(4)
    row = dataset.row_of(third)
    assert row is not None and row.label == "3"
    with pytest.raises(DataError, match=r"row 0 and .*row 1 have the same prompt 'a' with different labels"):
        dataset.row_of(first)


def test_a_dataset_returns_rows_and_prompts_and_tracks_its_position(tmp_path: Path) -> None:
    path = write_prompts(tmp_path)
    dataset = PromptDataset(path, input_key="prompt", label_key="label")
    assert (len(dataset), dataset[2].label) == (3, "3")
    [first, second] = dataset.sample(2)
    row = dataset.row_of(second)
    assert row is not None
    assert (row.label, dataset.row_of("".join(["1+1", "="]))) == ("2", None)
    state = dataset.state_dict()
    assert (state["streams"][0]["epoch"], state["streams"][0]["position"]) == (0, 2)
    with pytest.raises(CheckpointError, match="in a file of 4 rows"):
        dataset.load_state_dict({"streams": [{**state["streams"][0], "rows": 4}], "credits": [0]})
    assert first == "0+1="


def test_the_base_classes_work_without_a_run(tmp_path: Path) -> None:
    dataset = PromptDataset(write_prompts(tmp_path), input_key="prompt", label_key="label")
    source = RolloutDataSourceWithBuffer(dataset, args=None)
    samples = source.get_samples(2)
    source.add_samples(samples)
    assert source.buffer_filter(None, source.buffer, 1) == samples[:1]
    other = RolloutDataSourceWithBuffer(None, args=None)
    other.load_state_dict(source.state_dict())
    assert other.buffer == samples
    with pytest.raises(ValueError, match="there is no dataset"):
        RolloutDataSource(None, None).get_samples(1)
