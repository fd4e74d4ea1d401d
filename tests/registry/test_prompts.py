"""The prompt-file data source: order, groups, resuming."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest

from slime.config import RunConfig
from slime.config.options import AlgorithmOptions, DataOptions, RolloutOptions
from slime.errors import ConfigError
from slime.plugin import Context, Group, NoOptions, Status
from slime_datasources.prompts import Prompts

ROWS = 7


class Letters:
    """A tokenizer of one id per character."""

    chat_template = "yes"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['content']}>" for m in messages)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [{"prompt": f"q{i}", "label": str(i), "metadata": {"row": i}} for i in range(ROWS)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path / "p.jsonl"


def source(
    path: Path | None,
    *,
    samples: int = 2,
    shuffle: bool = False,
    seed: int = 42,
    chat: bool = False,
    max_prompt: int | None = None,
    max_context: int | None = None,
    loss: Literal["policy_loss", "sft_loss"] = "policy_loss",
) -> Prompts:
    config = RunConfig(
        algorithm=AlgorithmOptions(loss_type=loss),
        data=DataOptions(
            prompt_data=None if path is None else str(path),
            apply_chat_template=chat,
            rollout_shuffle=shuffle,
            rollout_seed=seed,
        ),
        rollout=RolloutOptions(
            n_samples_per_prompt=samples,
            rollout_max_prompt_len=max_prompt,
            rollout_max_context_len=max_context,
            rollout_max_response_len=4,
        ),
    )
    context = Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"), config=config, tokenizer=Letters())
    return Prompts(NoOptions(), context)


def prompts(groups: list[Group]) -> list[Any]:
    return [group.samples[0].prompt for group in groups]


def test_groups_come_in_file_order_with_unique_indices(path: Path) -> None:
    groups = source(path, samples=3).take(2)
    assert [group.index for group in groups] == [0, 1]
    assert [[s.group_index for s in g.samples] for g in groups] == [[0] * 3, [1] * 3]
    assert [s.index for g in groups for s in g.samples] == [0, 1, 2, 3, 4, 5]
    sample = groups[1].samples[2]
    assert (sample.prompt, sample.label, sample.metadata) == ("q1", "1", {"row": 1})
    assert sample.tokens == [ord("q"), ord("1")]
    assert sample.status is Status.PENDING and sample.response_length == 0


def test_siblings_share_no_mutable_state(path: Path) -> None:
    one, two = source(path).take(1)[0].samples
    one.tokens.append(0)
    one.metadata["row"] = "changed"
    assert two.tokens == [ord("q"), ord("0")] and two.metadata == {"row": 0}


def test_shuffled_order_depends_only_on_seed_and_epoch(path: Path) -> None:
    whole = prompts(source(path, shuffle=True).take(3 * ROWS))
    data = source(path, shuffle=True, samples=5)
    assert [prompts(data.take(1))[0] for _ in range(3 * ROWS)] == whole
    epochs = [whole[i * ROWS : (i + 1) * ROWS] for i in range(3)]
    assert all(sorted(epoch) == [f"q{i}" for i in range(ROWS)] for epoch in epochs)
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    assert prompts(source(path, shuffle=True, seed=43).take(ROWS)) != epochs[0]


def test_shuffled_order_never_changes_between_releases(path: Path) -> None:
    assert prompts(source(path, shuffle=True, seed=1).take(ROWS)) == ["q4", "q2", "q1", "q0", "q6", "q3", "q5"]


def test_a_state_is_a_copy(path: Path) -> None:
    data = source(path)
    data.take(1)
    state = data.state_dict()
    before = json.dumps(state)
    data.take(3)
    assert json.dumps(state) == before


def test_a_chat_keeps_its_messages_and_gets_the_templates_tokens(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": chat, "label": "x"}) + "\n")
    sample = source(tmp_path / "c.jsonl", chat=True).take(1)[0].samples[0]
    assert sample.prompt == chat
    assert sample.tokens == [ord(c) for c in "<hi>"]


def test_supervised_prompts_reserve_no_space_for_sampling(path: Path) -> None:
    assert len(source(path, max_context=5, loss="sft_loss").take(1)[0].samples[0].tokens) == 2


def test_a_source_without_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs --prompt-data"):
        source(None)
