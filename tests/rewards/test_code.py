"""Code against its tests: right, wrong and hostile programs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.rewards import build, score

from slime.errors import ConfigError
from slime.kit.sandbox import Isolation, Machine

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
DIALOGUES = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
CALLS = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, 4]}
QUICK: dict[str, Any] = {"wall_s": 20.0, "cpu_s": 1.0, "memory_mb": 128, "output_kb": 64, "processes": 8}


def passed(code: str, tests: object, **options: Any) -> float:
    return score("code", code, metadata={"tests": tests}, **{**QUICK, "score": "share", **options}).value


def test_correct_code_passes_tests_of_every_form() -> None:
    assert passed(ADD, ASSERTS) == 1.0
    assert passed(f"Here it is:\n```python\n{ADD}```\nGood luck", ASSERTS) == 1.0
    assert passed("print(sum(map(int, input().split())))", DIALOGUES) == 1.0
    assert passed(ADD, CALLS) == 1.0
    assert passed("class Solution:\n  def add(self, a, b): return a + b", CALLS) == 1.0
    assert passed("import sys; print(len(sys.stdin.read()))", {"inputs": ["abc", "数"], "outputs": ["3", "1"]}) == 1.0


def test_tests_may_be_in_the_label_as_text_or_json() -> None:
    assert score("code", ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4").value == 1.0
    assert score("code", ADD, json.dumps(ASSERTS)).value == 1.0
    assert score("code", ADD, json.dumps(CALLS)).value == 1.0


def test_wrong_code_gets_its_share_or_zero() -> None:
    code = "def add(a, b):\n    return abs(a) + b if isinstance(a, int) else a + b"
    assert passed(code, ASSERTS) == pytest.approx(2 / 3)
    assert passed(code, ASSERTS, score="all") == 0.0
    assert passed("print(3)", DIALOGUES) == 0.5


def test_output_is_compared_without_trailing_white_space() -> None:
    tests = [{"input": "", "output": "1\n2"}]
    assert passed("print('1  \\n2\\n\\n')", tests) == 1.0
    assert passed("print('1 2')", tests) == 0.0


def test_output_before_an_error_does_not_count() -> None:
    assert passed("print(3); raise SystemExit(1)", DIALOGUES) == 0.0


#: code that must get 0, and the limit that it exceeds
HOSTILE = {
    "ends early": ("import os; os._exit(0)", None),
    "leaves": ("import sys; sys.exit(0)", None),
    "leaves in the function": ("import os\ndef add(a, b): os._exit(0)", None),
    "is no Python": ("def add(", None),
    "is empty": ("", None),
    "has a zero": ("\x00", None),
    "is a surrogate": ("x = '\ud800'", None),
    "loops": ("while True: pass", "timeout"),
    "forks": ("import os\nwhile True: os.fork()", None),
    "allocates": ("x = bytearray(10**10)", None),
    "allocates bit by bit": ("x = []\nwhile True: x.append(bytearray(2**20))", None),
    "writes big files": ("f = open('f', 'wb')\nwhile True: f.write(bytes(2**20))", None),
    "prints 10 MB": ("print('x' * 10_000_000)\n" + ADD, "output"),
    "reads the network": ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:80')", None),
    "reads the tests": ("print(open('harness.py').read()); open('/etc/shadow')", None),
    "recurses": ("def f(): f()\nf()", None),
    "prints results": ("\n".join(f"print('{n} true')" for n in range(3)), None),
    "equals everything": (
        "class Any:\n  def __eq__(self, other): return True\n"
        "  def __reduce__(self): return (int, (3,))\ndef add(a, b): return Any()",
        None,
    ),
}


@pytest.mark.parametrize(("code", "ended_for"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_code_gets_zero(code: str, ended_for: str | None) -> None:
    reward = score("code", code, metadata={"tests": CALLS}, **QUICK)
    assert (reward.value, reward.parts["passed"]) == (0.0, 0.0)
    if ended_for is not None:
        assert reward.parts[ended_for] == 1.0


def test_closing_the_output_does_not_change_the_reward() -> None:
    assert passed("import os; os.close(1); os.close(2)\n" + ADD, ASSERTS) == 1.0
    assert passed("import os; os.close(1)", DIALOGUES) == 0.0


def test_time_for_all_tests_is_limited() -> None:
    tests = [{"input": "", "output": "1"}] * 20
    reward = score("code", "import time; time.sleep(0.5); print(1)", metadata={"tests": tests}, total_s=2.0, wall_s=1.0)
    assert reward.value == 0.0 and 0 < reward.parts["passed"] < 0.5 and reward.parts["timeout"] == 1.0


def test_invalid_unicode_is_replaced() -> None:
    assert passed("print(input())", [{"input": "\ud800", "output": "\ud800"}]) == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        [],
        {},
        "",
        "# none",
        [""],
        ["assert True", " "],
        3,
        [1],
        [{"input": "x"}],
        {"inputs": ["a"], "outputs": []},
        [{"a": 1}],
    ],
)
def test_the_error_names_a_sample_with_unreadable_tests(tests: object) -> None:
    with pytest.raises(ValueError, match=r"sample 7 has no tests that can be read: .*; expected Python code, a list"):
        score("code", ADD, metadata={"tests": tests})


def test_a_machine_with_too_little_isolation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(Isolation.LIMITS, "namespaces: not permitted")
    monkeypatch.setattr("slime_rewards.code.machine_isolation", lambda: machine)
    with pytest.raises(ConfigError, match=r"require_isolation is 'filter', and this machine permits only 'limits'"):
        build("code")
