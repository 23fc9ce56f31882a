"""The protocol's messages and methods, made from descriptors when the package is imported.

There is no generated code, because it would tie the package to the version of protobuf that
generated it. The descriptors are in a separate pool, so that a program may have stubs of the same
files.
"""

import dataclasses
import pathlib
from typing import Any, Callable, Dict

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PATH = pathlib.Path(__file__).parents[1] / "protocol.binpb"


def _load() -> Any:
    try:
        data = _PATH.read_bytes()
    except FileNotFoundError:
        raise ImportError(
            f"{_PATH} is missing: build the package (python3 -m build --wheel), or run"
            " `python3 setup.py build_py` in client/python to use it from the sources"
        ) from None
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file) if not hasattr(pool, "AddSerializedFile") else pool.AddSerializedFile(
            file.SerializeToString()
        )
    return pool


_pool = _load()
if hasattr(message_factory, "GetMessageClass"):
    _class_of: Callable[[Any], Any] = message_factory.GetMessageClass
else:
    _class_of = message_factory.MessageFactory(_pool).GetPrototype


def message(name: str) -> Any:
    """Returns the class of a message by its full name."""
    return _class_of(_pool.FindMessageTypeByName(name))


@dataclasses.dataclass(frozen=True)
class Method:
    """One unary or streaming method: its path, and the classes of its messages."""

    name: str
    path: str
    request: Any
    response: Any


SERVICES = tuple(
    f"tessera.v1.{name}" for name in ("BufferService", "ComputeService", "SharedMemoryService")
)


def _methods() -> Dict[str, Method]:
    found = {}
    for service in SERVICES:
        for method in _pool.FindServiceByName(service).methods:
            found[method.name] = Method(
                method.name,
                f"/{service}/{method.name}",
                _class_of(method.input_type),
                _class_of(method.output_type),
            )
    return found


METHODS = _methods()
Tensor = message("tessera.v1.Tensor")
Operand = message("tessera.v1.Operand")
View = message("tessera.v1.View")
Buffer = message("tessera.v1.Buffer")
BufferSpec = message("tessera.v1.BufferSpec")
BufferTarget = message("tessera.v1.BufferTarget")
Result = message("tessera.v1.Result")
Step = message("tessera.v1.Step")
Expression = message("tessera.v1.Expression")
ExpressionNode = message("tessera.v1.Expression.Node")
RegionRange = message("tessera.v1.RegionRange")
RegisterRegionResponse = message("tessera.v1.RegisterRegionResponse")
UploadRequest = message("tessera.v1.UploadRequest")
Status = message("google.rpc.Status")
ErrorInfo = message("google.rpc.ErrorInfo")
RetryInfo = message("google.rpc.RetryInfo")


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _values(enum: str, prefix: str) -> Dict[str, int]:
    """Returns the values of an enum by their names in lower case, without the prefix."""
    values = _pool.FindEnumTypeByName(f"tessera.v1.{enum}").values
    return {value.name[len(prefix) :].lower(): value.number for value in values}


REDUCE_OPS = _values("ReduceOp", "REDUCE_OP_")
TAKE_MODES = _values("TakeMode", "TAKE_MODE_")
LINALG_FUNCTIONS = _values("LinalgFunction", "LINALG_FUNCTION_")
MAP_OPS = _values("MapOp", "MAP_OP_")
DTYPES = _values("Dtype", "DTYPE_")
