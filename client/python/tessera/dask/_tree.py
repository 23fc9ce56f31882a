"""Reductions whose bits do not depend on the chunks of Dask, nor on where they are: those of one
buffer with all elements (kernels/fixed_tree.h).

A block has most chunks of the tree as a whole, and folds them on its server (Part, in
compute.proto). The elements at its ends, of chunks of the tree that it shares with its neighbours,
come to the workers: less than one chunk of the tree at each end. Values of chunks travel, up to 56
bytes each, and a task makes the result of them. Where that is not finite though elements were added
as f32, tasks that wait for it fold all once more, in double (step 6 of the tree).
"""

import functools
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import dask.array as da
import dask.base
import dask.highlevelgraph
import numpy as np

from .. import _dtypes, _ops
from .. import _protocol as p
from .._errors import read
from .._graph import Node
from .._plan import Plan, _number
from . import _servers
from ._chunk import Chunk, Shaped, wrapped
from ._joined import SMALL, numpy_of

_I32, _I64, _F64 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f8")
_SINGLE = (np.dtype("<f4"), _dtypes.bfloat16)  # What the server adds as f32.


def sum(x: Any, axis: Any = None) -> Any:
    """The sum of all elements, an array of Dask without axes, or along axes behind the one that the
    array is cut along. x: an array whose chunks are on servers, cut along its outermost axis alone,
    not counting axes of extent 1. The bits are those of the sum of one buffer, whatever the chunks;
    of integers and truth values it is i64, exactly.

    Until the sum is known to be finite, the chunks of f32 and bf16 stay where they are.

    TypeError: the chunks are on no server. ValueError: the array is cut along another axis, which
    rechunk() puts right, or its outermost axis is to be folded, not counting axes of extent 1:
    x.sum(axis) does that, with bits that depend on the chunks; or extents of chunks are not known."""
    return _reduced("sum", x, axis)


def prod(x: Any, axis: Any = None) -> Any:
    """The product, as sum(); of integers as i64."""
    return _reduced("product", x, axis)


def mean(x: Any, axis: Any = None) -> Any:
    """The mean, as sum(); of integers and truth values as f64. NaN of no elements."""
    return _reduced("mean", x, axis)


def var(x: Any, axis: Any = None, ddof: float = 0) -> Any:
    """The mean squared deviation from the mean, divided by n - ddof rather than n; the rest as of
    mean()."""
    return _reduced("variance", x, axis, ddof)


def std(x: Any, axis: Any = None, ddof: float = 0) -> Any:
    """The square root of var()."""
    return _reduced("std", x, axis, ddof)


def dot(x: Any, y: Any) -> Any:
    """The sum of the products of two vectors with the same chunks; the rest as of sum(). ValueError:
    other shapes or chunks."""
    for one in (x, y):
        _check(one)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"dot of shapes {x.shape} and {y.shape}: two vectors as long as each other")
    if x.chunks != y.chunks:
        raise ValueError("the vectors are cut at different places: y.rechunk(x.chunks)")
    return _whole("dot", [x, y], 0)


# --- the tree


