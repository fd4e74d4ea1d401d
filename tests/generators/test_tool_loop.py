"""The tool loop with a scripted policy: turns, limits, faults, metrics."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from slime.config import RunConfig
from slime.config.options import DataOptions, RolloutOptions
from slime.plugin import Context, Sample, SamplingParams, Status
from slime.registry.contracts import Snapshot, check_generated, check_tokens_generated
from slime.testing import Say, ScriptedPolicy, make_context, make_sample, make_tokenizer
from slime.testing.samples import CHARACTERS, STOP, encode
from slime_generators.options import ToolLoopOptions
from slime_generators.tool_loop import ToolLoop

END = CHARACTERS.index(STOP)
HERE = __name__


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def raises() -> str:
    """Raise."""
    raise ValueError("no such city")


def hangs() -> str:
    """Hang."""
    time.sleep(4)
    return "late"


def huge() -> str:
    """Say ten megabytes."""
    return "x" * 10_000_000


def garbled() -> bytes:
    """Return bytes that are not text."""
    return b"\xff\xfe\xf0"


def number() -> int:
    """Say a number."""
    return 7


def context(tokenizer: Any, tmp_path: Path, *, template: bool = False, **rollout: Any) -> Context:
    settings = {"num_rollout": 1, "rollout_batch_size": 1, "rollout_max_response_len": 512, "max_turns": 4}
    config = RunConfig(
        data=DataOptions(prompt_data="unused", apply_chat_template=template),
        rollout=RolloutOptions.model_validate({**settings, **rollout}),
    )
    return make_context(run_dir=tmp_path, config=config, tokenizer=tokenizer)


def call(name: str, arguments: str = "{}") -> Say:
    return Say([*encode(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'), END])


def final(text: str = "42") -> Say:
    return Say([*encode(text), END])


def converse(loop: ToolLoop, script: list[Say], *, limit: int = 512, sample: Sample | None = None) -> Any:
    """(finished sample, policy); the sample was checked as the kernel checks it."""
    policy = ScriptedPolicy(script)
    asked = sample or make_sample("q=", None, index=5, group_index=2)
    who = Snapshot.of(asked)
    produced = asyncio.run(loop.generate(asked, SamplingParams(max_new_tokens=limit), policy))
    [finished] = check_generated(produced, who)
    check_tokens_generated(produced, policy.answers)
    return finished, policy


def test_a_conversation_ends_with_an_answer_that_calls_no_tool(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(), context(tokenizer, tmp_path))
    sample, policy = converse(loop, [call("calculator", '{"expression": "6*7"}'), final()])
    expected = (
        'q=<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    )
    assert tokenizer.decode(sample.tokens) == expected
    assert (sample.status, sample.finish_reason, sample.response) == (Status.COMPLETED, "stop", "42")
    assert [m["role"] for m in sample.metadata["messages"]] == ["assistant", "tool", "assistant"]
    assert [c.session for c in policy.calls] == ["5", "5"]
    assert policy.calls[1].tokens == sample.tokens[: -len(final().tokens)]
    assert sample.metrics["turns"] == 2
    assert sample.metrics["tools/calculator/calls"] == 1
    assert sample.non_generation_time > 0


@pytest.mark.parametrize(
    ("name", "said", "metric"),
    [
        ("raises", "error: ValueError: no such city", "errors"),
        ("hangs", "error: hangs did not answer within 1 s", "timeouts"),
        ("huge", "x" * 64 + "\n[cut: 10000000 characters, the first 64 are shown]", "cut"),
        ("garbled", "\ufffd\ufffd", "calls"),
        ("number", "7", "calls"),
    ],
)
def test_no_tool_failure_ends_the_conversation(
    tokenizer: Any, tmp_path: Path, name: str, said: str, metric: str
) -> None:
    loop = ToolLoop(
        ToolLoopOptions(tools=(f"{HERE}:{name}",), tool_timeout_s=1.0, tool_max_chars=64), context(tokenizer, tmp_path)
    )
    sample, _ = converse(loop, [call(name), final()])
    assert sample.status is Status.COMPLETED
    assert sample.metadata["messages"][1]["content"].startswith(said)
    assert sample.metrics[f"tools/{name}/{metric}"] == 1
    assert sample.metrics[f"tools/{name}/calls"] == 1
    assert sample.metrics[f"tools/{name}/seconds"] >= 0


@pytest.mark.parametrize(
    ("answer", "said", "metric"),
    [
        (call("nothing"), "error: no tool is called 'nothing'; known: calculator.", "tools/unknown_calls"),
        (Say(encode("<tool_call>{broken")), "error: the tool call is not valid JSON", "tools/malformed_calls"),
        (call("calculator", '{"x": 1}'), "error: wrong arguments for calculator", "tools/calculator/errors"),
        (call("calculator", '{"expression": "1/0"}'), "error: ZeroDivisionError", "tools/calculator/errors"),
    ],
)
def test_a_failed_call_returns_an_error_message(
    tokenizer: Any, tmp_path: Path, answer: Say, said: str, metric: str
) -> None:
    sample, _ = converse(ToolLoop(ToolLoopOptions(), context(tokenizer, tmp_path)), [answer, final()])
    assert sample.status is Status.COMPLETED
    assert sample.metadata["messages"][1]["content"].startswith(said)
    assert sample.metrics[metric] == 1
    assert sample.metrics["turns"] == 2


def test_several_calls_of_one_answer_are_answered_in_order(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(tools=("calculator", f"{HERE}:number")), context(tokenizer, tmp_path))
    both = Say([*call("number").tokens[:-1], *call("calculator", '{"expression": "1+1"}').tokens])
    sample, _ = converse(loop, [both, final()])
    results = [m for m in sample.metadata["messages"] if m["role"] == "tool"]
    assert [(m["name"], m["content"]) for m in results] == [("number", "7"), ("calculator", "2")]
    assert len({m["tool_call_id"] for m in results}) == 2


def test_a_call_in_the_last_turn_truncates_the_conversation(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(tools=(f"{HERE}:number",)), context(tokenizer, tmp_path, max_turns=3))
    sample, policy = converse(loop, [call("number")])
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, "max_turns")
    assert len(policy.calls) == 3
    assert sample.metrics["tools/number/calls"] == 2
    assert sample.loss_mask[-1] == 1


def test_the_whole_response_stays_within_its_limit(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(tools=(f"{HERE}:number",)), context(tokenizer, tmp_path))
    one = len(call("number").tokens)
    sample, policy = converse(loop, [call("number"), Say(encode("y" * 500))], limit=one + 100)
    assert policy.calls[0].sampling.max_new_tokens == one + 100
    assert policy.calls[1].sampling.max_new_tokens == one + 100 - (len(policy.calls[1].tokens) - sample.prompt_length)
    assert sample.response_length == one + 100
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, "length")


@pytest.mark.parametrize("short_by", [0, 1])
def test_a_result_that_leaves_no_room_is_omitted(tokenizer: Any, tmp_path: Path, short_by: int) -> None:
    loop = ToolLoop(ToolLoopOptions(tools=(f"{HERE}:number",)), context(tokenizer, tmp_path))
    one = len(call("number").tokens)
    added = len(encode("\n")) + 1 + len(encode("tool\n7")) + 1 + len(encode("\n")) + 1 + len(encode("assistant\n"))
    sample, policy = converse(loop, [call("number"), final("4")], limit=one + added + 1 - short_by)
    if short_by:
        assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, "length")
        assert (sample.response_length, len(policy.calls)) == (one, 1)
        assert sample.metrics["tools/number/calls"] == 1
    else:
        assert policy.calls[1].sampling.max_new_tokens == 1
        assert sample.status is Status.TRUNCATED


def test_a_full_context_ends_the_conversation(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(
        ToolLoopOptions(tools=(f"{HERE}:number",)), context(tokenizer, tmp_path, rollout_max_context_len=100)
    )
    sample, policy = converse(loop, [call("number")])
    assert policy.calls[0].sampling.max_new_tokens == 98
    assert sample.status is Status.TRUNCATED
    assert len(sample.tokens) <= 100


def test_turn_max_tokens_limits_one_answer(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(turn_max_tokens=10), context(tokenizer, tmp_path))
    sample, policy = converse(loop, [Say(encode("y" * 50))])
    assert policy.calls[0].sampling.max_new_tokens == 10
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, 10)


def test_an_abort_in_a_later_turn_keeps_earlier_turns(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(tools=(f"{HERE}:number",)), context(tokenizer, tmp_path))
    sample, _ = converse(loop, [call("number"), Say(encode("4"), finish_reason="abort")])
    assert sample.status is Status.ABORTED
    assert sample.failure == "the engine aborted the request: no reason given"
    assert sample.metrics["tools/number/calls"] == 1


def test_an_abort_before_the_first_token_is_an_abort(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(), context(tokenizer, tmp_path))
    sample, _ = converse(loop, [Say([], finish_reason="abort")])
    assert (sample.status, sample.response_length, sample.response) == (Status.ABORTED, 0, "")


def test_calls_in_a_truncated_answer_are_ignored(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(tools=(f"{HERE}:number",)), context(tokenizer, tmp_path))
    sample, policy = converse(loop, [Say(call("number").tokens, finish_reason="length")])
    assert len(policy.calls) == 1
    assert sample.status is Status.TRUNCATED


def test_weight_versions_of_all_turns_are_kept(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(ToolLoopOptions(tools=(f"{HERE}:number",)), context(tokenizer, tmp_path))
    first = Say(call("number").tokens, weight_versions=("3",))
    sample, _ = converse(loop, [first, Say(final().tokens, weight_versions=("3", "4"))])
    assert sample.weight_versions == ["3", "4"]


_WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chat_sample(tokenizer: Any, prompt: Any) -> Sample:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Sample(prompt=prompt, tokens=tokenizer.encode(text, add_special_tokens=False), index=5, group_index=2)


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q"}]])
def test_the_template_describes_the_tools(tmp_path: Path, prompt: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = _WITH_TOOLS
    loop = ToolLoop(ToolLoopOptions(), context(tokenizer, tmp_path, template=True))
    sample, policy = converse(loop, [final()], sample=chat_sample(tokenizer, prompt))
    assert tokenizer.decode(policy.calls[0].tokens) == (
        "calculator <|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sample.prompt == [{"role": "user", "content": "q", "tools": ["calculator"]}]


@pytest.mark.parametrize("options", [{"show_tools": False}, {"tools": ""}])
def test_prompts_are_unchanged_without_show_tools(tmp_path: Path, options: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = _WITH_TOOLS
    loop = ToolLoop(ToolLoopOptions(**options), context(tokenizer, tmp_path, template=True))
    asked = chat_sample(tokenizer, "q")
    before = list(asked.tokens)
    sample, policy = converse(loop, [final()], sample=asked)
    assert policy.calls[0].tokens == before
    assert sample.prompt == "q"


def test_a_prompt_that_leaves_no_room_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    loop = ToolLoop(
        ToolLoopOptions(), context(tokenizer, tmp_path, rollout_max_context_len=2, rollout_max_response_len=1)
    )
    with pytest.raises(ValueError, match="a prompt of 2 tokens leaves no room to answer"):
        converse(loop, [final()])
    with pytest.raises(ValueError, match="sample 5 has no prompt tokens"):
        converse(loop, [final()], sample=Sample(index=5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "calculater"}, "no tool is called 'calculater'; known: calculator, python, search"),
        ({"tools": "search"}, "set --generator.search-corpus"),
        ({"tools": "calculator,calculator"}, "two tools are called 'calculator'"),
    ],
)
def test_options_that_cannot_work_are_refused_when_the_run_starts(
    tokenizer: Any, tmp_path: Path, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ToolLoop(ToolLoopOptions(**options), context(tokenizer, tmp_path))
