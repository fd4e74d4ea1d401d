"""The program that runs a response's code with its tests, in the sandbox. It does not import slime.

Standard input is one JSON object: `{"mark", "checks"}` or `{"mark", "function", "calls"}`. The response's code is
`solution.py` in the same folder. Each test that passes or returns writes a line to standard output: the mark, the
test's number, and JSON: `true` for a check, `{"returned": VALUE}` for a call.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Run the solution, then its tests."""
    request = json.loads(sys.stdin.read())
    # A copy, so that results are written even if the solution closes its standard output.
    results = os.dup(1)
    mark = request.pop("mark")

    def report(number: int, result: Any) -> None:
        os.write(results, f"\n{mark} {number} {json.dumps(result)}\n".encode())

    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    names: dict[str, Any] = {"__name__": "solution", "__file__": "solution.py"}
    exec(compile(source, "solution.py", "exec"), names)
    for number, piece in enumerate(request.get("checks", ())):
        try:
            exec(compile(piece, f"test {number}", "exec"), names)
        except BaseException as error:  # noqa: BLE001 - the boundary around untrusted code
            print(f"test {number}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            report(number, True)
    for number, arguments in enumerate(request.get("calls", ())):
        try:
            function = names.get(request["function"]) or getattr(names["Solution"](), request["function"])
            report(number, {"returned": function(*arguments)})
        except BaseException as error:  # noqa: BLE001 - the boundary around untrusted code
            print(f"call {number}: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