def _chunk_of(n: int, size: int) -> int:
    """Elements of a chunk of the fixed tree of n elements of so many bytes (kernels/fixed_tree.h)."""
    row = 4096 // size
    total = -(-n // row)
    for rows, most in ((8, 8), (4, 4 * 256), (8, 8 * 512), (16, 16 * 512), (28, 28 * 640)):
        if total <= most:
            return rows * row
    rows = 60
    while total > rows * (4608 if rows < 252 else 18432):
        rows = 2 * rows + 4
    return rows * row


# --- arrays


def _check(x: Any) -> None:
    if isinstance(x, da.Array) and any(math.isnan(n) for extents in x.chunks for n in extents):
        raise ValueError("the chunks' extents are not known")
    # Of an array without axes Dask does not know whose kind its only block is.
    if not isinstance(x, da.Array) or (x.ndim and not isinstance(x._meta, Chunk)):
        raise TypeError("the chunks have to be on servers: tessera.dask.put(x) brings them there")


def _cut(x: Any) -> int:
    """The axis that the array is cut along, the first of an extent other than 1."""
    axis = next((i for i, extent in enumerate(x.shape) if extent != 1), 0)
    others = {i: -1 for i in range(x.ndim) if i != axis and len(x.chunks[i]) > 1}
    if others:
        raise ValueError(f"the array is cut along inner axes as well: x.rechunk({others})")
    return axis


def _common(arrays: Sequence[Any]) -> "np.dtype[Any]":
    """The type that the server folds arrays of Dask as."""
    dtype = functools.reduce(_dtypes.promote, (_dtypes.dtype_of(x.dtype) for x in arrays))
    return _I32 if dtype.itemsize == 1 else dtype


def _reduced(op: str, x: Any, axis: Any, ddof: float = 0) -> Any:
    _check(x)
    ddof = float(ddof)  # Of NumPy it would widen what it is a factor of.
    if axis is None:
        return _whole(op, [x], ddof)
    return _rows(op, x, _ops.axes_of(axis, x.ndim), ddof)


def _result_dtype(op: str, arrays: Sequence[Any]) -> "np.dtype[Any]":
    """What callers get."""
    own = [x.dtype for x in arrays]
    if op == "dot" and all(dtype.kind == "b" for dtype in own):
        return np.dtype(bool)
    found = _ops._result_dtype("sum" if op == "dot" else op, _common(arrays))
    return np.dtype("<f4") if found == _dtypes.bfloat16 and not _dtypes.HAVE_ML_DTYPES else found


def _array(graph: Dict[Any, Any], name: str, arrays: Sequence[Any], chunks: Any, meta: Any) -> Any:
    layer = dask.highlevelgraph.HighLevelGraph.from_collections(name, graph, dependencies=arrays)
    return da.Array(layer, name, chunks, meta=meta)


# --- along axes


def _rows(op: str, x: Any, axes: Tuple[int, ...], ddof: float) -> Any:
    cut = _cut(x)
    if any(axis <= cut for axis in axes):
        raise ValueError(
            f"axis {cut} is the outermost one, along which arrays are cut: x.{_METHOD[op]}(axis) folds"
            " it, with bits that depend on the chunks"
        )
    name = f"tessera-{op}-axes-" + dask.base.tokenize(x, axes, ddof)
    fold = functools.partial(_fold_rows, op, axes, ddof, x.size)
    graph = {}
    step = x.size // x.shape[cut] if x.size else 0
    begin = 0
    for number, extent in enumerate(x.chunks[cut]):
        index = [0] * x.ndim
        index[cut] = number
        kept = (i for axis, i in enumerate(index) if axis not in axes)
        graph[(name, *kept)] = (fold, (x.name, *index), begin * step)
        begin += extent
    chunks = tuple(extents for axis, extents in enumerate(x.chunks) if axis not in axes)
    dtype = _result_dtype(op, [x])
    return _array(graph, name, [x], chunks, Chunk(np.empty((0,) * len(chunks), dtype)))


def _fold_rows(
    op: str, axes: Tuple[int, ...], ddof: float, elements: int, x: Any, first: int
) -> Any:
    """A block's rows, with the bits that they have in an array of so many elements."""
    x = _on_server(x)
    array = _as(x, _common([x]))
    term: Any = _ops.reduce(op, array._term(), axes)
    if x.size:
        term[0].params["part"] = _part(first, elements)
    rows = array._make(term)
    if ddof:
        (rows,) = array._session.keep(rows)
        times, over = _ops.correction_of(op, math.prod(x.shape[axis] for axis in axes), ddof)
        rows = (rows.astype("f8") * times / over).astype(rows.dtype)
    if rows.nbytes > SMALL:
        return wrapped(rows, x._address)
    return np.asarray(rows.numpy()).astype(_result_dtype(op, [x]), copy=False)


# --- all elements


def _whole(op: str, arrays: List[Any], ddof: float) -> Any:
    x = arrays[0]
    cut = _cut(x) if x.ndim else 0
    dtype = _common(arrays)
    name = f"tessera-{op}-" + dask.base.tokenize(*arrays, op, ddof)
    result = _result_dtype(op, arrays)
    correction = _ops.correction_of(op, x.size, ddof) if ddof else None
    last = functools.partial(_scalar, dtype, op, result, correction)
    graph: Dict[Any, Any] = {}
    if not x.size:
        nothing = {"sum": 0, "dot": 0, "product": 1}.get(op, math.nan)
        return _array({(name,): (last, nothing)}, name, arrays, (), np.empty((), result))
    parts = _parts(graph, name, op, dtype, arrays, cut)
    values = _fold_all(graph, f"{name}-values", parts, "fixed_tree", ())
    finish = functools.partial(_finish, op, dtype, x.size)
    value = (f"{name}-value",)
    graph[value] = (finish, "fixed_tree", values)
    if dtype in _SINGLE and op in ("sum", "mean", "dot"):
        again = _fold_all(graph, f"{name}-wide-values", parts, "compensated", value)
        wide = (f"{name}-wide",)
        graph[wide] = (functools.partial(_finish_again, finish), value, again)
        value = wide
    graph[(name,)] = (last, value)
    return _array(graph, name, arrays, (), np.empty((), result))


def _parts(
    graph: Dict[Any, Any], name: str, op: str, dtype: "np.dtype[Any]", arrays: List[Any], cut: int
) -> List[Tuple[Any, ...]]:
    """What folds the chunks of the tree, in their order: functions of a strategy and of the values of
    keys, and these keys."""
    x = arrays[0]
    n = x.size
    chunk = _chunk_of(n, dtype.itemsize)
    found: Dict[int, Any] = {}  # By the number of their first chunk.
    shared: Dict[int, List[Any]] = {}  # Keys of pieces, by the number of the chunk.
    begin = 0
    step = n // x.shape[cut] if x.ndim else 1
    for number, extent in enumerate(x.chunks[cut] if x.ndim else (1,)):
        index = [0] * x.ndim
        if x.ndim:
            index[cut] = number
        keys = [(one.name, *index) for one in arrays]
        end = begin + int(extent) * step
        first = -(-begin // chunk) * chunk
        last = end if end == n else end // chunk * chunk
        if first < last:
            fold = functools.partial(_fold_block, op, dtype, n, first, first - begin, last - begin)
            found[first // chunk] = (fold, keys)
        ends = [(begin, end)] if first >= last else [(begin, first), (last, end)]
        for left, right in ends:
            while left < right:  # A short block may be of two chunks, and have no whole one.
                until = min(right, (left // chunk + 1) * chunk)
                key = (f"{name}-piece", left)
                graph[key] = (functools.partial(_piece, left - begin, until - begin), keys)
                shared.setdefault(left // chunk, []).append(key)
                left = until
        begin = end
    for number, pieces in shared.items():
        found[number] = (functools.partial(_fold_pieces, op, dtype, n, number * chunk), pieces)
    return [found[number] for number in sorted(found)]


def _fold_all(
    graph: Dict[Any, Any], name: str, parts: List[Tuple[Any, ...]], strategy: str, after: Any
) -> List[Any]:
    """The keys of the parts' values. after: the key of a value that is not to be finite."""
    keys = []
    for number, (fold, arguments) in enumerate(parts):
        key = (name, number)
        graph[key] = (fold, strategy, arguments, after) if after else (fold, strategy, arguments)
        keys.append(key)
    return keys


# --- what tasks do


def _part(first: int, elements: int) -> Any:
    return p.message("tessera.v1.Part")(first=first, elements=elements)


def _as(x: Chunk, dtype: "np.dtype[Any]") -> Any:
    """The array of a chunk, of a type."""
    array = x.array
    if array.dtype == dtype:
        return array
    (array,) = array._session.keep(array.astype(dtype))
    return array


def _on_server(block: Any) -> Chunk:
    """A block as a chunk that has elements on a server: results that are small come home."""
    chunk = block.chunk() if isinstance(block, Shaped) else Chunk(np.asarray(block))
    if isinstance(chunk.array, np.ndarray):
        return Chunk(_servers.own().put(chunk.array), _servers.own_address())
    return chunk


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _fold(
    op: str, dtype: "np.dtype[Any]", elements: int, first: int, strategy: str, arrays: Sequence[Any]
) -> bytes:
    """The values of the chunks of the tree that arrays of one server are."""
    params = {"part": _part(first, elements)}
    terms = tuple(array._term() for array in arrays)
    if op != "dot":
        params["op"] = op
    node = Node("dot" if op == "dot" else "reduce", terms, (), dtype, params, strategy)
    method, request = Plan([node]).call({})
    session = arrays[0]._session
    answer = session._run(session._core.call(method, request))
    values: bytes = read(p.METHODS[method].response, answer).values
    return values


def _fold_block(
    op: str,
    dtype: "np.dtype[Any]",
    elements: int,
    first: int,
    begin: int,
    end: int,
    strategy: str,
    blocks: Sequence[Any],
    value: Any = None,
) -> Any:
    """Those of elements [begin, end) of a block, the first of which is `first` of all. None: the
    value, of all by fixed_tree, is finite."""
    if _is_finite(value):
        return None
    arrays = []
    for block in blocks:
        chunk = _on_server(block)
        arrays.append(_as(chunk if end - begin == chunk.size else chunk.reshape(-1)[begin:end], dtype))
    if arrays[-1]._session is not arrays[0]._session:
        arrays = [_servers.own().put(array.numpy(), dtype=dtype) for array in arrays]
    return _fold(op, dtype, elements, first, strategy, arrays)


def _piece(begin: int, end: int, blocks: Sequence[Any]) -> List[Any]:
    """Elements [begin, end) of each block."""
    return [numpy_of(block.reshape(-1)[begin:end]) for block in blocks]


def _fold_pieces(
    op: str,
    dtype: "np.dtype[Any]",
    elements: int,
    first: int,
    strategy: str,
    pieces: Sequence[Any],
    value: Any = None,
) -> Any:
    """The value of a chunk of the tree that several blocks have; the rest as _fold_block."""
    if _is_finite(value):
        return None
    client = _servers.own()
    whole = (np.concatenate(one) for one in zip(*pieces))
    arrays = [client.put(one, dtype=dtype) for one in whole]
    return _fold(op, dtype, elements, first, strategy, arrays)


def _finish(
    op: str, dtype: "np.dtype[Any]", elements: int, strategy: str, values: Sequence[bytes]
) -> Any:
    """The value of all elements, as the server gives it."""
    client = _servers.own()
    answer = client._run(
        client._core.unary(
            "Reduce",
            op=p.REDUCE_OPS["sum" if op == "dot" else op],
            part=_part(0, elements),
            dtype=_dtypes.to_wire(dtype),
            values=b"".join(values),
            strategy=strategy,
        )
    )
    kind = answer.value.WhichOneof("value")
    return getattr(answer.value, kind)


def _finish_again(finish: Any, value: Any, values: Sequence[Any]) -> Any:
    return value if _is_finite(value) else finish("compensated", values)


def _scalar(
    dtype: "np.dtype[Any]",
    op: str,
    result: "np.dtype[Any]",
    correction: Optional[Tuple[float, float]],
    value: Any,
) -> Any:
    """A value as NumPy's scalar, rounded as the server rounds it; a variance or
    deviation is corrected as Lazy does it."""
    own = _ops._result_dtype("sum" if op == "dot" else op, dtype)
    wide = _dtypes.to_host(_number(value, own))
    if correction is not None:
        times, over = correction
        with np.errstate(all="ignore"):
            exact = np.asarray(wide.astype("f8") * times / over)
            wide = _dtypes.to_host(_dtypes.to_server(exact, own))
    return np.asarray(wide).astype(result)[()]


_METHOD = {"sum": "sum", "product": "prod", "mean": "mean", "variance": "var", "std": "std"}
