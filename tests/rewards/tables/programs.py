"""Tests of programs as data sets state them (MBPP, HumanEval, APPS, TACO, LiveCodeBench), and programs."""

from __future__ import annotations

import json
from typing import Any

#: (tests in metadata or in the label, what they are read as); None: refused
FORMS: list[tuple[Any, Any]] = [
    # MBPP and HumanEval: code with asserts
    ("assert f(2) == 4", ("asserts", ["assert f(2) == 4"])),
    ("assert f(2) == 4\nassert f(3) == 9", ("asserts", ["assert f(2) == 4\nassert f(3) == 9"])),
    (
        "def check(g):\n    assert g(2) == 4\n\ncheck(f)",
        ("asserts", ["def check(g):\n    assert g(2) == 4\n\ncheck(f)"]),
    ),
    ("  assert f(2) == 4", ("asserts", ["  assert f(2) == 4"])),
    (["assert f(2) == 4"], ("asserts", ["assert f(2) == 4"])),
    (["assert f(2) == 4", "assert f(3) == 9"], ("asserts", ["assert f(2) == 4", "assert f(3) == 9"])),
    (["# squares\nassert f(2) == 4"], ("asserts", ["# squares\nassert f(2) == 4"])),
    ('["assert f(2) == 4"]', ("asserts", ["assert f(2) == 4"])),
    ("[f(2)][0]", ("asserts", ["[f(2)][0]"])),
    ("{f(2)}", ("asserts", ["{f(2)}"])),
    ("assert f('数学') == '🙂'", ("asserts", ["assert f('数学') == '🙂'"])),
    # LiveCodeBench: a list of input and output
    ([{"input": "1 2", "output": "3"}], ("io", [("1 2", "3")])),
    ([{"input": "1\n", "output": "1\n"}, {"input": "", "output": ""}], ("io", [("1\n", "1\n"), ("", "")])),
    ([{"input": "1", "output": "1", "testtype": "stdin"}], ("io", [("1", "1")])),
    ('[{"input": "1", "output": "2"}]', ("io", [("1", "2")])),
    # APPS and TACO: two lists
    ({"inputs": ["1 2"], "outputs": ["3"]}, ("io", [("1 2", "3")])),
    ({"inputs": ["1", "2"], "outputs": ["1", "4"]}, ("io", [("1", "1"), ("2", "4")])),
    ({"inputs": ["1"], "outputs": ["1"], "fn_name": None}, ("io", [("1", "1")])),
    ('{"inputs": ["1"], "outputs": ["1"]}', ("io", [("1", "1")])),
    ({"inputs": [["1", "2"]], "outputs": [["3"]]}, ("io", [("1\n2", "3")])),
    ({"inputs": [["1", 2]], "outputs": [["3"]]}, None),
    # APPS and TACO: calls of a function
    ({"fn_name": "f", "inputs": [[2]], "outputs": [4]}, ("f", [([2], 4)])),
    ({"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}, ("f", [([1, 2], 3), ([3, 4], 7)])),
    ({"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[1, 2]]}, ("f", [([[1, 2]], [1, 2])])),
    ({"fn_name": "f", "inputs": [[]], "outputs": [None]}, ("f", [([], None)])),
    ('{"fn_name": "f", "inputs": [["a"]], "outputs": ["b"]}', ("f", [(["a"], "b")])),
    # nothing that can be read: never a test that always passes
    ("", None),
    (" \n", None),
    ("# assert f(2) == 4", None),
    ("# a\n# b", None),
    ([], None),
    ([""], None),
    (["assert True", ""], None),
    (["assert True", "# none"], None),
    (["assert True", 3], None),
    ([3], None),
    ([["1", "2"]], None),
    ([{}], None),
    ([{"input": "1"}], None),
    ([{"output": "1"}], None),
    ([{"input": "1", "output": "1"}, {"input": "2"}], None),
    ([{"input": 1, "output": "1"}], None),
    ([{"input": "1", "output": None}], None),
    ([{"input": "1", "output": "1"}, "assert True"], None),
    ({}, None),
    ({"inputs": [], "outputs": []}, None),
    ({"inputs": ["1"], "outputs": []}, None),
    ({"inputs": ["1"]}, None),
    ({"inputs": "1", "outputs": "1"}, None),
    ({"inputs": [[1]], "outputs": [1]}, None),
    ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, None),
    ({"inputs": [[1]], "outputs": [1], "fn_name": 3}, None),
    ({"input": "1", "output": "1"}, None),
    (3, None),
    (True, None),
    (json.dumps([]), None),
    (json.dumps([{"input": "1"}]), None),
]

#: those of the tests above that assert nothing, or are not Python by themselves: read only by `python_tests = "run"`
NOT_COMPARABLE: list[Any] = [
    "  assert f(2) == 4",
    "[f(2)][0]",
    "{f(2)}",
]

#: (response, its code)
BLOCKS: list[tuple[str, str]] = [
    ("print(1)", "print(1)"),
    ("```python\nprint(1)\n```", "print(1)"),
    ("```py\nprint(1)\n```", "print(1)"),
    ("```\nprint(1)\n```", "print(1)"),
    ("Here:\n```python\nprint(1)\n```\nIt prints 1.", "print(1)"),
    ("```python\nprint(0)\n```\nBetter:\n```python\nprint(1)\n```", "print(1)"),
    ("```python\nprint(1)", "print(1)"),
    ("```python\nprint(1)\n```\n```", "print(1)"),
    ("  ```python\n  x\n  ```", "x"),
    ("1. So:\n   ```python\n   if x:\n       y\n   ```\n2. Done", "if x:\n    y"),
    ('```python\n"""\n    ```\n    f(2)\n    ```\n"""\nx = 1\n```', '"""\n    ```\n    f(2)\n    ```\n"""\nx = 1'),
    ("````python\nx = 1\n```\ny = 2\n````", "x = 1\n```\ny = 2"),
    ("```python\nx = 1\n``` \nso", "x = 1"),
    ("a ``` b\n```x\n1\n```", "1"),
    ("```python\n\n```", ""),
    ("x = '`'\nprint(x)", "x = '`'\nprint(x)"),
    ("", ""),
]

_ADD = "def f(a, b):\n    return a + b\n"
_IO = [{"input": "1 2", "output": "3"}, {"input": "5 5", "output": "10"}]
_CALLS = {"fn_name": "f", "inputs": [[1, 2], [2, 2]], "outputs": [3, 4]}

#: (response, tests, share that passes)
RUNS: list[tuple[str, Any, float]] = [
    (_ADD, ["assert f(1, 2) == 3", "assert f(0, 0) == 0"], 1.0),
    (f"So:\n```python\n{_ADD}```", ["assert f(1, 2) == 3", "assert f(0, 0) == 1"], 0.5),
    (_ADD, "assert f(1, 2) == 4", 0.0),
    (_ADD, _CALLS, 1.0),
    ("class Solution:\n    def f(self, a, b):\n        return a + b", _CALLS, 1.0),
    ("def f(a, b):\n    return 3", _CALLS, 0.5),
    ("def f(a, b):\n    return float(a + b)", _CALLS, 1.0),
    ("def f(a, b):\n    return str(a + b)", _CALLS, 0.0),
    ("def f(a, b):\n    return None", _CALLS, 0.0),
    ("def g(a, b):\n    return a + b", _CALLS, 0.0),
    ("def f(a, b):\n    raise ValueError", _CALLS, 0.0),
    ("def f(a):\n    return a", _CALLS, 0.0),
    ("def f(a, b)\n    return a + b", _CALLS, 0.0),
    ("def f(a):\n    return [a, a]", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]}, 1.0),
    ("def f(a):\n    return (a, a)", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]}, 1.0),
    ("def f(a):\n    return {a}", {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}, 0.0),
    ("def f():\n    return None", {"fn_name": "f", "inputs": [[]], "outputs": [None]}, 1.0),
    ("a, b = map(int, input().split())\nprint(a + b)", _IO, 1.0),
    (f"<think>hm</think>\n```python\n# <think>\n{_ADD}t = '</think>'\n```", _CALLS, 1.0),
    (f"t = '<think>'\n{_ADD}", _CALLS, 1.0),
    (f"<think>{_ADD}", _CALLS, 0.0),
    ("print(3)", _IO, 0.5),
    ("print(3, end='')", _IO, 0.5),
    ("print('3  ')\nprint()", _IO, 0.5),
    ("print(' 3')", _IO, 0.0),
    ("print('3.0')", _IO, 0.0),
    ("print('The sum is 3')", _IO, 0.0),
    ("print(3)\nraise SystemExit(1)", _IO, 0.0),
    ("pass", _IO, 0.0),
    ("", _IO, 0.0),
]
