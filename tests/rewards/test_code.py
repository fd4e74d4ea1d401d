"""Code against its tests: right, wrong and hostile programs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.support.rewards import build, score

from slime.errors import ConfigError
from slime_rewards.code import _holds
from slime_rewards.code_asserts import Setup, steps_of
from slime_sandbox import Isolation, Machine

pytestmark = pytest.mark.slow

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


def test_a_dataclass_and_annotations_work_as_in_a_module() -> None:
    code = "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\ndef f(x): return P(x).x + 1\n"
    assert passed(code, ["assert f(1) == 2"]) == 1.0
    assert passed("class A:\n  n: int = 3\ndef f(): return A.__annotations__['n'] is int", ["assert f()"]) == 1.0
    assert passed("import pickle\nclass A: pass\ndef f(): return len(pickle.dumps(A())) > 0", ["assert f()"]) == 1.0


def test_arrays_are_returned_as_their_numbers() -> None:
    code = "class Array:\n  def tolist(self): return [1, 2]\ndef add(a, b): return Array()"
    assert passed(code, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]}) == 1.0
    assert passed(code, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[2, 1]]}) == 0.0


def test_called_functions_have_the_names_of_leetcode() -> None:
    code = "class Solution:\n    def add(self, a: List[int]) -> int:\n        return sum(Counter(a)) + math.gcd(0, 0)"
    assert passed(code, {"fn_name": "add", "inputs": [[[1, 2]]], "outputs": [3]}) == 1.0
    assert passed("math = 3\ndef add(a): return math", {"fn_name": "add", "inputs": [[1]], "outputs": [3]}) == 1.0


def test_functional_tests_of_livecodebench_and_wrapped_outputs_of_apps() -> None:
    tests = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    for more in ({"func_name": "add"}, {"metadata": '{"func_name": "add"}'}):
        metadata = {"tests": tests, **more}
        assert score("code", ADD, metadata=metadata, **QUICK).value == 1.0
        assert score("code", ADD.replace("+", "-"), metadata=metadata, **QUICK).value == 0.0
    with pytest.raises(ValueError, match="does not name the function"):
        score("code", ADD, metadata={"tests": tests})
    wrapped = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], [4]]}
    assert passed(ADD, wrapped) == 1.0
    assert passed("def add(a, b): return [a + b]", wrapped) == 1.0
    assert passed(ADD, {**wrapped, "outputs": [[3], 4]}) == 0.5


def test_expected_values_with_a_name_are_not_shown_to_the_code() -> None:
    test = "want = [3]\nassert add([1], [2]) == want"
    steps = steps_of(test)
    assert not any(isinstance(step, Setup) for step in steps)
    cheat = "import sys\ndef add(a, b):\n  return sys._getframe(1).f_globals.get('want')"
    assert passed(cheat, [test]) == 0.0
    assert passed("def add(a, b): return [a[0] + b[0]]", [test]) == 1.0
    assert [step.code for step in steps_of("n = 2\nassert add(n, 1) == 3") if isinstance(step, Setup)] == ["n = 2"]


@pytest.mark.parametrize(
    "written",
    [
        ["fraction", ["1e999999999"]],
        ["fraction", ["1e999999999", 1]],
        ["fraction", [1, 0]],
        ["complex", ["1", "2"]],
        ["value", {"a": 1}],
        ["value", [1, 2]],
        ["set", [["list", []]]],
        ["bytes", 5],
        "value",
        None,
        7,
    ],
)
def test_what_a_program_writes_is_parsed_as_hostile(written: Any) -> None:
    started = time.process_time()
    [step] = steps_of("assert f() == 1")
    assert not _holds(step, {"value": written})
    assert time.process_time() - started < 1


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


#: code that takes over the process of its tests, which are `[assert add(1, 2) == 3, ...]`
CHEATS = {
    "equals everything": (
        "class Any:\n  def __eq__(self, other): return True\n  def __ne__(self, other): return False\n"
        "  def __reduce__(self): return (int, (3,))\ndef add(a, b): return Any()"
    ),
    "writes the harness's lines and leaves": (
        "import os, sys\nrequest = sys._getframe(1).f_locals['mark']\n"
        "for number in range(3):\n  for result in ('true', '{\"value\": [\"value\", true]}'):\n"
        "    os.write(1, f'\\n{request} {number} {result}\\n'.encode())\nos._exit(0)"
    ),
    "finds its tests in the stack": (
        "import re, sys\nframe = sys._getframe(1)\nseen = repr(frame.f_locals)\n"
        "wanted = re.findall(r'add\\((.*?)\\) == (.*?)[\\'\"]', seen)\n"
        "def add(a, b): return eval(dict(wanted)[f'{a!r}, {b!r}'])"
    ),
    "replaces the harness's functions": (
        "import sys\nframe = sys._getframe(1)\nframe.f_globals['plain'] = lambda value: ['value', True]\n"
        "import builtins\nbuiltins.eval = lambda *_: True\ndef add(a, b): return None"
    ),
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
def test_code_that_takes_over_its_process_fails_tests_in_python(code: str) -> None:
    assert passed(code, ASSERTS) == 0.0


def test_tests_that_run_as_they_are_can_be_cheated() -> None:
    assert passed(CHEATS["equals everything"], ASSERTS, python_tests="run") == 1.0
    assert passed(ADD, ["assert all(add(n, n) == 2 * n for n in range(9))"], python_tests="run") == 1.0
    assert passed(ADD, ["assert all(add(n, n) == 3 * n for n in range(9))"], python_tests="run") == 0.0


VALUES = """
def f(x): return x
class Box:
  def __init__(self): self.kept = []
  def put(self, x): self.kept.append(x)
