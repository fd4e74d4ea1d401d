"""The program that runs a response's code with its tests, in the sandbox. It does not import slime.

Standard input is one JSON object: `{"mark"}` and either `{"steps"}` or `{"function", "calls"}`. The response's code is
`solution.py` in the same folder. A step is `["run", CODE]` or `["evaluate", EXPRESSION]`; a call is a list of
arguments. Each that does not raise writes a line to standard output: the mark, its number, and JSON: `true` for code,
`{"value": VALUE}` for an expression, with the value's type (see `plain`), and `{"returned": VALUE}` for a call.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

#: what a function that is called may use without an import, as on LeetCode, whose starting code has `List[int]`
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math
from collections import *
from typing import *
"""


def plain(value: Any) -> list[Any]:
    """A value as `[TYPE, JSON]`, so that a tuple stays a tuple. What has no literal form is an object without value."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return ["value", kind(value)]
    if value is None:
        return ["value", None]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, dict):
        return ["dict", [[plain(key), plain(item)] for key, item in value.items()]]
    for several in (list, tuple, set, frozenset):
        if isinstance(value, several):
            return [several.__name__, [plain(item) for item in value]]
    if hasattr(value, "tolist"):  # arrays and numbers of numpy and torch
        return plain(value.tolist())
    if hasattr(value, "as_integer_ratio"):  # Fraction, Decimal
        return ["fraction", list(value.as_integer_ratio())]
    return ["object", None]


def as_list(value: Any) -> Any:
    """An array or number of numpy or torch as JSON has it. Raises `AttributeError` for anything else."""
    return value.tolist()


def main() -> None:
    """Run the solution, then its tests."""
    request = json.loads(sys.stdin.read())
    # A copy, so that results are written even if the solution closes its standard output.
    results = os.dup(1)
    mark = request.pop("mark")

    def report(number: int, result: Any) -> None:
        os.write(results, f"\n{mark} {number} {json.dumps(result, default=as_list)}\n".encode())

    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    # A module that can be found by its name, as dataclasses and pickle do.
    solution = sys.modules["solution"] = types.ModuleType("solution")
    solution.__file__ = "solution.py"
    names = vars(solution)
    if "function" in request:
        exec(PRELUDE, names)
    exec(compile(source, "solution.py", "exec", dont_inherit=True), names)
    for number, (kind, code) in enumerate(request.get("steps", ())):
        try:
            compiled = compile(code, f"test {number}", "eval" if kind == "evaluate" else "exec", dont_inherit=True)
            result = eval(compiled, names)
            report(number, {"value": plain(result)} if kind == "evaluate" else True)
        except BaseException as error:  # noqa: BLE001 - the boundary around untrusted code
            print(f"test {number}: {type(error).__name__}: {error}", file=sys.stderr)
    for number, arguments in enumerate(request.get("calls", ())):
        try:
            function = names.get(request["function"]) or getattr(names["Solution"](), request["function"])
            report(number, {"returned": function(*arguments)})
        except BaseException as error:  # noqa: BLE001 - the boundary around untrusted code
            print(f"call {number}: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
