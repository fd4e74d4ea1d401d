"""The data source `prompts` and custom classes, with every format and mode."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.registry.local_runs import build, run_config, write
from tests.support.prompt_files import FORMATS, Letters, numbered, write_rows

from slime.config import RunConfig
from slime.config.options import AlgorithmOptions, DataOptions, RolloutOptions
from slime.config.weight_options import CheckpointOptions
from slime.errors import CheckpointError, DataError
from slime.plugin import Context, NoOptions
from slime.rollout.boundaries import CheckedSource
from slime.testing import assert_datasource_contract
from slime_datasources.prompts import Prompts

OWN = """
    from slime.data import RolloutDataSource, Sample

    class Mine(RolloutDataSource):
        def get_samples(self, num_samples):
            return [Sample(prompt=p) for p in self.dataset.sample(num_samples)]
"""


def prompts(*files: Any, rollout: dict[str, Any] | None = None, checkpoint: Any = None, **data: Any) -> Prompts:
    config = RunConfig(
        algorithm=AlgorithmOptions(loss_type="policy_loss"),
        data=DataOptions(prompt_data=[str(file) for file in files], **data),
        rollout=RolloutOptions(n_samples_per_prompt=2, **{"rollout_max_response_len": 4, **(rollout or {})}),
        checkpoint=checkpoint or CheckpointOptions(),
    )
    context = Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"), config=config, tokenizer=Letters())
    return Prompts(NoOptions(), context)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("streaming", [False, True])
def test_groups_come_from_every_format(kind: str, streaming: bool, tmp_path: Path) -> None:
    source = prompts(write_rows(tmp_path, kind, numbered(5)), streaming_data=streaming)
    groups = source.take(7)
    assert [group.samples[1].prompt for group in groups] == ["q0", "q1", "q2", "q3", "q4", "q0", "q1"]
    sample = groups[3].samples[0]
    assert (sample.tokens, sample.label, sample.metadata) == ([ord("q"), ord("3")], "3", {"row": 3})


def test_changing_a_conversation_does_not_change_its_siblings(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "q"}]}) + "\n")
    [first, second] = prompts(file, label_key=None, apply_chat_template=True).take(1)[0].samples
    assert isinstance(first.prompt, list) and isinstance(second.prompt, list)
    first.prompt.append({"role": "assistant", "content": "a"})
    first.prompt[0]["content"] = "changed"
    assert second.prompt == [{"role": "user", "content": "q"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        {"rollout_shuffle": True},
        {"streaming_data": True, "rollout_shuffle": True},
        {"streaming_data": True, "num_data_workers": 1, "rollout_shuffle": True},
    ],
)
def test_prompts_keeps_the_contract_in_every_mode(data: dict[str, Any], tmp_path: Path) -> None:
    a = write_rows(tmp_path, "jsonl", numbered(4), name="a")
    b = write_rows(tmp_path, "parquet", numbered(3, 100), name="b")
    made: list[Prompts] = []

    def make() -> Prompts:
        made.append(prompts(f"{a}=2", f"{b}=1", **data))
        return made[-1]

    try:
        assert_datasource_contract(make, samples_per_prompt=2)
    finally:
        for source in made:
            source.close()


def test_rows_left_out_are_counted_across_a_checkpoint(tmp_path: Path) -> None:
    rows: list[Any] = [*numbered(3), "{", {"prompt": "x" * 50, "label": ""}]
    how: dict[str, Any] = {"bad_rows": "skip", "overlong_prompts": "drop", "streaming_data": True}
    path = write_rows(tmp_path, "jsonl", rows)
    source = CheckedSource(prompts(path, rollout={"rollout_max_prompt_len": 20}, **how), "data source prompts", 2)
    source.take(7)
    metrics = {"data/epoch": 2.0, "data/bad_rows": 2.0, "data/overlong_prompts": 2.0}
    assert source.metrics() == metrics
    state = json.loads(json.dumps(source.state()))
    resumed = CheckedSource(prompts(path, rollout={"rollout_max_prompt_len": 20}, **how), "data source prompts", 2)
    resumed.load(state)
    assert resumed.metrics() == metrics
    assert resumed.take(4) == source.take(4)


@pytest.mark.parametrize(
    ("rollout", "limit"),
    [
        ({"rollout_max_prompt_len": 9}, 9),
        ({"rollout_max_context_len": 16}, 12),
        ({}, 28),
        ({"rollout_max_prompt_len": 30}, 28),
    ],
)
def test_the_longest_prompt_follows_from_options_and_model(rollout: dict[str, int], limit: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 32}')
    path = write_rows(tmp_path, "jsonl", [{"prompt": "x" * n, "label": ""} for n in range(1, 40)])
    model = CheckpointOptions(hf_checkpoint=str(tmp_path))
    source = prompts(path, rollout=rollout, checkpoint=model, overlong_prompts="drop")
    assert [len(group.samples[0].prompt) for group in source.take(limit + 1)] == [*range(1, limit + 1), 1]


def test_the_state_of_another_mixture_is_refused(tmp_path: Path) -> None:
    a, b = (write_rows(tmp_path, "jsonl", numbered(4), name=name) for name in "ab")
    state = prompts(f"{a}=1", f"{b}=1").state_dict()
    with pytest.raises(CheckpointError, match="a mixture of 2 files, but this run mixes 1"):
        prompts(a).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("streaming", [False, True])
def test_custom_classes_read_every_format(kind: str, streaming: bool, tmp_path: Path) -> None:
    """A `RolloutDataSource` exactly as documented."""
    path = write_rows(tmp_path, kind, numbered(5))
    own = write(tmp_path, "source.py", OWN)
    data = {"data_source_path": str(own), "prompt_data": [str(path)], "streaming_data": streaming}
    source = build(run_config(data=data), "datasource", tmp_path / "run")
    first = source.take(3)
    state = json.loads(json.dumps(source.state_dict()))
    assert [group.samples[0].label for group in first] == ["0", "1", "2"]
    again = build(run_config(data=data), "datasource", tmp_path / "run")
    again.load_state_dict(state)
    assert [group.samples[0].prompt for group in again.take(3)] == ["q3", "q4", "q0"]
    assert source.metrics()["data/epoch"] == 0


def test_a_stream_has_no_numbered_rows(tmp_path: Path) -> None:
    by_number = OWN.replace("self.dataset.sample(num_samples)", "[self.dataset[0].prompt]")
    path, own = write_rows(tmp_path, "jsonl", numbered(5)), write(tmp_path, "source.py", by_number)
    data = {"data_source_path": str(own), "prompt_data": [str(path)], "streaming_data": True}
    with pytest.raises(DataError, match="a stream has no numbered rows"):
        build(run_config(data=data), "datasource", tmp_path / "run").take(1)
