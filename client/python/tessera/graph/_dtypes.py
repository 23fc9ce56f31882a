"""Element types of NumPy and of the wire.

bf16 is ml_dtypes.bfloat16 if that package is installed. Otherwise it is ts.bfloat16, a structured
type over the same 16 bits, and .numpy() gives float32, which holds every value.
"""

import sys
from typing import Any, Dict, Optional, Tuple

import numpy as np
import numpy.typing as npt

from ..wire._errors import Unsupported

try:
    import ml_dtypes

    bfloat16: "np.dtype[Any]" = np.dtype(ml_dtypes.bfloat16)
    HAVE_ML_DTYPES = True
except ImportError:
    bfloat16 = np.dtype([("bfloat16", "<u2")])
    HAVE_ML_DTYPES = False

_NAMES: Tuple[Tuple[int, str, "np.dtype[Any]"], ...] = (
    (1, "f32", np.dtype("<f4")),
    (2, "f64", np.dtype("<f8")),
    (3, "f16", np.dtype("<f2")),
    (4, "bf16", bfloat16),
    (5, "i32", np.dtype("<i4")),
    (6, "i64", np.dtype("<i8")),
    (7, "bool", np.dtype(bool)),
    (8, "u8", np.dtype(np.uint8)),
    (9, "i8", np.dtype(np.int8)),
)
_WIRE: Dict["np.dtype[Any]", int] = {dtype: wire for wire, _, dtype in _NAMES}
_NUMPY: Dict[int, "np.dtype[Any]"] = {wire: dtype for wire, _, dtype in _NAMES}
# In NumPy, "u8" and "i8" name types of eight bytes.
_BY_NAME: Dict[str, "np.dtype[Any]"] = {
    name: dtype for _, name, dtype in _NAMES if name not in ("u8", "i8")
}
_BY_NAME["bfloat16"] = bfloat16
SHORT: Dict["np.dtype[Any]", str] = {dtype: name for _, name, dtype in _NAMES}


def argument_of(dtype: "np.dtype[Any]") -> str:
    """Returns the name of a type as arguments give it, such as "f32" or "int8"."""
    return dtype.name if is_byte(dtype) else SHORT[dtype]


def named(dtype: Any) -> "np.dtype[Any]":
    """Returns the type that `dtype` names, which is a NumPy type or "f32", "bf16" and so on."""
    found = _BY_NAME.get(dtype) if isinstance(dtype, str) else None
    return np.dtype(dtype) if found is None else found


def dtype_of(dtype: Any) -> "np.dtype[Any]":
    """Returns the server's type that `dtype` names, which is a NumPy type or "f32", "bf16" and so
    on. Raises Unsupported if the server has no such type."""
    found = named(dtype)
    wire = _WIRE.get(found if found == bfloat16 else found.newbyteorder("<"))
    if wire is None:
        way = "convert with put(dtype=...) or .astype()"
        if isinstance(dtype, str) and dtype.endswith("u8"):
            way = 'in NumPy, "u8" has eight bytes, and "uint8" or "B" has one'
        raise Unsupported(
            f"the server has no elements of type {found}: it has bool, uint8, int8, int32, int64,"
            f" float16, bfloat16, float32 and float64; {way}"
        )
    return _NUMPY[wire]  # It does not show its byte order.


def to_wire(dtype: "np.dtype[Any]") -> int:
    return _WIRE[dtype]


def from_wire(wire: int) -> "np.dtype[Any]":
    try:
        return _NUMPY[wire]
    except KeyError:
        raise Unsupported(f"element type {wire} is unknown: update this package") from None


def promote(a: "np.dtype[Any]", b: "np.dtype[Any]") -> "np.dtype[Any]":
    """Returns the common type of two types, as NumPy promotes them. bfloat16 gives float64 with an
    integer of more than one byte, float32 with float16, and the larger type with another float.
    Raises Unsupported if the server lacks the common type."""
    if a == b:
        return a
    if bfloat16 in (a, b):
        other = b if a == bfloat16 else a
        if other.itemsize == 1:
            return bfloat16
        return np.dtype("<f4" if other.kind == "f" and other.itemsize < 8 else "<f8")
    found: "np.dtype[Any]" = np.promote_types(a, b)
    if found not in _WIRE:
        raise Unsupported(f"{a} with {b} gives {found}, which the server lacks: use .astype()")
    return found


def can_cast(own: "np.dtype[Any]", to: "np.dtype[Any]", casting: Any = "safe") -> bool:
    """Like np.can_cast, which may have no rules for bf16."""
    if own != to and bfloat16 in (own, to) and casting in ("safe", "same_kind"):
        if to == bfloat16 and casting == "safe":
            return own.itemsize == 1
        own, to = (np.dtype("<f4") if one == bfloat16 else one for one in (own, to))
    return np.can_cast(own, to, casting)


