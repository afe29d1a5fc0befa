"""Parse row filters such as ``num_frames >= 64 and label in (1, 2)``.

A filter consists of comparisons over columns, joined by and, or, not. It is parsed, never evaluated as code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, Final

import pyarrow.compute as pc

from fastvid.errors import UsageError

_COMPARE: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


def parse_filter(text: str, columns: list[str]) -> pc.Expression:
    """Convert a filter to an Arrow expression.

    Args:
        text: Comparisons (``== != < <= > >= in``, ``not in``, ``is None``) joined by ``and``, ``or``, ``not``.
        columns: Names of the existing columns.

    Raises:
        UsageError: If the text is not such an expression, or names an unknown column.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise UsageError(f"cannot parse filter {text!r}: {error.msg}") from error
    return _Parser(text, columns).expression(tree)


class _Parser:
    def __init__(self, text: str, columns: list[str]) -> None:
        self.text, self.columns = text, columns

    def expression(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BoolOp):
            parts = [self.expression(value) for value in node.values]
            result = parts[0]
            for part in parts[1:]:
                result = result & part if isinstance(node.op, ast.And) else result | part
            return result
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.expression(node.operand)
        if isinstance(node, ast.Compare):
            return self.comparison(node)
        if isinstance(node, ast.Name):
            return self.field(node)
        raise self.refused(node)

    def comparison(self, node: ast.Compare) -> Any:
        result, left = None, node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            part = self.single(left, operator, right)
            result = part if result is None else result & part
            left = right
        return result

    def single(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Any:
        if isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(left, ast.Name) or not isinstance(right, ast.Tuple | ast.List | ast.Set):
                raise self.refused(right)
            inside = self.field(left).isin([self.constant(item) for item in right.elts])
            return inside if isinstance(operator, ast.In) else ~inside
        if isinstance(operator, ast.Is | ast.IsNot):
            if not isinstance(left, ast.Name) or not (isinstance(right, ast.Constant) and right.value is None):
                raise self.refused(right)
            null = self.field(left).is_null()
            return null if isinstance(operator, ast.Is) else ~null
        compare = _COMPARE[type(operator)]
        return compare(self.operand(left), self.operand(right))

    def operand(self, node: ast.expr) -> Any:
        return self.field(node) if isinstance(node, ast.Name) else pc.scalar(self.constant(node))

    def field(self, node: ast.Name) -> Any:
        if node.id not in self.columns:
            raise UsageError(
                f"filter {self.text!r} names unknown column {node.id!r}",
                hint=f"quote string values; columns are {', '.join(sorted(self.columns))}",
            )
        return pc.field(node.id)

    def constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.constant(node.operand)
            if isinstance(value, int | float):
                return -value
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
            return node.value
        raise self.refused(node)

    def refused(self, node: ast.expr) -> UsageError:
        return UsageError(
            f"filter {self.text!r} contains {ast.unparse(node)!r}, which is not a comparison",
            hint='write it like num_frames >= 64 and split == "train"',
        )
