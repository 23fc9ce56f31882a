"""Clients for the access tests: with tokens, over shared memory, and through every method."""

import array
import fcntl
import hashlib
import mmap
import os
import socket

import grpc
import numpy as np

import outsider as o

PIECE = np.arange(4, dtype=np.float32)


class Bearer(grpc.UnaryUnaryClientInterceptor,
             grpc.UnaryStreamClientInterceptor,
             grpc.StreamUnaryClientInterceptor):
    """Adds metadata to every call."""

    def __init__(self, *metadata):
        self.metadata = metadata

    def add(self, go_on, details, request):
        metadata = [*(details.metadata or ()), *self.metadata]
        return go_on(details._replace(metadata=metadata), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = add


class Caller(o.Client):
    """A client with a token, or with any metadata."""

    def __init__(self, server, token=None, metadata=()):
        super().__init__(server.address)
        if token is not None:
            metadata = (("authorization", f"Bearer {token}"), *metadata)
        self.plain = self.channel
        self.channel = grpc.intercept_channel(self.plain, Bearer(*metadata))
        self.b = o.buffer_grpc.BufferServiceStub(self.channel)
        self.c = o.compute_grpc.ComputeServiceStub(self.channel)
        self.s = o.shared_grpc.SharedMemoryServiceStub(self.channel)
        server.clients.append(self)

    def close(self):
        self.plain.close()

    def reason(self, rpc, **fields):
        return self.attempt(rpc, **fields).reason

    def shared(self, rpc, timeout=20, **fields):
        request = getattr(o.shared, rpc + "Request")(**fields)
        return o.outcome_of(lambda: getattr(self.s, rpc)(request, timeout=timeout))


def line_of(token, role="write", tenant="one", *quotas):
    return " ".join([hashlib.sha256(token.encode()).hexdigest(), role, tenant, *quotas])


def replace(path, text):
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.chmod(0o644)
    os.replace(fresh, path)


class Region:
    """Memory that is shared with a server."""

    def __init__(self, path):
        file = os.memfd_create("region", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, mmap.PAGESIZE)
        os.posix_fallocate(file, 0, mmap.PAGESIZE)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.memory = mmap.mmap(file, mmap.PAGESIZE)
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(20)
        self.connection.connect(str(path))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))
        self.connection.sendmsg([b"tessera.v1"], [rights])
        self.answer = o.shared.RegisterRegionResponse.FromString(self.connection.recv(65536))
        self.token = self.answer.region
        os.close(file)

    def range(self, size):
        return o.shared.RegionRange(region=self.token, offset=0, size=size)


def every_method(caller):
    """Returns the outcome of each method of the protocol, by name."""
    x = o.resident("x")
    requests = {"CreateBuffer": dict(name="made", spec=o.spec_of(PIECE, replace=True)),
                "GetBuffer": dict(name="x"),
                "ListBuffers": {},
                "SealBuffer": dict(name="x"),
                "UpdateBuffer": dict(name="x"),
                "CopyBuffer": dict(source="x", name="copy", replace=True),
                "ImportBuffer": dict(source="nowhere", source_name="x", name="copy"),
                "DeleteBuffer": dict(name="nothing"),
                "Snapshot": {},
                **{rpc: o.fields_of(rpc, x) for rpc in o.operations().values()},
                "Execute": {},
                "ListStrategies": {},
                "GetServerInfo": {}}
    ends = {rpc: caller.attempt(rpc, **fields) for rpc, fields in requests.items()}
    ends["Upload"] = caller.try_upload(
        [dict(name="up", spec=o.spec_of(PIECE, replace=True), data=PIECE.tobytes())])
    ends["Download"] = o.outcome_of(lambda: caller.download("x"))
    for rpc in ("GetSharedMemory", "UploadShared", "DownloadShared"):
        ends[rpc] = caller.shared(rpc)
    return ends

