"""Views: windows into row-major memory, and NumPy's basic indexing of them. No I/O.

Offsets and strides count elements.
"""

import operator
from typing import Any, Iterable, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..wire._errors import BadAxes, BadIndex, BadShape, BadView

Shape = Tuple[int, ...]
MAX_RANK = 8


def row_major(shape: Sequence[int]) -> Shape:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def size_of(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


class View(NamedTuple):
    """Element [i0, i1, ...] is at offset + i0 * strides[0] + i1 * strides[1] + ..."""

    offset: int
    shape: Shape
    strides: Shape

    @staticmethod
    def whole(shape: Sequence[int]) -> "View":
        shape = tuple(shape)
        return View(0, shape, row_major(shape))

    @property
    def size(self) -> int:
        return size_of(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements are adjacent in memory, in row-major order."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides)):
            if extent != 1 and stride != expected:
                return self.size == 0
            expected *= extent
        return True

    def span(self) -> Tuple[int, int]:
        """The range of elements [begin, end) that the view reads."""
        if self.size == 0:
            return 0, 0
        low = high = self.offset
        for extent, stride in zip(self.shape, self.strides):
            reach = (extent - 1) * stride
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high + 1

    def at(self, key: Any) -> "View":
        """Applies NumPy's basic indexing: integers, slices, None, `...`."""
        items = list(key) if isinstance(key, tuple) else [key]
        taken = sum(1 for item in items if item is not None and item is not Ellipsis)
        dots = sum(1 for item in items if item is Ellipsis)
        if dots > 1:
            raise BadView("an index may have only one ellipsis")
        if taken > len(self.shape):
            raise BadView(f"{taken} indices are too many for {len(self.shape)} axes")
        if dots == 0:
            items.append(Ellipsis)
        offset, shape, strides, axis = self.offset, [], [], 0
        for item in items:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            if item is Ellipsis:
                kept = len(self.shape) - taken
                shape += self.shape[axis : axis + kept]
                strides += self.strides[axis : axis + kept]
                axis += kept
                continue
            extent, stride = self.shape[axis], self.strides[axis]
            axis += 1
            if isinstance(item, slice):
                start, stop, step = item.indices(extent)
                length = len(range(start, stop, step))
                offset += start * stride if length else 0
                shape.append(length)
                strides.append(step * stride if length > 1 else stride)
                continue
            number: Any = None if isinstance(item, (bool, np.bool_)) else item
            try:
                i = operator.index(number)
            except TypeError:
                raise BadIndex(
                    f"an index cannot be of type {type(item).__name__}: an index has integers,"
                    " slices, None, Ellipsis (`...`) and an array of integers or booleans"
                ) from None
            if not -extent <= i < extent:
                raise BadView(f"index {i} is out of range for axis {axis - 1} of extent {extent}")
            offset += (i + extent if i < 0 else i) * stride
        return View(offset, tuple(shape), tuple(strides)).checked()

    def transpose(self, axes: Optional[Sequence[int]] = None) -> "View":
        rank = len(self.shape)
        order = range(rank)[::-1] if axes is None else [normalize_axis(a, rank) for a in axes]
        if sorted(order) != list(range(rank)):
            raise BadShape(f"{tuple(axes or ())} is not a permutation of {rank} axes")
        return View(
            self.offset, tuple(self.shape[a] for a in order), tuple(self.strides[a] for a in order)
        )

    def moved_last(self, axis: int) -> "View":
        """Moves an axis to the end."""
        at = normalize_axis(axis, len(self.shape))
        return self.transpose([*(i for i in range(len(self.shape)) if i != at), at])

    def broadcast_to(self, shape: Sequence[int]) -> "View":
        shape = extents(shape)
        new = len(shape) - len(self.shape)
        if new < 0:
            raise BadShape(f"shape {self.shape} does not broadcast to {shape}")
        if min(shape, default=0) < 0:
            raise BadShape(f"shape {shape} has a negative extent")
        strides = [0] * new
        for have, want, stride in zip(self.shape, shape[new:], self.strides):
            if have != want and have != 1:
                raise BadShape(f"shape {self.shape} does not broadcast to {shape}")
            strides.append(stride if have == want else 0)
        return View(self.offset, shape, tuple(strides)).checked()

    def reshape(self, shape: Sequence[int]) -> Optional["View"]:
        """Returns the same elements, in row-major order, in another shape, or None if no strides
        can express it."""
        wanted = list(extents(shape))
        if wanted.count(-1) == 1:
            known = size_of([extent for extent in wanted if extent != -1])
            if known and self.size % known == 0:
                wanted[wanted.index(-1)] = self.size // known
        if size_of(wanted) != self.size or min(wanted, default=0) < 0:
            raise BadShape(
                f"{self.size} elements of shape {self.shape} do not fill {extents(shape)}")
        if self.size == 0:
            return View(0, tuple(wanted), row_major(wanted)).checked()
        # Runs of axes that share one stride, outermost first: [elements, innermost stride].
        runs: list[list[int]] = []
        for extent, stride in zip(self.shape, self.strides):
            if extent == 1:
                continue
            if runs and runs[-1][1] == stride * extent:
                runs[-1] = [runs[-1][0] * extent, stride]
            else:
                runs.append([extent, stride])
        strides = []
        for extent in reversed(wanted):
            if extent == 1:
                strides.append(0)
                continue
            while runs and runs[-1][0] == 1:
                runs.pop()
            left, stride = runs[-1]
            if left % extent:
                return None
            strides.append(stride)
            runs[-1] = [left // extent, stride * extent]
        return View(self.offset, tuple(wanted), tuple(reversed(strides))).checked()

    def checked(self) -> "View":
        if len(self.shape) > MAX_RANK:
            raise BadShape(f"{len(self.shape)} axes are too many: at most {MAX_RANK} are allowed")
        return self if self.size else self._replace(offset=0)  # An empty view has no first element.


def index_of(value: Any, what: str = "an axis") -> int:
    """Returns a Python or NumPy integer as an int. Raises TypeError for a bool or another type."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer, not {value!r} of type {type(value).__name__}")
    return operator.index(value)


def is_true(value: Any, what: str) -> bool:
    """Converts a bool or an integer to a bool. Raises TypeError for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return bool(index_of(value, what))


def extents(shape: Any) -> Shape:
    """Returns a shape that is given as integers or, as in NumPy, as a single integer."""
    return tuple(index_of(one, "an extent") for one in several(shape))


def several(value: Any) -> Tuple[Any, ...]:
    """Returns the integers of an argument that may be a single integer."""
    one = getattr(value, "ndim", None) == 0 or not isinstance(value, Iterable)
    return (value,) if one else tuple(value)


def normalize_axis(axis: Any, rank: int) -> int:
    """Returns an axis in [0, rank). Raises BadAxes, or TypeError if it is not an integer."""
    at = index_of(axis)
    if not -rank <= at < rank:
        raise BadAxes(f"axis {at} is out of range for {rank} axes")
    return at % rank


def normalize_axes(axis: Any, rank: int) -> Tuple[int, ...]:
    """Returns axes in [0, rank). Raises BadAxes if an axis does not exist or is given twice."""
    axes = tuple(normalize_axis(one, rank) for one in several(axis))
    if len(set(axes)) != len(axes):
        raise BadAxes(f"an axis is given twice in {axis}")
    return axes


def broadcast_shapes(a: Shape, b: Shape) -> Shape:
    rank = max(len(a), len(b))
    wide_a, wide_b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    for x, y in zip(wide_a, wide_b):
        if x != y and 1 not in (x, y):
            raise BadShape(f"shapes {a} and {b} do not broadcast together")
    return tuple(y if x == 1 else x for x, y in zip(wide_a, wide_b))
