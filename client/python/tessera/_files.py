"""Arrays in files: .npy, .npz and .safetensors, and columns of Arrow and Parquet files.

Files are mapped into memory, so only the pages that an upload is sending are in memory. The
exceptions are compressed members of .npz files, and columns: one of them is in memory at a time.
The headers of all arrays are checked before the first array is read.
"""

import contextlib
import io
import json
import math
import mmap
import os
import pathlib
import re
import secrets
import stat
import struct
import zipfile
import zlib
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Generator,
    IO,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np
import numpy.typing as npt

from .graph import _dtypes
from .wire._errors import BadFile, BadName, Unsupported

Path = Union[str, "os.PathLike[str]"]

_MAX_NPY_HEADER = 1 << 20
_MAX_HEADER = 16 << 20  # The maximum size of a .safetensors header, which has about 100 bytes per
                        # tensor.
_MAX_RANK = 8
_TYPES: Dict[str, "np.dtype[Any]"] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": _dtypes.bfloat16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_format: Any = np.lib.format  # Parts of this module have no types.


class _Found(NamedTuple):
    """An array in a file. read() reads it, or maps it into memory."""

    dtype: "np.dtype[Any]"
    read: Callable[[], npt.NDArray[Any]]


_Arrays = Iterator[Tuple[str, _Found]]


# --- .npy and .npz --------------------------------------------------------------------------------


def _check_shape(shape: Sequence[int], dtype: "np.dtype[Any]") -> None:
    """Raises ValueError for a shape that every server refuses. An extent of 0 hides no others."""
    elements = math.prod(extent or 1 for extent in shape)
    if len(shape) > _MAX_RANK or elements * dtype.itemsize >= 1 << 63:
        raise ValueError("an array has more than 8 dimensions, or more bytes than can be addressed")


def _npy_header(head: bytes) -> Tuple[Tuple[int, ...], bool, "np.dtype[Any]", int]:
    """Returns the shape, whether the order is Fortran's, the type, and the offset of the elements.
    Raises ValueError, and many other errors for text that is not a header."""
    file = io.BytesIO(head)
    version = _format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError("the .npy format version %d.%d is unknown" % version)
    read = getattr(_format, f"read_array_header_{min(version[0], 2)}_0")
    shape, fortran, dtype = read(file)
    if dtype.hasobject or any(extent < 0 for extent in shape):
        raise ValueError("it holds Python objects, which cannot be loaded, or its shape is wrong")
    _check_shape(shape, dtype)
    return shape, fortran, _dtypes.bfloat16 if dtype == np.dtype("V2") else dtype, file.tell()


def _npy(data: memoryview) -> _Found:
    shape, fortran, dtype, begin = _npy_header(bytes(data[:_MAX_NPY_HEADER]))
    if math.prod(shape) * dtype.itemsize > len(data) - begin:
        raise ValueError(f"it is truncated: the elements would need {shape} of {dtype}")
    order: Any = "F" if fortran else "C"
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, data, begin, order=order)
    return _Found(dtype, lambda: array)


def _npz(path: Path, data: memoryview) -> _Arrays:
    with zipfile.ZipFile(path) as archive:
        end = 0
        for info in sorted(archive.infolist(), key=lambda one: one.header_offset):
            at, packed = info.header_offset, info.compress_size
            if at < end or data[at : at + 4] != b"PK\3\4":
                raise ValueError(f"its members overlap, or {info.filename!r} is at a wrong offset")
            begin = at + 30 + sum(struct.unpack_from("<HH", data, at + 26))
            end = begin + packed
            if end > len(data):
                raise ValueError(f"it is truncated in {info.filename!r}")
            if info.flag_bits & 1 or not info.filename.endswith(".npy"):
                raise ValueError(f"its member {info.filename!r} is encrypted or not a .npy file")
            if info.compress_type == zipfile.ZIP_STORED:
                found = _stored(path, info, data[begin:end])
            else:
                found = _compressed(path, info, archive)
            yield info.filename[: -len(".npy")], found


