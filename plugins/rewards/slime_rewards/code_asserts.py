"""Turns tests that are Python code into comparisons whose expected values stay outside the sandbox.

`assert f(2) == 4` becomes the expression `f(2)`, which is evaluated beside the response's code, and the comparison
`== 4`, which is made here. Code that takes over its process can return any value, but cannot look up the right one.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

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
    that is called once (`def check(candidate)`). Literals may be in `set(...)`, `sorted(...)` and the like, and
    in arithmetic.

    Raises:
        ValueError: The test is no Python, has no assert, or has one whose expected value cannot be kept outside.
    """
    try:
        body = _with_values(_inlined(ast.parse(piece).body))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not valid Python: {error}") from error
    steps: list[Step] = []
    own: set[str] = set()  # names of the test's own functions, which may hold what is expected
    for statement in body:
        match statement:
            case ast.Assert(test=test):
                if _asks_own(test, own):
                    raise _refusal(statement, "leaves the verdict to a function of the test, which the code could read")
                steps += _comparisons(test, statement)
                continue
            case ast.Expr(value=ast.Constant()):  # a docstring may say what is expected
                continue
            case ast.FunctionDef(name=name):
                own.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                own |= {(one.asname or one.name).partition(".")[0] for one in names}
            case ast.Assign(value=value) | ast.Expr(value=value) if _compares(value):
                raise _refusal(statement, "compares outside of an assert, where the code could see it")
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            raise _refusal(statement, "has asserts inside")
        steps.append(Setup(ast.unparse(statement)))
    if not any(isinstance(step, Comparison) for step in steps):
        raise ValueError(f"it asserts nothing about the response's code. {_ADVICE}")
    return steps


def _refusal(statement: ast.stmt, why: str) -> ValueError:
    shown = " ".join(ast.unparse(statement).split())
    return ValueError(f"line {statement.lineno}, `{shown[:80]}`, {why}. {_ADVICE}")


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


def _with_values(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements with names for expected values, `want = 4`, replaced by the values: the code never sees them.

    Replaced are names that are set once, to a literal, and used in comparisons of asserts alone.
    """
    stored = Counter(node.id for one in body for node in ast.walk(one) if _is_name(node, ast.Store))
    used = Counter(node.id for one in body for node in ast.walk(one) if _is_name(node, ast.Load))
    compared = Counter(
        side.id
        for one in body
        if isinstance(one, ast.Assert)
        for node in ast.walk(one.test)
        for side in _compared(node)
        if isinstance(side, ast.Name)
    )
    values = {
        statement.targets[0].id: statement.value
        for statement in body
        if isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and stored[statement.targets[0].id] == 1
        and 0 < used[statement.targets[0].id] == compared[statement.targets[0].id]
        and _is_literal(statement.value)
    }
    out: list[ast.stmt] = []
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if len(targets) == 1 and getattr(targets[0], "id", None) in values:
            continue
        for name, value in values.items() if isinstance(statement, ast.Assert) else ():
            statement = _Replace(name, value).visit(statement)
        out.append(statement)
    return out


def _is_name(node: ast.AST, context: type[ast.expr_context]) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, context)


def _compared(node: ast.AST) -> list[ast.expr]:
    """What a node compares with each other."""
    match node:
        case ast.Compare(left=left, comparators=comparators):
            return [left, *comparators]
        case ast.Call(func=ast.Name(id="isclose") | ast.Attribute(attr="isclose"), args=[left, right]):
            return [left, right]
        case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(op=ast.Sub(), left=left, right=right)]):
            return [left, right]
    return []


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
            return [Comparison(f"not {ast.unparse(call)}", bool)]
        case ast.Call() if _is_plain(test):
            return [Comparison(f"not not {ast.unparse(test)}", bool)]
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
    if literals[0] == literals[1]:
        raise _refusal(statement, "compares two literals" if literals[0] else "compares with no literal")
    expression, literal = (right, left) if literals[0] else (left, right)
    expected = _literal(literal, statement)
    verdict = isinstance(expected, bool) and isinstance(expression, ast.Call) and _passes_expected(expression)
    if verdict or _compares(expression) or _subtracts_literal(expression):
        raise _refusal(statement, "would show the code what is expected")
    return ast.unparse(expression), expected, literals[0]


#: builtins whose value for literals is a literal too: MBPP compares with `set((4, 5))`
_MAKERS: dict[str, Callable[..., Any]] = {
    make.__name__: make for make in (set, frozenset, tuple, list, dict, sorted, float, int, str)
}


def _is_literal(node: ast.expr) -> bool:
    try:
        _evaluated(node)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return False
    return True


def _literal(node: ast.expr, statement: ast.stmt) -> Any:
    if not _is_literal(node):
        raise _refusal(statement, "compares with no literal")
    return _evaluated(node)


def _evaluated(node: ast.expr) -> Any:
    """The value of a literal, as it is, in calls of `_MAKERS` or in arithmetic; `ValueError` for other expressions."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _MAKERS:
            return _MAKERS[name](*map(_evaluated, arguments))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_evaluated(left), _evaluated(right))
    return ast.literal_eval(node)


