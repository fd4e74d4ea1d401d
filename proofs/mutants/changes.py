"""Single-line changes to a Python file that a test should notice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

_COMPARE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_BINARY: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "amax": "amin",
    "amin": "amax",
    "maximum": "minimum",
    "minimum": "maximum",
    "sum": "mean",
    "mean": "sum",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "sorted": "list",
    "append": "remove",
    "square": "abs",
    "exp": "neg",
}
#: arguments that only state what holds anyway
_GUARDS = {"strict", "dtype"}


@dataclass(frozen=True, order=True)
class Change:
    """One line of a file with another text in one place."""

    line: int  #: from 1
    start: int
    end: int
    text: str  #: in place of the characters from `start` to `end`

    def apply(self, source: str) -> str:
        """The changed file."""
        lines = source.split("\n")
        lines[self.line - 1] = self.changed(lines[self.line - 1])
        return "\n".join(lines)

    def changed(self, line: str) -> str:
        """The changed line."""
        return line[: self.start] + self.text + line[self.end :]


def changes(source: str) -> list[Change]:
    """Every change of the file, in the order of its lines."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found))


class _Finder(ast.NodeVisitor):
    #: what only describes: types, texts of errors, checks of the program itself, imports
    _SKIPPED: ClassVar = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)

    def __init__(self, source: str) -> None:
        self._lines = source.split("\n")
        self.found: list[Change] = []

    def visit(self, node: ast.AST) -> None:
        """Visit what may be changed."""
        if isinstance(node, self._SKIPPED):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Only the body and the defaults: no types, no decorators, no docstring."""
        for part in (*(d for d in (*node.args.defaults, *node.args.kw_defaults) if d), *node.body):
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Only the body: no decorators."""
        for part in node.body:
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Only the value."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call whose result is not used: leave it out. Texts stay."""
        if isinstance(node.value, ast.Constant):
            return
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Another function of the same shape; an option that is not passed on."""
        function = node.func
        if isinstance(function, ast.Name | ast.Attribute):
            name = function.id if isinstance(function, ast.Name) else function.attr
            known = name in _NAMES and not (isinstance(function, ast.Name) and name in ("sum", "mean"))
            if known and function.end_lineno == function.lineno and function.end_col_offset is not None:
                end = self._column(function.lineno, function.end_col_offset)
                self.found.append(Change(function.lineno, end - len(name), end, _NAMES[name]))
        for keyword in node.keywords:
            if keyword.arg in _GUARDS:
                continue
            if isinstance(keyword.value, ast.Attribute) and keyword.arg is not None:
                self._replace(keyword.value, "None")
            self.visit(keyword.value)
        for part in (function, *node.args):
            self.visit(part)

    def visit_Compare(self, node: ast.Compare) -> None:
        """The neighbouring comparison."""
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._between(left, right, *_COMPARE[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """The opposite operation."""
        if type(node.op) in _BINARY and not isinstance(node.left, ast.JoinedStr):
            self._between(node.left, node.right, *_BINARY[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """The opposite operation."""
        if type(node.op) in _BINARY:
            before, after = _BINARY[type(node.op)]
            self._between(node.target, node.value, f"{before}=", f"{after}=")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`."""
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, *words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without the sign or the `not`."""
        if isinstance(node.op, ast.USub | ast.Not) and node.end_lineno == node.lineno:
            self._replace(node, ast.unparse(node.operand))
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Always the first value."""
        if node.end_lineno == node.lineno:
            self._replace(node.test, "True")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Never."""
        self._replace(node.test, "False")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A number that is one higher; the other truth value."""
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._replace(node, repr(node.value + 1))

    def visit_Continue(self, node: ast.Continue) -> None:
        """Go on with the rest of the body."""
        self._replace(node, "pass")

    visit_Break = visit_Continue

    def _column(self, line: int, offset: int) -> int:
        """In characters; ast counts bytes."""
        return len(self._lines[line - 1].encode()[:offset].decode())

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            start, end = self._column(node.lineno, node.col_offset), self._column(node.lineno, node.end_col_offset)
            self.found.append(Change(node.lineno, start, end, text))

    def _between(self, left: ast.expr, right: ast.expr, before: str, after: str) -> None:
        """Replace the operator between two operands on one line."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        start, end = self._column(right.lineno, left.end_col_offset), self._column(right.lineno, right.col_offset)
        match = re.search(re.escape(before).replace(r"\ ", r"\s+"), self._lines[right.lineno - 1][start:end])
        if match:
            self.found.append(Change(right.lineno, start + match.start(), start + match.end(), after))


def only_text(line: str) -> bool:
    """Whether a line is a comment or holds nothing but a text."""
    return bool(re.fullmatch(r"\s*(#.*|f?\"[^\"]*\",?)?", line))


def candidates(source: str) -> Iterator[Change]:
    """The changes of a file that are worth a test: not of texts, logging or notes for people."""
    lines = source.split("\n")
    for change in changes(source):
        line = lines[change.line - 1]
        if not only_text(line) and "logger." not in line and "Field(" not in line and "summary=" not in line:
            yield change
