"""The parts of an expression: buffers, small arrays that are sent with it, and operations. No
I/O."""

import collections
from typing import Any, Dict, Optional, Tuple, Union

import numpy as np
import numpy.typing as npt

from ..wire import _protocol as p
from . import _dtypes
from ._views import Shape, View, size_of


class Dead(collections.deque):  # type: ignore[type-arg]
    """The names and versions of buffers without references. wake: a function that takes no lock and
    makes a thread delete these buffers soon. A client's calls delete them as well."""

    def __init__(self) -> None:
        super().__init__()
        self.wake: Any = None


class Leaf:
    """A READY buffer of one version. An unnamed buffer has `dead`: when the last reference is gone,
    the buffer's name and version are added to `dead`, and the client deletes the buffer."""

    __slots__ = (
        "buffer",
        "name",
        "version",
        "shape",
        "dtype",
        "whole",
        "operand",
        "dead",
    )

    def __init__(self, buffer: Any, dead: Optional[Dead] = None) -> None:
        self.buffer = buffer
        self.name: str = buffer.name
        self.version: int = buffer.version
        self.shape: Shape = tuple(buffer.shape)
        self.dtype: "np.dtype[Any]" = _dtypes.from_wire(buffer.dtype)
        self.whole = View.whole(self.shape)
        self.operand = p.Operand(buffer=self.name, version=self.version)
        self.dead = dead

    @property
    def devices(self) -> "Tuple[str, ...]":
        """The devices that hold the buffer, in the order of its shards."""
        shards = self.buffer.shards
        return tuple(s.device for s in shards) if shards else (self.buffer.device,)

    def __del__(self) -> None:
        # No lock may be taken here: a garbage collection may come in the middle of a gRPC call.
        dead = getattr(self, "dead", None)
        if dead is not None:
            dead.append((self.name, self.version))
            if dead.wake is not None:
                dead.wake()


class Inline:
    """A small array that is sent with the request."""

    __slots__ = ("array", "shape", "dtype")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.shape: Shape = array.shape
        self.dtype: "np.dtype[Any]" = array.dtype


class Constant:
    """A number inside an expression. Without a type, it takes the type of the other operand, like a
    Python number in NumPy 2."""

    __slots__ = ("value", "dtype")
    shape: Shape = ()

    def __init__(self, value: Any, dtype: "Optional[np.dtype[Any]]" = None) -> None:
        self.value = value
        self.dtype: "np.dtype[Any]" = dtype  # type: ignore[assignment]


# The operations that fold elements, those whose operand may be an expression, and those with two
# results.
FOLDS = ("reduce", "scan")
TAKE_EXPRESSIONS = (*FOLDS, "sort")
GIVE_TWO = ("top_k", "sort", "select")
# The operations whose results may be left out.
MAY_SKIP = ("sort", "select")


class Node:
    """An operation. op is the name of a step of the protocol ("dot", "reduce"...), and params are
    the other fields of its request. For a "map", params["fn"] is the function of each element;
    connected maps become one step (_fuse.py). output selects one of the operation's results: for
    the operations in GIVE_TWO, 0 is the values and 1 the indices. Nodes that differ only in their
    output are one step.
    """

    __slots__ = ("op", "inputs", "params", "shape", "dtype", "strategy", "timing", "output")

    def __init__(
        self,
        op: str,
        inputs: "Tuple[Tuple[Source, View], ...]",
        shape: Shape,
        dtype: "np.dtype[Any]",
        params: Optional[Dict[str, Any]] = None,
        strategy: str = "",
        timing: bool = False,
        output: int = 0,
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.params = params or {}
        self.shape = shape
        self.dtype = dtype
        self.strategy = strategy
        self.timing = timing
        self.output = output

    @property
    def alone(self) -> bool:
        """Whether the node is one step that reads only buffers and small arrays."""
        if self.op == "map":
            return False
        for source, _ in self.inputs:
            if isinstance(source, Node):
                return False
        return True

    @property
    def gives_integers(self) -> bool:
        """Whether the server returns i32 elements that represent booleans."""
        return self.op in FOLDS and self.dtype.kind == "b"

    @property
    def answer_bytes(self) -> int:
        """The bytes of the elements in a response."""
        return size_of(self.shape) * (4 if self.gives_integers else self.dtype.itemsize)

    def using(self, strategy: str, timing: bool) -> "Node":
        return Node(
            self.op,
            self.inputs,
            self.shape,
            self.dtype,
            self.params,
            strategy,
            timing,
            self.output,
        )


Source = Union[Leaf, Inline, Constant, Node]
Term = Tuple[Source, View]
