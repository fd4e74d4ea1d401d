"""Tool calls are found in answers, including broken ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.kit.chat import TagParser, ToolCall


def call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("4", []),
        (call('{"name": "f", "arguments": {"q": 1}}'), [ToolCall("f", {"q": 1})]),
        (
            "so\n" + call('\n{"name":"f"}\n') + " and " + call('{"name":"g","parameters":{"x":[]}}'),
            [ToolCall("f"), ToolCall("g", {"x": []})],
        ),
        ('<tool_call>{"name": "f", "arguments": null}', [ToolCall("f")]),
        (call('{"name": "f", "arguments": "{\\"q\\": 1}"}'), [ToolCall("f", {"q": 1})]),
        (call('{"name": "f", "arguments": ""}'), [ToolCall("f")]),
        (call('{"name": "f", "arguments": [1]}'), [ToolCall("f", problem="the arguments of f are not an object")]),
        (call("[1]"), [ToolCall(problem='a tool call is an object {"name": ..., "arguments": {...}}')]),
        (call('{"name": 3}'), [ToolCall(problem='a tool call is an object {"name": ..., "arguments": {...}}')]),
        (
            call('{"name": "f"'),
            [ToolCall(problem="the tool call is not valid JSON: Expecting ',' delimiter at character 12")],
        ),
        ("<tool_call>", [ToolCall(problem="the tool call is not valid JSON: Expecting value at character 0")]),
        (call("[" * 100_000), [ToolCall(problem="the tool call is not valid JSON: nested too deeply")]),
        (
            call('{"name": "f", "arguments": "{"}'),
            [ToolCall("f", problem="the arguments of f are not valid JSON: Expecting property name enclosed in double"
             " quotes at character 1")],
        ),
    ],
)  # fmt: skip
def test_tag_parser(text: str, calls: list[ToolCall]) -> None:
    assert TagParser().parse(text) == calls


@given(st.text(alphabet='<>/tol_ca{}[]":,\\u0d 1e9N"nameargumts'))
def test_the_parser_never_raises(text: str) -> None:
    for found in TagParser().parse(f"<tool_call>{text}</tool_call>"):
        assert found.problem or found.name


# In a separate process, because without a GPU SGLang needs stand-ins for modules that other tests import.
SGLANG = """
from slime.kit.chat import SGLangParser, ToolCall, tool_of

def search(query: str) -> str:
    \"\"\"Search.\"\"\"

parser = SGLangParser("qwen25", [tool_of(search).schema])
assert parser.parse("no call") == []
good = '<tool_call>\\n{"name": "search", "arguments": {"query": "x"}}\\n</tool_call>'
assert parser.parse(good) == [ToolCall("search", {"query": "x"})]
assert parser.parse(good) == [ToolCall("search", {"query": "x"})]
assert parser.parse(good.replace("search", "find")) == [ToolCall("find", {"query": "x"})]
[broken] = parser.parse('<tool_call>\\n{"name": "search", "argum\\n</tool_call>')
assert broken.problem == "the tool call cannot be read"
other = SGLangParser("llama3", [tool_of(search).schema])
found = other.parse('<|python_tag|>{"name": "search", "parameters": {"query": "x"}}')
assert found == [ToolCall("search", {"query": "x"})]
try:
    SGLangParser("qwen26", [])
except ValueError as error:
    assert "no tool-call parser 'qwen26'" in str(error) and "Did you mean qwen25?" in str(error)
    print("all right")
"""


@pytest.mark.slow
def test_sglangs_parsers_find_calls_of_known_and_unknown_tools_and_broken_ones() -> None:
    done = subprocess.run([sys.executable, "-c", SGLANG], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith("all right\n"), done.stderr
