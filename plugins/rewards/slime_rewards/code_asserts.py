"""Turns tests that are Python code into comparisons whose expected values stay outside the sandbox.

`assert f(2) == 4` becomes the expression `f(2)`, which is evaluated beside the response's code, and the comparison
`== 4`, which is made here. Code that takes over its process can return any value, but cannot look up the right one.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    # Equality for everything but constants: a value that comes from another process is never the same object.
    ast.Is: lambda value, expected: _is_same(value, expected),
    ast.IsNot: lambda value, expected: not _is_same(value, expected),
    ast.In: lambda value, expected: value in expected,
    ast.NotIn: lambda value, expected: value not in expected,
}
_ADVICE = (
    "Write asserts as `assert EXPRESSION == LITERAL`, so that the sandbox never holds the expected value; or run the"
    ' tests as they are with python_tests = "run", where a response can cheat'
)


def _is_same(value: Any, expected: Any) -> bool:
    constant = any(side is None or isinstance(side, bool) for side in (value, expected))
    return value is expected if constant else bool(value == expected)


@dataclass(frozen=True, slots=True)
class Setup:
    """A statement without an assert; it runs beside the response's code."""

    code: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """An expression, and what its value must fulfil."""

    expression: str
    #: whether a value is right; may raise for a value of an unexpected type
    accepts: Callable[[Any], bool]


Step: TypeAlias = Setup | Comparison


def steps_of(piece: str) -> list[Step]:
    """Take a test apart.

    Accepted are asserts of comparisons with a literal, joined by `and`; of a difference or `math.isclose` with a
    literal; of a plain call or its negation; statements without asserts; and a function of one parameter made of these
    that is called once (`def check(candidate)`).

    Raises:
        ValueError: The test is no Python, has no assert, or has one whose expected value cannot be kept outside.
    """
    try:
        body = _inlined(ast.parse(piece).body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not valid Python: {error}") from error
    steps: list[Step] = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            steps += _comparisons(statement.test, statement)
        elif any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            raise _refusal(statement, "has asserts inside")
        else:
            steps.append(Setup(ast.unparse(statement)))
    if not any(isinstance(step, Comparison) for step in steps):
        raise ValueError(f"it asserts nothing about the response's code. {_ADVICE}")
    return steps


def _refusal(statement: ast.stmt, why: str) -> ValueError:
    return ValueError(f"line {statement.lineno}, `{ast.unparse(statement)[:80]}`, {why}. {_ADVICE}")


def _inlined(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements, with each function of one parameter that has asserts replaced by its body where it is called."""
    checks: dict[str, tuple[str, list[ast.stmt]]] = {}
    out: list[ast.stmt] = []
    for statement in body:
        match statement:
            case ast.FunctionDef(args=ast.arguments(args=[ast.arg(arg=parameter)]), decorator_list=[]) if any(
                isinstance(inner, ast.Assert) for inner in statement.body
            ):
                checks[statement.name] = parameter, statement.body
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[argument], keywords=[])) if name in checks:
                parameter, inner_body = checks.pop(name)
                replace = _Replace(parameter, argument)
                out += [replace.visit(inner) for inner in inner_body]
            case _:
                out.append(statement)
    if checks:
        raise ValueError(f"its function {next(iter(checks))}() is not called once with one argument. {_ADVICE}")
    return out


class _Replace(ast.NodeTransformer):
    """Replaces a name by an expression."""

    def __init__(self, name: str, expression: ast.expr) -> None:
        self._name, self._expression = name, expression

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._expression if node.id == self._name else node


def _comparisons(test: ast.expr, statement: ast.stmt) -> Iterable[Comparison]:
    """The comparisons of an assert; none for `assert True`."""
    match test:
        case ast.Constant(value=value) if value:
            return []
        case ast.BoolOp(op=ast.And(), values=values):
            return [comparison for value in values for comparison in _comparisons(value, statement)]
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(op=ast.Sub(), left=left, right=right)]),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[limit],
        ):
            expression, expected = _sides(left, right, statement)[:2]
            return [Comparison(expression, _near(expected, abs_tol=_literal(limit, statement)))]
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            operands = [left, *comparators]
            return [
                _comparison(left, op, right, statement)
                for left, op, right in zip(operands, ops, operands[1:], strict=False)
            ]
        case ast.Call(
            func=ast.Name(id="isclose") | ast.Attribute(value=ast.Name(id="math"), attr="isclose"),
            args=[left, right],
            keywords=keywords,
        ):
            expression, expected = _sides(left, right, statement)[:2]
            tolerances = {str(keyword.arg): _literal(keyword.value, statement) for keyword in keywords}
            return [Comparison(expression, _near(expected, **{"rel_tol": 1e-9, **tolerances}))]
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call) if _is_plain(call):
            return [Comparison(ast.unparse(call), operator.not_)]
        case ast.Call() if _is_plain(test):
            return [Comparison(ast.unparse(test), bool)]
    raise _refusal(statement, "compares with no literal")


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr, statement: ast.stmt) -> Comparison:
    expression, expected, mirrored = _sides(left, right, statement)
    holds = _OPERATORS[type(op)]
    if mirrored:
        return Comparison(expression, lambda value: holds(expected, value))
    return Comparison(expression, lambda value: holds(value, expected))


def _sides(left: ast.expr, right: ast.expr, statement: ast.stmt) -> tuple[str, Any, bool]:
    """The expression's code, the literal, and whether the literal was on the left."""
    literals = [_is_literal(side) for side in (left, right)]
    if literals == [False, True]:
        return ast.unparse(left), _literal(right, statement), False
    if literals == [True, False]:
        return ast.unparse(right), _literal(left, statement), True
    raise _refusal(statement, "compares with no literal" if not any(literals) else "compares two literals")


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _literal(node: ast.expr, statement: ast.stmt) -> Any:
    if not _is_literal(node):
        raise _refusal(statement, "compares with no literal")
    return ast.literal_eval(node)


def _near(expected: Any, *, rel_tol: float = 0.0, abs_tol: float = 0.0) -> Callable[[Any], bool]:
    return lambda value: math.isclose(value, expected, rel_tol=rel_tol, abs_tol=abs_tol)


def _is_plain(call: ast.Call) -> bool:
    """Whether a truth value comes from the response's code itself: a comparison inside would show what is expected."""
    builtin = isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)
    compares = any(
        isinstance(node, ast.Compare | ast.BoolOp | ast.Lambda | ast.comprehension) for node in ast.walk(call)
    )
    return not builtin and not compares
