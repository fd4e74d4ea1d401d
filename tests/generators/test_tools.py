"""The calculator and the Python tool."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import ConfigError
from slime.kit.chat import Toolbox, ToolCall, tool_of
from slime_generators.options import ToolLoopOptions
from slime_generators.tools import load
from slime_generators.tools.calculator import calculate, calculator
from slime_generators.tools.python import python_tool
from slime_sandbox import Isolation, Machine


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        (" (1 + 2) / 3 ", "1"),
        ("7/2", "3.5"),
        ("0.1+0.2", "0.3"),
        ("2^10", "1024"),
        ("2**-1", "0.5"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("sqrt(16) + max(1, 2)", "6"),
        ("round(2.567, 1)", "2.6"),
        ("sin(pi/2)", "1"),
        ("10**20", "100000000000000000000"),
        ("1e300*10", "1e+301"),
        ("(" * 200 + "1" + ")" * 200, "1"),
    ],
)
def test_the_calculator_evaluates_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "two", "1+", "1 if 1 else 2", "__import__('os')", "().__class__", "'a'*9", "[1]", "sqrt(-1)", "(-8)**0.5",
        "9**9**9", "9**9999999", "10**1000*10**1000", "1e308*10", "True", "x:=1", "sqrt(x=1)", "f(1)", "round('a')",
        "1" * 501, "sqrt()", "1e999", "exp(1000)", "round(5, -99999999)", "-" * 400 + "1" + "\0",
    ],
)  # fmt: skip
def test_the_calculator_refuses_anything_else(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%^() esqrtpi,", max_size=60))
def test_the_calculator_is_always_fast(expression: str) -> None:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        float(calculate(expression))


def test_the_calculator_is_a_tool() -> None:
    result = asyncio.run(Toolbox([tool_of(calculator)]).run(ToolCall("calculator", {"expression": "1/0"})))
    assert (result.kind, result.text) == ("error", "error: ZeroDivisionError: division by zero")


async def run(code: str) -> str:
    return await python_tool(Isolation.LIMITS)(code)


def test_python_returns_the_programs_output() -> None:
    assert asyncio.run(run("import math\nprint('é', math.factorial(5))")) == "é 120\n"
    assert asyncio.run(run("x = 1")) == "(the program printed nothing)"


def test_a_failing_program_returns_its_output_and_the_error() -> None:
    text = asyncio.run(run("print('so far')\n1/0"))
    assert text.startswith("so far\n")
    assert text.endswith("ZeroDivisionError: division by zero")


def test_a_program_over_its_limits_is_killed() -> None:
    text = asyncio.run(run("while True: print('x' * 1000)"))
    assert "error: the program wrote more than 64 KiB" in text


def test_the_python_tool_needs_the_isolation_that_the_code_reward_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(Isolation.LIMITS, "namespaces: not permitted")
    monkeypatch.setattr("slime_sandbox.machine.machine_isolation", lambda: machine)
    with pytest.raises(ConfigError, match=r"require_isolation is 'filter', and this machine permits only 'limits'"):
        load(ToolLoopOptions(tools=("python", "calculator")))
    assert [tool.name for tool in load(ToolLoopOptions(tools=("calculator",)))] == ["calculator"]
    chosen = load(ToolLoopOptions(tools=("python", "calculator"), require_isolation="limits"))
    assert [tool.name for tool in chosen] == ["python", "calculator"]
