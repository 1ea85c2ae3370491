"""Conditions that choose rows of a frame: the ``where`` of figures, views and panels. Parsed, never evaluated.

``policy == 'oea' and (budget in [2, 4] or num_ranks > 8)``: columns and literals, compared by ==, !=, <, <=, >, >=, in
and not in, joined by and, or, not. A column of true and false stands alone. ``null`` is what is missing: it equals
itself alone, and has no order. Words and numbers are never equal.

Python's grammar reads the text, and the nodes below are all that is known of it: no call, attribute, subscript or
arithmetic. A condition of a stranger's results can name columns, and nothing else.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_ep_bench.errors import UserError, brief, did_you_mean

if TYPE_CHECKING:  # A config's conditions are read where no frame is.
    import pandas as pd

_MOST_CHARACTERS = 1000  # more could nest deeper than Python's parser goes
_KINDS = ("numbers", "words")
_WORDS = {"null": None, "true": True, "false": False}
_EXPECTED = (
    "expected columns and literals, compared by ==, !=, <, <=, >, >=, in, not in and joined by and, or, not, "
    "such as \"policy == 'oea' and budget != null\""
)
_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def matching(rows: pd.DataFrame, condition: str) -> pd.DataFrame:
    """The rows for which a condition holds; all where it is empty."""
    return rows[holds(rows, condition)] if condition and len(rows) else rows


def holds(rows: pd.DataFrame, condition: str, known: Collection[str] | None = None) -> pd.Series:
    """Whether a condition holds, row by row: bool.

    Args:
        known: columns that may be named; None = all. One that the frame lacks is null.

    Raises:
        UserError: it cannot be read, names an unknown column, or compares words with numbers.
    """
    tree = parsed(condition)
    known = [str(name) for name in rows] if known is None else known
    for name in columns_of(condition):
        if name not in known:
            listed = f"expected a column, one of {', '.join(known)}"
            raise UserError(f"{listed}; got {brief(name)}{did_you_mean(name, known)}")
    import pandas as pd

    return pd.Series(_holds(tree, rows), rows.index, dtype=bool)


def columns_of(condition: str) -> list[str]:
    """The columns that a condition names."""
    names = (node.id for node in ast.walk(parsed(condition)) if isinstance(node, ast.Name))
    return [name for name in dict.fromkeys(names) if name not in _WORDS]


@lru_cache(maxsize=256)
def parsed(condition: str) -> ast.expr:
    """The condition's tree, of nodes that are known.

    Raises:
        UserError: it is none.
    """
    try:
        if len(condition) > _MOST_CHARACTERS:
            raise ValueError
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in words
            tree = ast.parse(condition.strip(), mode="eval").body
        _check_condition(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{_EXPECTED}; got {brief(condition)}") from None
    return tree


def _check_condition(node: ast.AST) -> None:
    """Raise ValueError where a node is no condition."""
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _check_condition(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _check_condition(operand)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for kind, right in zip(ops, comparators, strict=True):
                _literal_or_name(left)
                if isinstance(kind, ast.In | ast.NotIn) and isinstance(right, ast.Tuple | ast.List | ast.Set):
                    list(map(_literal, right.elts))
                elif type(kind) in _COMPARED:
                    _literal_or_name(right)
                else:
                    raise ValueError
                left = right
        case ast.Name(id=name) if name not in _WORDS:
            pass
        case _:
            raise ValueError


def _literal_or_name(node: ast.AST) -> None:
    if not isinstance(node, ast.Name):
        _literal(node)


def _literal(node: ast.AST) -> Any:
    """The value of a literal; ValueError of anything else."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError


def _holds(node: ast.expr, rows: pd.DataFrame) -> np.ndarray:
    match node:
        case ast.BoolOp(op=kind, values=values):
            join = np.logical_and if isinstance(kind, ast.And) else np.logical_or
            return join.reduce([_holds(value, rows) for value in values])
        case ast.UnaryOp(operand=operand):
            return ~_holds(operand, rows)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            pairs = zip([left, *comparators], ops, comparators, strict=False)
            return np.logical_and.reduce([_compared(one, kind, other, rows) for one, kind, other in pairs])
    values = _values(node, rows)
    if others := [value for value in values if value is not None and not isinstance(value, bool | np.bool_)]:
        raise UserError(f"{ast.unparse(node)}: expected a comparison, as it has {_KINDS[isinstance(others[0], str)]}")
    return np.array([value is True for value in values], dtype=bool)


def _compared(left: ast.AST, kind: ast.cmpop, right: ast.AST, rows: pd.DataFrame) -> np.ndarray:
    values = _values(left, rows)
    if isinstance(right, ast.Tuple | ast.List | ast.Set):
        listed = [_literal(item) for item in right.elts]
        for item in listed:
            _check_kinds(left, values, [item])
        found = [value in listed for value in values]
        return np.array(found, dtype=bool) != isinstance(kind, ast.NotIn)
    others = _values(right, rows)
    _check_kinds(left, values, others)
    _check_kinds(right, others, values)
    pairs = zip(values, others, strict=True)
    return np.array([_pair_holds(value, _COMPARED[type(kind)], other) for value, other in pairs], dtype=bool)


def _values(node: ast.AST, rows: pd.DataFrame) -> list[Any]:
    """A value of each row; null is None."""
    if isinstance(node, ast.Name) and node.id not in _WORDS:
        if node.id not in rows:
            return [None] * len(rows)
        column = rows[node.id]
        return column.astype(object).where(column.notna(), None).to_list()
    return [_literal(node)] * len(rows)


def _pair_holds(value: Any, compare: Callable[[Any, Any], Any], other: Any) -> bool:
    has_order = None not in (value, other) and isinstance(value, str) == isinstance(other, str)
    return (has_order or compare in (operator.eq, operator.ne)) and bool(compare(value, other))


def _check_kinds(node: ast.AST, values: list[Any], others: list[Any]) -> None:
    """Raise UserError where a column's values and what they are compared with have no kind in common."""
    ours, theirs = ({isinstance(value, str) for value in listed if value is not None} for listed in (values, others))
    if isinstance(node, ast.Name) and ours and theirs and ours.isdisjoint(theirs):
        has, got = _KINDS[True in ours], "words" if True in theirs else "a number"
        raise UserError(f"{node.id}: has {has}; got {got}: {brief(next(one for one in others if one is not None))}")
