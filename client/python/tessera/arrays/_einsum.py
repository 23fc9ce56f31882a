"""np.einsum as products of pairs, from left to right.

The axes of an operand are labelled with the letters of its subscripts, and the axes of an ellipsis
with 0, 1... from the last one backwards.
"""

import re
import string
from typing import Any, Dict, Iterable, List, Tuple, Union

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._views import broadcast_shapes, size_of
from ..wire._errors import BadShape, Unsupported
from ._manipulation import diagonal

Label = Union[str, int]
Labelled = Tuple[Any, List[Label]]  # An array and the labels of its axes.

# The letters that replace the entries of lists of axes when subscripts become text.
_SPELLED: Dict[Any, str] = {
    Ellipsis: "...", **dict(enumerate(string.ascii_uppercase + string.ascii_lowercase))
}


def _labels(term: str, rank: int) -> List[Label]:
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if not re.fullmatch("[A-Za-z]*", before + after) or hidden < 0 or hidden and not dots:
        raise BadShape(f"the subscripts {term!r} do not fit {rank} axes")
    return [*before, *range(hidden)[::-1], *after]


def _spelled(operands: Tuple[Any, ...]) -> Tuple[str, Tuple[Any, ...]]:
    """Returns the subscripts as text if the operands alternate with lists of axes."""

    def spell(axes: Any) -> str:
        return "".join(_SPELLED.get(axis, "?") for axis in axes)

    if isinstance(operands[0], str):
        return operands[0], operands[1:]
    out = "->" + spell(operands[-1]) if len(operands) % 2 else ""
    count = len(operands) // 2 * 2
    return ",".join(map(spell, operands[1:count:2])) + out, operands[:count:2]


def _distinct(x: Any, labels: List[Label]) -> Labelled:
    """Takes diagonals, so that each label occurs once."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            if x.shape[i] != x.shape[j]:
                raise BadShape(f"the axes {label!r} of shape {x.shape} differ in extent")
            x = diagonal(x, 0, i, j)
            labels = [one for at, one in enumerate(labels) if at not in (i, j)] + [label]
    return x, labels


def _summed(x: Any, labels: List[Label], kept: Iterable[Label]) -> Labelled:
    """Sums over the axes whose labels are not kept, in the type of the array."""
    over = tuple(i for i, label in enumerate(labels) if label not in kept)
    left = [label for label in labels if label in kept]
    return (x.sum(over)._typed(x.dtype) if over else x), left


def _arranged(x: Any, labels: List[Label], *groups: List[Label]) -> Tuple[Any, List[Any]]:
    """Returns x with its axes in the order of the groups, and the extents of each group."""
    order = [[labels.index(label) for label in group] for group in groups]
    return x.transpose(sum(order, [])), [tuple(x.shape[i] for i in group) for group in order]


def _product(a: Labelled, b: Labelled, later: Iterable[Label]) -> Labelled:
    """Multiplies two operands and sums over the axes whose labels are not needed later."""
    x, of_x = _summed(*a, {*later, *b[1]})
    y, of_y = _summed(*b, {*later, *of_x})
    shared = [label for label in of_x if label in of_y]
    stack, over = ([one for one in shared if (one in later) == kept] for kept in (True, False))
    rows = [label for label in of_x if label not in shared]
    columns = [label for label in of_y if label not in shared]
    left = _arranged(x, of_x, stack, rows, over)
    right = _arranged(y, of_y, stack, over, columns)
    # Without rows and columns, the products of a stack are sums of elementwise products.
    if over and (rows or columns or not stack) and left[1][2] == right[1][1] and len(stack) <= 6:
        (x, (stack_x, of_rows, summed)), (y, (stack_y, _, of_columns)) = left, right
        x = x.reshape(*stack_x, size_of(of_rows), size_of(summed))
        y = y.reshape(*stack_y, size_of(summed), size_of(of_columns))
        found = x._make(_ops.matmul(x._term(), y._term()))._typed(x.dtype)
        shape = broadcast_shapes(stack_x, stack_y)
        return found.reshape(*shape, *of_rows, *of_columns), stack + rows + columns
    both = of_x + columns
    x = x[(..., *(None,) * (len(both) - len(of_x)))]
    y = y.transpose([of_y.index(label) for label in both if label in of_y])
    y = y[tuple(slice(None) if label in of_y else None for label in both)]
    return _summed(x * y, both, later)


def einsum(*operands: Any, optimize: Any = False, dtype: Any = None) -> Any:
    """optimize= has no effect."""
    subscripts, arrays = _spelled(operands)
    one = next(array for array in arrays if hasattr(array, "_session"))
    arrays = tuple(one._lifted(array, "np.einsum") for array in arrays)
    common = e.common_dtype([array._term() for array in arrays])
    if dtype is not None:
        if not np.can_cast(common, dtype):
            raise Unsupported(f"operands of type {common} cannot be {dtype}: use .astype()")
        common = _dtypes.dtype_of(dtype)
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(arrays):
        raise BadShape(f"{subscripts!r} has subscripts for {len(terms)} operands")
    axes = [_labels(term, array.ndim) for term, array in zip(terms, arrays)]
    extents: Dict[Label, int] = {}
    for array, labels in zip(arrays, axes):
        for label, extent in zip(labels, array.shape):
            (extents[label],) = broadcast_shapes((extents.get(label, 1),), (extent,))
    hidden = sum(isinstance(label, int) for label in extents)
    if arrow:
        out = _labels(right, hidden + len(right.replace("...", "")))
    else:
        every = left.replace(",", "").replace(".", "")
        out = [*range(hidden)[::-1], *(one for one in sorted(every) if every.count(one) == 1)]
    if len({*out}) != len(out) or not {*out} <= {*extents}:
        raise BadShape(f"the result of {subscripts!r} must have each of its subscripts once")
    # Products of 16-bit floats fit into 32 bits.
    wide = np.dtype("<f4") if _dtypes.is_float(common) and common.itemsize == 2 else common
    parts = [_distinct(array._typed(wide), labels) for array, labels in zip(arrays, axes)]
    found = parts[0]
    for i, part in enumerate(parts[1:], 2):
        found = _product(found, part, {*out, *(label for _, of in parts[i:] for label in of)})
    x, labels = _summed(*found, out)
    return x.transpose([labels.index(label) for label in out])._typed(common)