"""
#: a test, and whether `VALUES` passes it
COMPARED = [
    ("assert f(2) == 2", True),
    ("assert f(2) == 3", False),
    ("assert 2 == f(2), 'a message'", True),
    ("assert f(2) != 2", False),
    ("assert f((1, 2)) == (1, 2)", True),
    ("assert f([1, 2]) == (1, 2)", False),
    ("assert f({'a': {1, 2}, 3: None}) == {'a': {2, 1}, 3: None}", True),
    ("assert f(b'x') == b'x' and f(1j) == 1j", True),
    ("assert f(2) == 2 and f(3) == 4", False),
    ("assert 1 < f(2) <= 2", True),
    ("assert 1 < f(2) < 2", False),
    ("assert f(None) is None and f(2) is not None", True),
    ("assert f(1) is True", False),
    ("assert f(1) is 1", True),
    ("assert f(2) in [1, 2]", True),
    ("assert 3 not in f([1, 2])", True),
    ("assert 3 in f([1, 2])", False),
    ("assert f(2) < 'a'", False),
    ("assert f([1]) in {1, 2}", False),
    ("assert abs(f(0.1) + 0.2 - 0.3) < 1e-9", True),
    ("assert abs(f(0.5) - 0.3) < 1e-9", False),
    ("import math\nassert math.isclose(f(0.1) + 0.2, 0.3)", True),
    ("assert f(True)", True),
    ("assert not f([])", True),
    ("assert f('')", False),
    ("from collections import Counter\nassert Counter(f('aab')) == {'a': 2, 'b': 1}", True),
    ("import numpy as np\nassert f(np.arange(3)) == [0, 1, 2]", True),
    ("import numpy as np\nassert f(np.float32(0.5)) == 0.5", True),
    ("x = [3, 1]\nassert sorted(f(x)) == [1, 3]", True),
    ("box = Box()\nbox.put(1)\nassert box.kept == [1]", True),
    ("box = Box()\nbox.nothing()\nassert f(1) == 1", False),
    ("def check(candidate):\n  assert True, 'for humans'\n  assert candidate(2) == 2\ncheck(f)", True),
    ("def check(candidate):\n  y = 3\n  assert candidate(y) == 4\n\ncheck(f)", False),
    ("def check(put):\n  assert put(5) is None\ncheck(Box().put)", True),
    ("assert f(object()) == 1", False),
    ("assert f(10**5000) == 1", False),
    ("assert set(f((4, 5))) == set((5, 4))", True),
    ("assert f([3, 1]) == sorted([3, 1])", False),
    ("assert f(10**9 + 7) == 10**9 + 7 and f('aaa') == 'a' * 3 and f([0, 0]) == 2 * [0]", True),
    ("assert f(0.5) == 1 / 3", False),
    ("assert f(object()) is not None and f(object()) != 1", True),
    ("import re\nassert f(re.match('a', 'a'))", True),
    ("import re\nassert not f(re.match('a', 'a'))", False),
    ("from fractions import Fraction\nassert f(Fraction(1, 2)) == 0.5", True),
    ("from decimal import Decimal\nassert f(Decimal('2')) == 3", False),
    ("assert f([x for x in range(3) if x > 1]) == [2]", True),
    ("assert f(f(3) - 1) == 2", True),
]


def test_asserts_are_compared_outside_the_sandbox() -> None:
    right, wrong = ([test for test, holds in COMPARED if holds is kind] for kind in (True, False))
    assert passed(VALUES, right) == 1.0, [test for test in right if not passed(VALUES, [test])]
    assert passed(VALUES, wrong) == 0.0, [test for test in wrong if passed(VALUES, [test])]
    beside = [one for test in wrong for one in (test, "assert f(2) == 2")]
    assert passed(VALUES, beside) == 0.5, "one that fails changes no other"


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("assert f(2) == g(2)", r"line 1, `assert f\(2\) == g\(2\)`, compares with no literal"),
        ("x = 1\nassert all(f(n) == n for n in range(3))", "line 2, .* compares with no literal"),
        ("assert isinstance(f(2), int)", "compares with no literal"),
        ("assert f(2) == 2 or f(2) == 3", "compares with no literal"),
        ("assert f(2 == 2)", "compares with no literal"),
        ("assert 1 == 1", "compares two literals"),
        ("assert f(2) == 9**9**9", "compares with no literal"),
        ("assert f(2) == [0] * 10**9", "compares with no literal"),
        ("assert f(2) == 1 / 0", "compares with no literal"),
        ("for n in range(3):\n  assert f(n) == 1", "has asserts inside"),
        ("assert True", "asserts nothing about the response's code"),
        ("print(f(2))", "asserts nothing about the response's code"),
        ("assert (f(2) == 2) is True", "would show the code what is expected"),
        ("assert sum(f(x) == y for x, y in [(2, 2)]) == 1", "would show the code what is expected"),
        ("assert abs(f(2) - 2) == 0", "would show the code what is expected"),
        ("assert 1e-6 > abs(f(2) - 2)", "would show the code what is expected"),
        ("assert np.allclose(f(2), 2) == True", "would show the code what is expected"),
        ("assert np.allclose(f(2), 2)", "compares with no literal"),
        ("assert not differ(f(2), expected=2)", "compares with no literal"),
        ("def same(x):\n  return x == 2\nassert same(f(2))", "leaves the verdict to a function of the test"),
        (
            "from tests import same\nassert f(2) == 2 and same(f(2)) is True",
            "leaves the verdict to a function of the test",
        ),
        ("right = f(2) == 2\nassert right is True", "compares outside of an assert"),
        ("def check(f):\n  assert f(2) == 2", r"check\(\) is not called once with one argument"),
        ("assert f(", "not valid Python"),
        ("assert " + "(" * 500 + "f(1)" + ")" * 500 + " == 1", "not valid Python"),
    ],
)
def test_asserts_that_would_show_the_expected_value_are_refused(test: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)sample 7 has a test that cannot be used: .*{why}"):
        passed("def f(x): return x", [test])


def test_a_docstring_with_expected_values_is_not_run() -> None:
    steps = steps_of('def check(g):\n    """g(2) is 4."""\n    n = 2\n    assert g(n) == 4\n\ncheck(f)')
    shown = [step.code if isinstance(step, Setup) else step.expression for step in steps]
    assert shown == ["n = 2", "f(n)"]


def test_closing_the_output_does_not_change_the_reward() -> None:
    assert passed("import os; os.close(1); os.close(2)\n" + ADD, ASSERTS) == 1.0
    assert passed("import os; os.close(1)", DIALOGUES) == 0.0


def test_time_for_all_tests_is_limited() -> None:
    tests = [{"input": "", "output": "1"}] * 20
    # A busy machine takes a second or two to start a program.
    reward = score("code", "import time; time.sleep(0.5); print(1)", metadata={"tests": tests}, total_s=4.5, wall_s=4.0)
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
    monkeypatch.setattr("slime_sandbox.machine.machine_isolation", lambda: machine)
    with pytest.raises(ConfigError, match=r"require_isolation is 'filter', and this machine permits only 'limits'"):
        build("code")