def check_cast(own: "np.dtype[Any]", to: "np.dtype[Any]", casting: Any) -> None:
    """Raises TypeError if NumPy's rule `casting` forbids this conversion."""
    if not can_cast(own, to, casting):
        raise TypeError(f"casting={casting!r} does not allow a cast from {own} to {to}")


def is_float(dtype: "np.dtype[Any]") -> bool:
    """Returns whether a type is a float. In NumPy, bf16 is not of the float kind."""
    return dtype.kind == "f" or dtype == bfloat16


def is_integer(dtype: "np.dtype[Any]") -> bool:
    return dtype.kind == "i"


def is_byte(dtype: "np.dtype[Any]") -> bool:
    """Returns whether a type is a one-byte integer."""
    return dtype.itemsize == 1 and dtype.kind != "b"


def round_to_bf16(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rounds to the nearest bf16 values, ties to even, as the server does. NaN stays NaN."""
    wide = np.asarray(array)
    if HAVE_ML_DTYPES and wide.dtype == np.float32:
        return wide.astype(bfloat16)
    # Rounds to float32 by rounding to odd, and then to nearest. Rounding to nearest twice, as
    # ml_dtypes does, would create ties that the original numbers do not have.
    wide, shape = wide.reshape(-1), wide.shape
    single = wide.astype(np.float32)
    bits = single.view(np.uint32)
    if wide.dtype != np.float32:
        with np.errstate(invalid="ignore"):
            above = np.abs(single.astype(wide.dtype)) > np.abs(wide)
            inexact = single.astype(wide.dtype) != wide
        fix = inexact & np.isfinite(single)
        bits = np.where(fix & above, bits - 1, bits)
        bits = np.where(fix, bits | 1, bits).astype(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    rounded = np.where(np.isnan(single), ((bits >> 16) | 0x40).astype("<u2"), rounded)
    return np.ascontiguousarray(rounded).astype("<u2").view(bfloat16).reshape(shape)


def host_of(dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    """Returns the type that a caller of numpy() gets."""
    return np.dtype("<f4") if dtype == bfloat16 and not HAVE_ML_DTYPES else dtype


def to_host(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Converts the server's bytes for a caller. Without ml_dtypes, bf16 becomes float32."""
    if HAVE_ML_DTYPES or array.dtype.kind != "V":
        return array
    bits = np.ascontiguousarray(array).view("<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32).reshape(array.shape)


_HOST = (1, 3)  # DLPack's kDLCPU and kDLCUDAHost.


MISSING = (
    "missing values cannot be stored: use put(dtype='f4') or another float type to make them NaN,"
    " or replace them, in pandas with .fillna(value)"
)


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def is_pandas(value: Any) -> bool:
    return _library(value) == "pandas" and hasattr(value, "to_numpy")


def _of_pandas(value: Any, wanted: Any) -> npt.NDArray[Any]:
    """Returns columns, including those of types that allow missing values, as an array of NumPy
    types. Missing values become NaN if the result has a float type. Raises Unsupported if there are
    missing values and the result has another type."""
    columns = list(value.dtypes) if value.ndim == 2 else [value.dtype]
    types = [getattr(column, "numpy_dtype", column) for column in columns]
    if types == columns or not all(isinstance(one, np.dtype) for one in types):
        return np.asarray(value)
    found: "np.dtype[Any]" = np.result_type(*types) if wanted is None else np.dtype(wanted)
    if not np.any(value.isna()):
        return value.to_numpy(dtype=found)  # type: ignore[no-any-return]
    if found.kind != "f":
        raise Unsupported(MISSING)
    return value.to_numpy(dtype=found, na_value=np.nan)  # type: ignore[no-any-return]


def _is_missing(value: Any) -> bool:
    if isinstance(value, float):
        return value != value
    return type(value).__name__ in ("NoneType", "NAType", "NaTType")


def to_numpy(value: Any, wanted: Any = None) -> npt.NDArray[Any]:
    """Like np.asarray, but also takes arrays of other libraries, even on a device or of types that
    NumPy lacks. A mask is rejected, not dropped. Missing values among Python objects become NaN if
    a float type is wanted, and stay as they are if bool is wanted; otherwise they are rejected.
    wanted: the requested type, if any."""
    array = _to_numpy(value, wanted)
    if array.dtype != object:
        return array
    missing = np.array([_is_missing(one) for one in array.flat], bool).reshape(array.shape)
    if not missing.any() or (wanted is not None and wanted.kind == "b"):
        return array
    if wanted is None or not is_float(wanted):
        raise Unsupported(MISSING)
    return np.where(missing, np.nan, array)


def _to_numpy(value: Any, wanted: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ma.MaskedArray):
        raise Unsupported("the server has no masks: use .filled(), or np.where on the server")
    if isinstance(value, np.ndarray):
        return value
    if is_pandas(value):
        return _of_pandas(value, "<f4" if wanted == bfloat16 else wanted)
    if _library(value) == "torch":
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            torch: Any = sys.modules["torch"]  # It is loaded, because it made the tensor.
            bits: npt.NDArray[Any] = value.contiguous().view(torch.int16).numpy()
            return bits.view("<u2").view(bfloat16)
        return value.numpy()  # type: ignore[no-any-return]
    if hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) not in _HOST:
        if hasattr(value, "get"):
            return np.asarray(value.get())  # CuPy copies to the host.
        if not hasattr(value, "__array__"):
            raise Unsupported(f"{type(value).__name__} is not on the host: copy it there first")
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    return np.asarray(value)


def _converted(array: npt.NDArray[Any], wanted: "np.dtype[Any]") -> npt.NDArray[Any]:
    """Returns a C-contiguous array of a type that the server has. Copies only if necessary."""
    if wanted == bfloat16 and array.dtype != bfloat16:
        array = round_to_bf16(array)
    elif array.dtype == bfloat16 and wanted != bfloat16:
        array = to_host(array).astype(wanted)
    if array.dtype == wanted == bool:
        array = array.view(np.uint8) != 0  # NumPy allows any byte, the server only 0 and 1.
    # ascontiguousarray would turn a scalar into an array of rank 1.
    return np.asarray(array, wanted, order="C")


def to_server(array: Any, dtype: Any = None) -> npt.NDArray[Any]:
    """Returns a C-contiguous little-endian array of a type that the server has. Copies only if
    necessary."""
    wanted = None if dtype is None else dtype_of(dtype)
    array = to_numpy(array, wanted)
    return _converted(array, dtype_of(array.dtype) if wanted is None else wanted)


class Outgoing:
    """The bytes of an array in the form that the server takes: little-endian, of one of its types,
    in row-major order. Slices are converted on demand, so no array is converted as a whole, except
    for an array of Python objects. An array that needs no conversion is used in place. The settings
    of np.errstate at construction apply to all slices. Thread safe."""

    def __init__(self, value: Any, dtype: Any = None) -> None:
        if hasattr(value, "_session"):
            raise TypeError(
                "the array is already on a server: use .save(name) to store an expression,"
                " .copy(name) to make another buffer, or t.import_from(server, name) on another"
                " server"
            )
        wanted = None if dtype is None else dtype_of(dtype)
        self._array = to_numpy(value, wanted)
        self.shape = self._array.shape
        self.dtype = dtype_of(self._array.dtype) if wanted is None else wanted
        self._errors: Any = {"call": np.geterrcall(), **np.geterr()}
        self._bytes: Optional[memoryview] = None
        ready = self._array.dtype == self.dtype and self._array.flags.c_contiguous
        if ready and self.dtype == bool:
            ready = not self._array.size or int(self._array.view(np.uint8).max()) <= 1
        if ready or self._array.dtype.hasobject:
            self.convert()

    def convert(self) -> None:
        """Converts the whole array, in the caller's thread."""
        if self._bytes is None:
            self._array = _converted(self._array, self.dtype)
            self._bytes = bytes_of(self._array.reshape(-1))

    def __len__(self) -> int:
        return self._array.size * self.dtype.itemsize

    def __getitem__(self, key: slice) -> memoryview:
        if self._bytes is not None:
            return self._bytes[key]
        begin, end, _ = key.indices(len(self))
        first, last = begin // self.dtype.itemsize, -(-end // self.dtype.itemsize)
        block = np.empty(max(last - first, 0), self._array.dtype)
        if len(block):
            at = 0
            parts: Any = np.nditer(
                self._array, ["external_loop", "buffered", "ranged"], order="C"
            )
            parts.iterrange = first, last
            for part in parts:
                block[at : at + len(part)] = part
                at += len(part)
        skipped = first * self.dtype.itemsize
        with np.errstate(**self._errors):
            converted = _converted(block, self.dtype)
        return bytes_of(converted)[begin - skipped : end - skipped]


def bytes_of(flat: npt.NDArray[Any]) -> memoryview:
    """Returns the memory of a vector, without a copy."""
    array: Any = flat.view(np.uint8)
    return memoryview(array)
