"""What `Sample.response` is, in every generator: no end markers, and answers stand behind the last `</think>`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizer_features import FAMILIES, make_tokenizer

from slime.config import RunConfig
from slime.config.options import DataOptions, RolloutOptions
from slime.plugin import NoOptions, Sample, SamplingParams
from slime.testing import Say, ScriptedPolicy, make_context
from slime_generators.options import SupervisedOptions, ToolLoopOptions
from slime_generators.single_turn import SingleTurn
from slime_generators.supervised import Supervised
from slime_generators.tool_loop import ToolLoop
from slime_rewards.exact_match import ExactMatch
from slime_rewards.options import ExactMatchOptions

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
ASKED = [{"role": "user", "content": "look up 6*7"}]


def generated(kind: str, tokenizer: Any, tmp_path: Path, *texts: str) -> Sample:
    config = RunConfig(
        data=DataOptions(prompt_data="unused", apply_chat_template=True),
        rollout=RolloutOptions(num_rollout=1, rollout_batch_size=1, rollout_max_response_len=4096, max_turns=4),
    )
    context = make_context(run_dir=tmp_path, config=config, tokenizer=tokenizer)
    options = {"tools": ("calculator",), "show_tools": False}
    makers = {"single_turn": SingleTurn(NoOptions(), context), "supervised": Supervised(SupervisedOptions(), context)}
    generator: Any = ToolLoop(ToolLoopOptions(**options), context) if kind == "tool_loop" else makers[kind]
    prompt = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    label = texts[-1] if kind == "supervised" else "42"
    sample = Sample(prompt=ASKED, tokens=tokens, label=label, index=5, group_index=2)
    policy = ScriptedPolicy([Say(tokenizer.encode(text, add_special_tokens=False)) for text in texts])
    [finished] = asyncio.run(generator.generate(sample, SamplingParams(max_new_tokens=4096), policy))
    assert isinstance(finished, Sample)
    return finished


@pytest.mark.parametrize("family", FAMILIES)
def test_no_end_marker_is_in_a_response(family: str, tmp_path: Path) -> None:
    features = FAMILIES[family]
    tokenizer = make_tokenizer(features, tmp_path)
    for end in features["ends"]:
        called = CALL + ("<|observation|>" if features["turn"] == "next role" else end)
        answers = {
            "single_turn": [f"the answer is 42{end}"],
            "tool_loop": [called, f"the answer is 42{end}"],
            "supervised": [f"the answer is 42{end}"],
        }
        for kind, texts in answers.items():
            sample = generated(kind, tokenizer, tmp_path, *texts)
            assert sample.response.strip() == "the answer is 42", (kind, end)
            assert tokenizer.convert_tokens_to_ids(end) in sample.tokens[-2:]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<think>it is 41</think>42", 1.0),
        ("<think>it is 42</think>41", 0.0),
        ("<think>so</think>41<think>no</think>42", 1.0),
        ("<think>it is 42", 0.0),
        ("it is 41</think>42", 1.0),
    ],
)
@pytest.mark.parametrize("kind", ["single_turn", "tool_loop"])
def test_answers_stand_behind_the_last_thinking(kind: str, answer: str, reward: float, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen3"], tmp_path)
    thought = f"<think>I need 6*7</think>{CALL}<|im_end|>"
    texts = [thought, f"{answer}<|im_end|>"] if kind == "tool_loop" else [f"{answer}<|im_end|>"]
    sample = generated(kind, tokenizer, tmp_path, *texts)
    assert sample.response == answer
    scored = asyncio.run(ExactMatch(ExactMatchOptions(), make_context(run_dir=tmp_path)).score([sample]))
    assert [one.value for one in scored] == [reward]
