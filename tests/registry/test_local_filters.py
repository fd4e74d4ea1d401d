"""`--buffer-filter-path`, `--dynamic-sampling-filter-path`, sample filters and reward post-processing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.registry.local_runs import build, run_config, write

from slime.errors import PluginContractError
from slime.plugin import Group, Sample, Selection, Status
from slime.registry.contracts import check_selection

pytestmark = pytest.mark.usefixtures("probed_here")

BY_REWARD = """
    def buffer_filter(args, buffer, num_samples):
        sorted_buffer = sorted(buffer, key=lambda s: s.reward, reverse=True)
        return sorted_buffer[:num_samples]
"""


def groups(*rewards: list[float]) -> list[Group]:
    return [
        Group(i, [Sample(group_index=i, reward=reward, status=Status.COMPLETED) for reward in each])
        for i, each in enumerate(rewards)
    ]


def select(folder: Path, source: str, buffer: list[Group], want: int, key: str = "buffer_filter") -> Selection:
    path = write(folder, "filters.py", source)
    config = run_config(rollout={f"{'dynamic_' if key == 'sampling_filter' else ''}{key}_path": str(path)})
    return check_selection(build(config, key, folder).select(buffer, want), len(buffer), want)


def test_the_documented_filter_over_samples_keeps_the_best_groups(tmp_path: Path) -> None:
    buffer = groups([0.0, 0.1], [0.9, 0.0], [0.5, 0.4], [0.2, 0.2])
    assert select(tmp_path, BY_REWARD, buffer, 2) == Selection([1, 2])


def test_a_filter_with_a_rollout_id_works_on_groups(tmp_path: Path) -> None:
    source = """
        def pop_first(args, rollout_id, buffer, num_samples):
            assert rollout_id is None and num_samples == 2
            taken = buffer[:num_samples]
            del buffer[:num_samples]
            return taken
    """
    assert select(tmp_path, source, groups([0.0], [1.0], [2.0]), 2) == Selection([0, 1])


def test_copies_of_samples_are_refused(tmp_path: Path) -> None:
    source = "def buffer_filter(buffer): return [s.from_dict(s.to_dict()) for s in buffer]"
    with pytest.raises(PluginContractError, match="not in the buffer, expected objects of the buffer"):
        select(tmp_path, source, groups([0.0]), 1)


def test_the_kernel_refuses_too_many_groups(tmp_path: Path) -> None:
    with pytest.raises(PluginContractError, match="kept 2 groups, expected at most 1"):
        select(tmp_path, "def f(rollout_id, buffer): return buffer", groups([0.0], [1.0]), 1)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ("keep", "keep_spread"),
        ("__import__('numpy').bool_(keep)", "keep_spread"),
        ("__import__('types').SimpleNamespace(keep=keep, reason=f'all {samples[0].reward}')", "all 1.0"),
    ],
)
def test_a_sampling_filter_drops_with_its_reason(tmp_path: Path, verdict: str, reason: str) -> None:
    source = f"""
        def keep_spread(args, samples, **kwargs):
            keep = len({{s.reward for s in samples}}) > 1
            return {verdict}
    """
    buffer = groups([1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0])
    assert select(tmp_path, source, buffer, 2, "sampling_filter") == Selection([1, 2], {0: reason})


def test_a_missing_return_value_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PluginContractError, match="returned a NoneType, expected True, False"):
        select(tmp_path, "def f(args, samples): pass", groups([1.0]), 1, "sampling_filter")


def test_one_file_may_hold_both_filters(tmp_path: Path) -> None:
    source = BY_REWARD + "\n    def dynamic_sampling_filter(args, samples): return False"
    path = write(tmp_path, "both.py", source)
    config = run_config(rollout={"buffer_filter_path": str(path), "dynamic_sampling_filter_path": str(path)})
    assert config.rollout.buffer_filter == f"{path}:buffer_filter"
    assert config.rollout.sampling_filter == f"{path}:dynamic_sampling_filter"


def test_functions_over_a_batch_are_called_by_parameter_name(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "batch.py",
        """
        def mark(groups, args):
            for samples in groups:
                samples[0].remove_sample = args.n_samples_per_prompt == 2

        def custom_reward_post_process(args, samples):
            raw = [s.reward for s in samples]
            return raw, [2 * r for r in raw]
        """,
    )
    config = run_config(
        rollout={"rollout_sample_filter_path": f"{path}:mark"}, reward={"custom_reward_post_process_path": str(path)}
    )
    batch = groups([1.0, 2.0])
    build(config, "rollout_sample_filter", tmp_path)([group.samples for group in batch])
    assert [sample.remove_sample for sample in batch[0].samples] == [True, False]
    assert build(config, "reward_post_process", tmp_path)(batch[0].samples) == ([1.0, 2.0], [2.0, 4.0])