def _stored(path: Path, info: zipfile.ZipInfo, member: memoryview) -> _Found:
    dtype, mapped = _npy(member)

    def read() -> npt.NDArray[Any]:
        if zlib.crc32(member) != info.CRC:
            raise BadFile(f"{path}: {info.filename!r} is damaged: its CRC-32 is wrong")
        return mapped()

    return _Found(dtype, read)


def _compressed(path: Path, info: zipfile.ZipInfo, archive: zipfile.ZipFile) -> _Found:
    with archive.open(info) as member:
        shape, _, dtype, begin = _npy_header(member.read(_MAX_NPY_HEADER))
    if begin + math.prod(shape) * dtype.itemsize > info.file_size:
        raise ValueError(f"its member {info.filename!r} is truncated")

    def read() -> npt.NDArray[Any]:
        with _explained(path), zipfile.ZipFile(path) as again, again.open(info) as member:
            array: npt.NDArray[Any] = _format.read_array(member, allow_pickle=False)
            member.read()  # The CRC-32 is checked at the end.
        return array.view(dtype)

    return _Found(dtype, read)


# --- .safetensors ---------------------------------------------------------------------------------


def _unique(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header repeats a key")
    return found


def _number(text: str) -> int:
    if len(text) > 19:
        raise ValueError("a number in its header is too large")
    return int(text)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _safetensors(data: memoryview, only: Optional[Collection[str]]) -> _Arrays:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > _MAX_HEADER or size > len(data) - 8:
        raise ValueError(
            f"it is truncated or not a safetensors file: {len(data)} bytes, of which the header"
            f" would be {size}, and at most {_MAX_HEADER} are accepted"
        )
    text = bytes(data[8 : 8 + size]).decode()
    header: Any = json.loads(text, object_pairs_hook=_unique, parse_int=_number)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object of JSON")
    header.pop("__metadata__", None)
    for key, one in header.items():
        if not isinstance(one, dict) or type(one.get("dtype")) is not str:
            raise ValueError(f"its header gives {key!r} no type")
        shape: Any = one.get("shape")
        offsets: Any = one.get("data_offsets")
        lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
        if not lists or not all(map(_is_size, shape + offsets)):
            raise ValueError(f"the shape or the offsets of {key!r} are not natural numbers")
    body, end = data[8 + size :], 0
    for key in sorted(header, key=lambda key: tuple(header[key]["data_offsets"])):
        one = header[key]
        begin, last = one["data_offsets"]
        if begin != end or last < begin or last > len(body):
            raise ValueError(f"the bytes of {key!r} overlap others, leave a gap, or are missing")
        end = last
        dtype = _TYPES.get(one["dtype"])
        if dtype is None and (only is None or key in only):
            raise Unsupported(f"{key!r} has the type {one['dtype']}, which the server lacks")
        if dtype is not None:
            _check_shape(one["shape"], dtype)
            if math.prod(one["shape"]) * dtype.itemsize != last - begin:
                raise ValueError(f"the shape of {key!r} does not match its {last - begin} bytes")
            array: npt.NDArray[Any] = np.ndarray(one["shape"], dtype, body, begin)
            yield key, _Found(dtype, lambda array=array: array)  # type: ignore[misc]
    if end != len(body):
        raise ValueError(f"it has {len(body) - end} bytes after the last tensor")


# --- columns --------------------------------------------------------------------------------------


def _columns(path: Path, only: Optional[Collection[str]], wanted: Any) -> _Arrays:
    try:
        from pyarrow import feather, ipc, memory_map, parquet, types
    except ImportError:
        raise Unsupported(f"{path}: install pyarrow to load columns") from None
    table: Any
    if _suffix(path) == ".parquet":
        file = parquet.ParquetFile(path, memory_map=True)
        schema, table = file.schema_arrow, lambda name: file.read([name])
    else:
        schema = ipc.open_file(memory_map(os.fspath(path))).schema
        table = lambda name: feather.read_table(path, [name], memory_map=True)

    def column(name: str, width: Optional[int]) -> Any:
        with _explained(path):
            chunks = table(name).column(0)
            flat = [one.flatten() for one in chunks.chunks] if width else [chunks]
            if chunks.null_count or any(one.null_count for one in flat):
                if width or wanted is None or not _dtypes.is_float(_dtypes.dtype_of(wanted)):
                    raise Unsupported(f"{name!r}: {_dtypes.MISSING}")
            if not width:
                return chunks.to_numpy()
            parts = [one.to_numpy(zero_copy_only=False) for one in flat]
            return np.concatenate(parts).reshape(-1, width)

    for field in schema:
        if only is None or field.name in only:
            # A list of fixed size, as columns of vectors are, becomes an array of two dimensions.
            listed = types.is_fixed_size_list(field.type)
            element = field.type.value_type if listed else field.type
            width = field.type.list_size if listed else None
            yield field.name, _Found(
                np.dtype(element.to_pandas_dtype()),
                lambda name=field.name, width=width: column(name, width),  # type: ignore[misc]
            )


# --- loading --------------------------------------------------------------------------------------


def _as_name(text: str) -> str:
    return re.sub("[^a-zA-Z0-9._/-]", "_", text)


def _suffix(path: Path) -> str:
    return pathlib.Path(path).suffix.lower()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns every error about the content of a file into a BadFile or an Unsupported with its
    path. NumPy, zipfile and json raise errors of many classes for hostile files."""
    try:
        yield
    except (OSError, BadFile):
        raise
    except Unsupported as error:
        raise Unsupported(f"{path}: {error.text}") from None
    except Exception as error:
        why = str(error).splitlines() or [type(error).__name__]
        raise BadFile(f"{path} cannot be loaded: {why[0][:200]}") from None


def _of_file(path: Path, only: Optional[Collection[str]], wanted: Any) -> Dict[str, _Found]:
    with _explained(path), open(path, "rb") as file:
        kind = _suffix(path)
        if kind in (".parquet", ".feather", ".arrow"):
            found = dict(_columns(path, only, wanted))
        else:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if kind == ".npz":
                pairs = list(_npz(path, data))
                found = _unique(pairs)
            elif kind == ".safetensors":
                found = dict(_safetensors(data, only))
            else:
                return {"": _npy(data)}
        if "" in found:
            raise ValueError("one of its arrays has no name")
        if only is not None:
            if missing := set(only) - set(found):
                raise ValueError(f"it has no array {sorted(missing)[0]!r}")
            found = {key: found[key] for key in only}
        return found


def arrays_of(
    path: Path,
    name: Optional[str],
    prefix: Optional[str],
    only: Optional[Collection[str]],
    dtype: Any,
) -> Iterator[Tuple[str, Optional[str], Callable[[], npt.NDArray[Any]]]]:
    """Yields the key, the buffer's name or None, and a function that reads it, for each array of a
    file or folder. The key of the array of a .npy file is "", unless it is in a folder."""
    folder = os.path.isdir(path)
    files: List[Path] = [path]
    if folder:
        kinds = (".npy", ".npz", ".safetensors")
        files = [one for one in sorted(pathlib.Path(path).iterdir()) if _suffix(one) in kinds]
        if not files or name is not None:
            raise BadFile(
                f"{path} is a folder: it must contain files of arrays, and takes a prefix, "
                "not a name")
    plan: Dict[str, Tuple[Optional[str], _Found]] = {}
    names = set()
    for file in files:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise BadFile(f"{file} is not a regular file")
        stem = pathlib.Path(file).stem
        for key, found in _of_file(file, only, dtype).items():
            if dtype is None:
                with _explained(f"{file}: {key}" if key else file):
                    _dtypes.dtype_of(found.dtype)
            to = (prefix or "") + (name or _as_name(stem)) + (key and "/" + _as_name(key))
            if to in names:
                raise BadFile(f"two arrays of {path} would have the name {to}")
            names.add(to)
            place = None if name is None and prefix is None else to
            if place is not None and not re.fullmatch("[a-zA-Z0-9._/-]{1,128}", place):
                raise BadName(
                    f"an array of {file} would have the name {place[:200]!r}, but a name has 1 to"
                    " 128 characters of [a-zA-Z0-9._/-]"
                )
            plan[(stem + (key and "/" + key)) if folder else key] = place, found
    for key, (place, found) in plan.items():
        yield key, place, found.read


# --- saving ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a temporary file, and renames it to the path when all of it is on the disk. After an
    error, removes the temporary file."""
    path = os.path.realpath(path)  # The target of a symbolic link is replaced.
    partial = os.path.join(os.path.dirname(path), f".tessera-{secrets.token_hex(8)}.part")
    mode = 0o666
    if replaces := os.path.exists(path):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} is not a regular file")
    file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode & 0o777)
    try:
        with open(file, "wb") as out:
            if replaces:
                os.chmod(file, mode & 0o777)
            yield out
            out.flush()
            os.fsync(file)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _write_npy(file: Any, shape: Tuple[int, ...], dtype: "np.dtype[Any]", data: Any) -> None:
    descr = "|V2" if dtype == _dtypes.bfloat16 else dtype.str
    header = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
    _format.write_array_header_1_0(file, header)
    file.write(data)