def _power(base: Any, exponent: Any) -> Any:
    if abs(base) > 10**6 or abs(exponent) > 100:
        raise ValueError("too large for a literal")
    return base**exponent


def _product(left: Any, right: Any) -> Any:
    """A product of numbers, or a repeated text or list: `"a" * 3`."""
    several, count = (right, left) if isinstance(left, int) else (left, right)
    if hasattr(several, "__len__") and len(several) * count > 100_000:
        raise ValueError("too large for a literal")
    return left * right


#: `10**9 + 7`, `1 / 3`, `[0] * 5`
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _product,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}


def _near(expected: Any, *, rel_tol: float = 0.0, abs_tol: float = 0.0) -> Callable[[Any], bool]:
    return lambda value: math.isclose(value, expected, rel_tol=rel_tol, abs_tol=abs_tol)


def _is_plain(call: ast.Call) -> bool:
    """Whether a truth value comes from the response's code itself: a comparison inside would show what is expected."""
    compares = any(
        isinstance(node, ast.Compare | ast.BoolOp | ast.Lambda | ast.comprehension) for node in ast.walk(call)
    )
    return not _is_builtin(call) and not compares and not _passes_expected(call)


def _is_builtin(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)


def _asks_code(node: ast.AST) -> bool:
    """Whether an expression calls more than builtins, such as the response's code."""
    return any(isinstance(part, ast.Call) and not _is_builtin(part) for part in ast.walk(node))


def _passes_expected(call: ast.Call) -> bool:
    """Whether a call gets a computed value beside another argument, like `allclose(f(2), 4)`."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return len(given) > 1 and any(map(_asks_code, given))


def _compares(expression: ast.expr) -> bool:
    """Whether a comparison inside shows what a call is expected to return, as in `(f(2) == 4) is True`."""
    return any(isinstance(node, ast.Compare) and _asks_code(node) for node in ast.walk(expression))


def _subtracts_literal(expression: ast.expr) -> bool:
    """Whether the expression is a call's difference from a literal, such as `abs(f(2) - 4)`."""
    match expression:
        case ast.BinOp(left=left, op=ast.Sub(), right=right) if _is_literal(left) != _is_literal(right):
            return _asks_code(expression)
        case ast.BinOp(left=left, right=right):
            return _subtracts_literal(left) or _subtracts_literal(right)
        case ast.UnaryOp(operand=operand):
            return _subtracts_literal(operand)
        case ast.Call(func=ast.Name(id="abs" | "round" | "int" | "float"), args=[inner, *_]):
            return _subtracts_literal(inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="fabs"), args=[inner]):
            return _subtracts_literal(inner)
    return False


def _asks_own(test: ast.expr, own: set[str]) -> bool:
    """Whether an assert is about the verdict of a function that the test itself defines or imports."""
    match test:
        case ast.BoolOp(values=values):
            return any(_asks_own(value, own) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _asks_own(operand, own)
        case ast.Compare(left=left, comparators=[ast.Constant(value=bool())]):
            return _asks_own(left, own)
        case ast.Call(func=function) if not _is_isclose(test):
            while isinstance(function, ast.Attribute):
                function = function.value
            return isinstance(function, ast.Name) and function.id in own
    return False


def _is_isclose(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name == "isclose"
