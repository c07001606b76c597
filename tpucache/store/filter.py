"""Conditions on the columns of a samples table, such as "age > 60 and site == 'A'". They never run code."""

from __future__ import annotations

import ast
import itertools
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.store.fields import LABEL
from tpucache.store.samples import SampleTable, Strings

Mask = npt.NDArray[np.bool_]
#: For each sample, 1 if a condition is true, -1 if it is false, 0 if a value is missing: so `and` is the minimum, `or`
#: the maximum, and `not` the negative (Kleene's three-valued logic).
Truth = npt.NDArray[np.int8]

CLASS: Final = "class"

_LONGEST: Final = 10_000
_LARGEST: Final = 2**64
# `class` is a Python keyword: outside of strings, a name of the same length replaces it before the text is parsed.
_STAND_IN: Final = "_" * len(CLASS)
_STRING_OR_CLASS: Final = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|\bclass\b""")
_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class _Values(NamedTuple):
    """One side of a comparison: a column, array (n,), or one constant for all samples; `name` is for messages."""

    values: Any
    is_missing: Any
    is_text: bool
    name: str


def matching(
    condition: str, table: SampleTable, positions: npt.NDArray[np.int64], classes: tuple[str, ...] = ()
) -> Mask:
    """Return which of the samples at these positions meet a condition: bool (n,).

    A condition compares columns, numbers and strings by ==, !=, <, <=, >, >= and `in (…, …)`, combined by and, or, not
    and parentheses. `class` is the name of a sample's class. A comparison with a missing value (NaN, "" or the label
    -1) is neither true nor false, so it does not match, not even with `not` or !=.
    """
    if not isinstance(condition, str):
        raise UsageError(f"a condition is a string such as \"age > 60 and site == 'A'\", not {condition!r:.100}")
    try:
        return _Condition(condition, table, positions, classes).matches()
    except (RecursionError, MemoryError) as error:
        raise UsageError("the condition is nested too deeply: select samples in several steps") from error


class _Condition:
    def __init__(
        self, text: str, table: SampleTable, positions: npt.NDArray[np.int64], classes: tuple[str, ...]
    ) -> None:
        if len(text) > _LONGEST:
            raise UsageError(f"a condition has at most {_LONGEST:,} characters, not {len(text):,}")
        self._text = re.sub(r"\s", " ", text).strip()
        self._table, self._positions, self._classes = table, positions, classes
        self._has_classes = bool(classes) and LABEL in table and CLASS not in table

    def matches(self) -> Mask:
        source = _STRING_OR_CLASS.sub(lambda found: found[1] or _STAND_IN, self._text)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of unknown escapes in strings
                tree = ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise self._error("this is not a condition", (getattr(error, "offset", None) or 1) - 1) from error
        return self._truth(tree) > 0

    def _truth(self, node: ast.expr) -> Truth:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return -self._truth(node.operand)
        if isinstance(node, ast.BoolOp):
            parts = [self._truth(part) for part in node.values]
        elif isinstance(node, ast.Compare):
            sides = itertools.pairwise([node.left, *node.comparators])
            parts = [self._comparison(*pair, each) for pair, each in zip(sides, node.ops, strict=True)]
        else:
            raise self._refused(node, "a condition is a comparison, such as age > 60")
        is_or = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)
        joined: Truth = np.max(parts, 0) if is_or else np.min(parts, 0)
        return joined

    def _comparison(self, left: ast.expr, right: ast.expr, each: ast.cmpop) -> Truth:
        if isinstance(each, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.Tuple, ast.List, ast.Set)):
                raise self._refused(right, "after `in` comes a list in parentheses, such as ('A', 'B') or ('A',)")
            nothing = self._truths(np.False_, self._values(left).is_missing)  # the list may be empty
            is_in: Truth = np.max([nothing, *(self._compared(left, operator.eq, item) for item in right.elts)], 0)
            return is_in if isinstance(each, ast.In) else -is_in
        compare = _COMPARISONS.get(type(each))
        if compare is None:
            raise self._refused(right, "values are compared by ==, !=, <, <=, >, >= or in, not by `is`")
        return self._compared(left, compare, right)

    def _compared(self, left: ast.expr, compare: Callable[[Any, Any], Any], right: ast.expr) -> Truth:
        one, other = self._values(left), self._values(right)
        if one.is_text != other.is_text:
            text, number = (one, other) if one.is_text else (other, one)
            hint = f": use {CLASS} for names" if LABEL in (one.name, other.name) and self._has_classes else ""
            raise self._refused(right, f"{text.name} is text and {number.name} a number{hint}")
        return self._truths(compare(one.values, other.values), one.is_missing | other.is_missing)

    def _truths(self, is_true: Any, is_missing: Any) -> Truth:
        truths = np.where(is_missing, 0, np.where(is_true, 1, -1))
        return np.broadcast_to(truths, len(self._positions)).astype(np.int8)

    def _values(self, node: ast.expr) -> _Values:
        if isinstance(node, ast.Name):
            return self._column(node)
        try:
            constant = ast.literal_eval(node)
        except (ValueError, TypeError):
            constant = None
        if not isinstance(constant, (int, float, str)):
            raise self._refused(node, "columns are compared with numbers, strings and other columns")
        if isinstance(constant, int) and abs(constant) > _LARGEST:
            raise self._refused(node, "this number is larger than any value in a column")
        return _Values(constant, np.False_, isinstance(constant, str), repr(constant))

    def _column(self, node: ast.Name) -> _Values:
        name = CLASS if node.id == _STAND_IN else node.id
        if name == CLASS and self._has_classes:
            numbers = self._numbers(node, LABEL)
            names = np.array([*self._classes, ""], object)  # the label -1 selects the last name, ""
            return _Values(names[numbers], numbers < 0, True, name)
        if name not in self._table:
            has = sorted({*self._table} | ({CLASS} if self._has_classes else set()))
            raise self._refused(node, f"there is no column {name!r} (there are {', '.join(has)})")
        column = self._table[name]
        if isinstance(column, Strings):
            texts = np.array([*column, ""], object)[:-1][self._positions]
            return _Values(texts, texts == "", True, name)
        values = self._numbers(node, name)
        is_missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), np.bool_)
        if name == LABEL and values.dtype.kind in "iu":
            is_missing = values < 0
        return _Values(values, is_missing, False, name)

    def _numbers(self, node: ast.expr, name: str) -> Array:
        column = np.asarray(self._table[name])
        if column.ndim != 1:
            raise self._refused(node, f"{name} has several values per sample: use a column with a single value")
        values: Array = column[self._positions]
        return values

    def _refused(self, node: ast.expr, reason: str) -> UsageError:
        return self._error(reason, len(self._text.encode()[: node.col_offset].decode(errors="ignore")))

    def _error(self, reason: str, at: int) -> UsageError:
        at = min(max(at, 0), len(self._text))
        return UsageError(f"{reason}, at character {at + 1} of the condition: {self._text[:at]} >>>{self._text[at:]}")