def _safetensors_header(arrays: Mapping[str, Any]) -> bytes:
    names = {dtype: name for name, dtype in _TYPES.items()}
    header, end = {}, 0
    for key, array in arrays.items():
        begin, end = end, end + math.prod(array.shape) * array.dtype.itemsize
        header[key] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # The bytes of the tensors are aligned.
    return len(text).to_bytes(8, "little") + text


def write(path: Path, arrays: Any) -> Generator[Any, npt.NDArray[Any], None]:
    """Writes one array to a .npy file, or a mapping to a .npz or .safetensors file. Yields each
    array, and receives its elements through send()."""
    kind = _suffix(path)
    if kind not in (".npy", ".npz", ".safetensors"):
        raise ValueError(f"{path}: the name must end in .npy, .npz or .safetensors")
    several = kind != ".npy"
    if isinstance(arrays, Mapping) != several:
        wants = "a mapping of names to arrays" if several else "one array"
        raise TypeError(f"{path}: a {kind} file holds {wants}")
    for key in arrays if several else ():
        if not isinstance(key, str):
            raise TypeError(f"the names of arrays are strings, not {key!r}")
        if key in ("", "__metadata__") or "\0" in key or len(key) > 1000:
            raise ValueError(f"a file cannot hold an array named {key[:100]!r}")
    for key, array in arrays.items() if several else (("", arrays),):
        if not hasattr(array, "_session"):
            raise TypeError(
                f"{path}: {key and f'{key!r} is '}a {type(array).__name__}, not an array on a"
                " server: use NumPy's save functions, or put() it first"
            )

    def bytes_of(array: Any, elements: Any) -> memoryview:
        # Without ml_dtypes, bf16 has become float32.
        return _dtypes.bytes_of(_dtypes.to_server(elements, array.dtype).reshape(-1))

    with _replacing(path) as file:
        if kind == ".npy":
            _write_npy(file, arrays.shape, arrays.dtype, bytes_of(arrays, (yield arrays)))
        elif kind == ".safetensors":
            file.write(_safetensors_header(arrays))
            for array in arrays.values():
                file.write(bytes_of(array, (yield array)))
        else:
            with zipfile.ZipFile(file, "w") as archive:
                for key, array in arrays.items():
                    data = bytes_of(array, (yield array))
                    with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                        _write_npy(member, array.shape, array.dtype, data)
                    del data
