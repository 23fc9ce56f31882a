"""Errors, with one class for each reason that the server or the client gives.

Each class is a ts.Error. It is also derived from the built-in class that Python programs catch for
such a failure, if there is one.
"""

from typing import Any, Dict, Mapping, Optional, Type

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from . import _protocol as p

# NumPy 1 before 1.25 has no module of exceptions.
AxisError: Any = getattr(np, "exceptions", np).AxisError


class Error(Exception):
    """A call that failed.

    code is gRPC's code, such as "NOT_FOUND". reason is a stable name that callers can compare. It
    is also an attribute of the class. details holds names and figures that concern the error.
    retry_after is the number of seconds after which the server suggests another attempt, or None.
    """

    reason = ""
    _of_reason: Dict[str, Type["Error"]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.reason:
            Error._of_reason[cls.reason] = cls

    def __init__(
        self,
        text: str,
        code: str = "",
        reason: str = "",
        details: Optional[Mapping[str, str]] = None,
        retry_after: Optional[float] = None,
    ) -> None:
        super().__init__(text)
        self.args = (text,)  # AxisError would leave the arguments of unpickling.
        self.text = text
        self.code = code
        self.reason = reason or type(self).reason
        self.details: Dict[str, str] = dict(details or {})
        self.retry_after = retry_after

    def __str__(self) -> str:
        # KeyError would show the repr of the text.
        kind = "/".join(part for part in (self.code, self.reason) if part)
        return f"{self.text} [{kind}]" if kind else self.text

    def __reduce__(self) -> Any:
        return type(self), (self.text, self.code, self.reason, self.details, self.retry_after)


# fmt: off
# --- invalid requests
class BadArgument(Error, ValueError): """INVALID_ARGUMENT with any reason."""
class BadShape(BadArgument): reason = "BAD_SHAPE"
class BadView(BadArgument, IndexError): reason = "BAD_VIEW"
class BadDtype(BadArgument, TypeError): reason = "BAD_DTYPE"
class BadAxes(BadArgument, AxisError): reason = "BAD_AXES"  # type: ignore[misc]
class BadLaunch(BadArgument): reason = "BAD_LAUNCH"
class BadOperand(BadArgument): reason = "BAD_OPERAND"
class BadName(BadArgument): reason = "BAD_NAME"
class BadTtl(BadArgument): reason = "BAD_TTL"
class BadDevice(BadArgument): reason = "BAD_DEVICE"
class BadPlacement(BadArgument): reason = "BAD_PLACEMENT"
class BadRange(BadArgument): reason = "BAD_RANGE"
class BadPage(BadArgument): reason = "BAD_PAGE"
class BadRadius(BadArgument): reason = "BAD_RADIUS"
class BadBool(BadArgument): reason = "BAD_BOOL"
class BadK(BadArgument): reason = "BAD_K"
class BadBins(BadArgument): reason = "BAD_BINS"
class BadIndex(BadArgument, IndexError): reason = "BAD_INDEX"
class BadMatrix(BadArgument, np.linalg.LinAlgError): reason = "BAD_MATRIX"
class BadResult(BadArgument): reason = "BAD_RESULT"
class BadOperation(BadArgument): reason = "BAD_OPERATION"
class BadExpression(BadArgument): reason = "BAD_EXPRESSION"
class BadMessage(BadArgument): reason = "BAD_MESSAGE"
class BadRegion(BadArgument): reason = "BAD_REGION"
class BadLink(BadArgument): reason = "BAD_LINK"
class BadSource(BadArgument): reason = "BAD_SOURCE"
class EmptyInput(BadArgument): reason = "EMPTY_INPUT"
class MissingData(BadArgument): reason = "MISSING_DATA"
class UnknownStrategy(BadArgument): reason = "UNKNOWN_STRATEGY"
class ResultTooLarge(BadArgument): reason = "RESULT_TOO_LARGE"
class TooManySteps(BadArgument): reason = "TOO_MANY_STEPS"
class BadFile(BadArgument): reason = "BAD_FILE"
# --- buffers
class BufferNotFound(Error, KeyError): reason = "BUFFER_NOT_FOUND"
class RegionNotFound(Error, KeyError): reason = "REGION_NOT_FOUND"
class BufferExists(Error, FileExistsError): reason = "BUFFER_EXISTS"
class BufferNotReady(Error, RuntimeError): reason = "BUFFER_NOT_READY"
class BufferSealed(Error, RuntimeError): reason = "BUFFER_SEALED"
class VersionMismatch(Error, LookupError): reason = "VERSION_MISMATCH"
class VersionRequired(Error, LookupError): reason = "VERSION_REQUIRED"
class BadChecksum(Error, OSError): reason = "BAD_CHECKSUM"
class DataLost(Error, OSError): reason = "DATA_LOST"
class SnapshotFailed(Error, OSError): reason = "SNAPSHOT_FAILED"
class SnapshotsOff(Error, RuntimeError): reason = "SNAPSHOTS_OFF"
class ChecksumUnknown(Error, RuntimeError): reason = "CHECKSUM_UNKNOWN"
class UploadIdle(Error, TimeoutError): reason = "UPLOAD_IDLE"
# --- what the server or its device cannot do
class StrategyUnsupported(Error, NotImplementedError): reason = "STRATEGY_UNSUPPORTED"
class PlacementUnsupported(Error, NotImplementedError): reason = "PLACEMENT_UNSUPPORTED"
class OperationTooLong(Error, RuntimeError): reason = "OPERATION_TOO_LONG"
class StepFailed(Error, RuntimeError): reason = "STEP_FAILED"
class CudaError(Error, RuntimeError): reason = "CUDA_ERROR"
# --- exhausted limits
class GpuMemoryExhausted(Error, MemoryError): reason = "GPU_MEMORY_EXHAUSTED"
class HostMemoryExhausted(Error, MemoryError): reason = "HOST_MEMORY_EXHAUSTED"
class ScratchExhausted(Error, MemoryError): reason = "SCRATCH_EXHAUSTED"
class QuotaExceeded(Error, MemoryError): reason = "QUOTA_EXCEEDED"
class TenantQuotaExceeded(Error, MemoryError): reason = "TENANT_QUOTA_EXCEEDED"
class TooManyCalls(Error, RuntimeError): reason = "TOO_MANY_CALLS"
class TooManyBuffers(Error, MemoryError): reason = "TOO_MANY_BUFFERS"
class TooManyUploads(Error, RuntimeError): reason = "TOO_MANY_UPLOADS"
class TooManyDownloads(Error, RuntimeError): reason = "TOO_MANY_DOWNLOADS"
class TooManyRanges(Error, RuntimeError): reason = "TOO_MANY_RANGES"
class TooManyRegions(Error, RuntimeError): reason = "TOO_MANY_REGIONS"
class RegionsUnsupported(Error, RuntimeError): reason = "REGIONS_UNSUPPORTED"
class SharedMemoryExhausted(Error, MemoryError): reason = "SHARED_MEMORY_EXHAUSTED"
class TooManyImports(Error, RuntimeError): reason = "TOO_MANY_IMPORTS"
class QueueFull(Error, RuntimeError): reason = "QUEUE_FULL"
# --- access
class BadToken(Error, PermissionError): reason = "BAD_TOKEN"
class RoleTooSmall(Error, PermissionError): reason = "ROLE_TOO_SMALL"
class UserUnknown(Error, PermissionError): reason = "USER_UNKNOWN"
# --- several servers
class WrongHost(Error, LookupError): reason = "WRONG_HOST"
class SourceNotAllowed(Error, PermissionError): reason = "SOURCE_NOT_ALLOWED"
class SourceRefused(Error, RuntimeError): reason = "SOURCE_REFUSED"
class SourceUnreachable(Error, ConnectionError): reason = "SOURCE_UNREACHABLE"
class SourceStalled(Error, TimeoutError): reason = "SOURCE_STALLED"
# --- the server and the connection to it
class Draining(Error, ConnectionError): reason = "DRAINING"
class DeviceLost(Error, ConnectionError): reason = "DEVICE_LOST"
class Unreachable(Error, ConnectionError): reason = "UNREACHABLE"
class ConnectionLost(Error, ConnectionError): reason = "CONNECTION_LOST"
class Stalled(Error, TimeoutError): reason = "STALLED"
class DeadlineExceeded(Error, TimeoutError): """DEADLINE_EXCEEDED."""
class Cancelled(Error, RuntimeError): """CANCELLED."""
class BufferChanged(Error, RuntimeError): reason = "BUFFER_CHANGED"
# --- errors of the client
# fmt: on


class Unsupported(Error, TypeError, NotImplementedError):
    """The server cannot compute this. The message suggests an alternative."""


class NoAttribute(Unsupported, AttributeError):
    """Only NumPy arrays have this attribute. The message suggests an alternative."""

_OF_CODE: Dict[str, Type[Error]] = {
    "INVALID_ARGUMENT": BadArgument,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNIMPLEMENTED": Unsupported,
}


# grpcio's asyncio reports this for a message that it could not hand to gRPC because the call had
# ended. The status with which the call ended is lost.
_WRITE_FAILED = ("INTERNAL", "Internal error from Core")


def make(
    text: str,
    code: str,
    reason: str,
    details: Optional[Mapping[str, str]] = None,
    retry_after: Optional[float] = None,
) -> Error:
    """Creates an error. Its class is the one of the reason, otherwise the one of the code,
    otherwise Error."""
    kind = Error._of_reason.get(reason, _OF_CODE.get(code, Error))
    return kind(text, code, reason, details, retry_after)


def closed() -> Error:
    """Returns the error that every call of a closed client raises."""
    return Error("the client is closed", "CANCELLED", "CLOSED")


def damaged(what: str) -> Error:
    """Returns the error of a response that violates the protocol."""
    return Error(f"the server's answer {what}", "DATA_LOSS")


def read(kind: Any, data: bytes) -> Any:
    """Parses `data` as a `kind`. gRPC could also do this, but grpc.aio returns None for a malformed
    message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise damaged(
            f"is not a valid {kind.DESCRIPTOR.name}: it was damaged or cut short"
        ) from None


def from_rpc(error: Any) -> Error:
    """Converts a grpc.RpcError to the matching exception."""
    code = error.code().name
    text = error.details() or code
    reason, details, retry_after = "", {}, None
    try:
        for key, value in error.trailing_metadata() or ():
            if key != "grpc-status-details-bin":
                continue
            for detail in p.Status.FromString(value).details:
                kind = detail.type_url.rpartition("/")[2]
                if kind == "google.rpc.ErrorInfo":
                    info = p.ErrorInfo.FromString(detail.value)
                    reason, details = info.reason, dict(info.metadata)
                elif kind == "google.rpc.RetryInfo":
                    delay = p.RetryInfo.FromString(detail.value).retry_delay
                    retry_after = delay.seconds + delay.nanos / 1e9
    except DecodeError:
        pass  # The error still has its code and text.
    broken = code in ("UNAVAILABLE", "CANCELLED") or (code, text) == _WRITE_FAILED
    if broken and not reason:
        # The server gives every refusal a reason. Without a reason, the connection failed, or
        # gRPC cancelled a call because the server was stopping.
        what = "broke" if code == "UNAVAILABLE" else "ended because the server stopped"
        code, reason, text = "UNAVAILABLE", "CONNECTION_LOST", f"the connection {what}: {text}"
    return make(text, code, reason, details, retry_after)


_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def from_step(error: Any) -> Error:
    """Converts a StepError message to the matching exception."""
    return make(
        error.message, _CODES.get(error.code, "UNKNOWN"), error.reason, dict(error.metadata)
    )

__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Error)
]

for _name in __all__:
    globals()[_name].__module__ = "tessera"  # The module where callers find it.
