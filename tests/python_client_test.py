#!/usr/bin/env python3
"""Talks to a running server with nothing of this project but its .proto files; NumPy is the judge.

The stubs are made by protoc when the test starts; the client is the distribution's grpcio. What
passes here, a client in any other language can do too.

usage: python_client_test.py --server build/bin/tessera-server [unittest arguments]
"""

import argparse
import importlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import google
import grpc
import numpy as np
from google.protobuf import descriptor_pb2, json_format

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
CHUNK = 1 << 20
START_TIMEOUT_S = 60  # A sanitized server on a busy machine takes its time.
CALL_TIMEOUT_S = 60

# Filled by main() and by make_stubs().
server_program = None
buffers = None  # tessera.v1.buffer_pb2
compute = None  # tessera.v1.compute_pb2
status_pb2 = None
error_details_pb2 = None
reflection = None  # REFLECTION_PROTO


def make_stubs(folder):
    """Generates the Python modules of the protocol into folder and imports them."""
    global buffers, compute, status_pb2, error_details_pb2, reflection
    files = [
        "tessera/v1/buffer",
        "tessera/v1/compute",
        "google/rpc/status",
        "google/rpc/error_details",
    ]
    subprocess.run(
        [
            "protoc",
            f"-I{PROTO}",
            f"--python_out={folder}",
            f"--grpc_python_out={folder}",
            f"--plugin=protoc-gen-grpc_python={shutil.which('grpc_python_plugin')}",
            *(f"{PROTO}/{name}.proto" for name in files),
        ],
        check=True,
    )
    sys.path.insert(0, folder)
    # "google" is also the package that protobuf itself lives in.
    google.__path__.append(os.path.join(folder, "google"))
    pathlib.Path(folder, "reflection.proto").write_text(REFLECTION_PROTO)
    subprocess.run(
        ["protoc", f"-I{folder}", f"--python_out={folder}", f"{folder}/reflection.proto"],
        check=True,
    )
    reflection = importlib.import_module("reflection_pb2")
    buffers = importlib.import_module("tessera.v1.buffer_pb2")
    compute = importlib.import_module("tessera.v1.compute_pb2")
    status_pb2 = importlib.import_module("google.rpc.status_pb2")
    error_details_pb2 = importlib.import_module("google.rpc.error_details_pb2")


# What is needed here of gRPC's reflection protocol, which Debian's Python packages do not have.
REFLECTION_PROTO = """
syntax = "proto3";
package grpc.reflection.v1alpha;
message ServerReflectionRequest {
  string file_containing_symbol = 4;
  string list_services = 7;
}
message FileDescriptorResponse { repeated bytes file_descriptor_proto = 1; }
message ServiceResponse { string name = 1; }
message ListServiceResponse { repeated ServiceResponse service = 1; }
message ErrorResponse { int32 error_code = 1; string error_message = 2; }
message ServerReflectionResponse {
  FileDescriptorResponse file_descriptor_response = 4;
  ListServiceResponse list_services_response = 6;
  ErrorResponse error_response = 7;
}
"""


class Server:
    """A server process on a free loopback port."""

    def __init__(self, folder):
        self.log = pathlib.Path(folder) / "server.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [server_program, "--listen", "127.0.0.1:0", "--device", "auto"],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            found = re.search(r"127\.0\.0\.1:[1-9]\d*", self.log.read_text())
            if found:
                self.address = found.group()
                return
            if self.process.poll() is not None or time.monotonic() > give_up:
                self.process.kill()
                raise RuntimeError("the server did not start:\n" + self.log.read_text())
            time.sleep(0.05)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=START_TIMEOUT_S)


def dtype_of(array):
    return {
        "float32": buffers.DTYPE_F32,
        "float64": buffers.DTYPE_F64,
        "float16": buffers.DTYPE_F16,
        "uint16": buffers.DTYPE_BF16,  # the bits: NumPy has no such type
        "int32": buffers.DTYPE_I32,
        "int64": buffers.DTYPE_I64,
    }[array.dtype.name]


NUMPY_TYPES = {1: "<f4", 2: "<f8", 3: "<f2", 4: "<u2", 5: "<i4", 6: "<i8"}


def tensor(array):
    array = np.asarray(array)
    return compute.Tensor(
        dtype=dtype_of(array), shape=array.shape, data=np.ascontiguousarray(array).tobytes()
    )


def to_numpy(message):
    return np.frombuffer(message.data, NUMPY_TYPES[message.dtype]).reshape(tuple(message.shape))


def resident(name, view=None):
    return compute.Operand(buffer=name, view=view)


def inline(array, view=None):
    return compute.Operand(tensor=tensor(array), view=view)


def into(name, replace=False):
    return compute.Result(buffer=compute.BufferTarget(name=name, replace=replace))


class ClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        make_stubs(folder.name)
        cls.server = Server(folder.name)
        cls.channel = grpc.insecure_channel(cls.server.address)
        buffer_grpc = importlib.import_module("tessera.v1.buffer_pb2_grpc")
        compute_grpc = importlib.import_module("tessera.v1.compute_pb2_grpc")
        cls.buffer_stub = buffer_grpc.BufferServiceStub(cls.channel)
        cls.compute_stub = compute_grpc.ComputeServiceStub(cls.channel)
        cls.rng = np.random.default_rng(7)

    @classmethod
    def tearDownClass(cls):
        cls.channel.close()
        code = cls.server.stop()
        if code != 0:
            raise AssertionError(f"exit code {code} after SIGTERM:\n{cls.server.log.read_text()}")

    # --- the wire ---------------------------------------------------------------------------------

    def call(self, rpc, request):
        stub = self.buffer_stub if hasattr(self.buffer_stub, rpc) else self.compute_stub
        return getattr(stub, rpc)(request, timeout=CALL_TIMEOUT_S)

    def upload(self, name, array, chunk=CHUNK, **spec):
        array = np.asarray(array)
        data = np.ascontiguousarray(array).tobytes()

        def messages():
            yield buffers.UploadRequest(
                name=name,
                spec=buffers.BufferSpec(dtype=dtype_of(array), shape=array.shape, **spec),
                data=data[:chunk],
            )
            for begin in range(chunk, len(data), chunk):
                yield buffers.UploadRequest(data=data[begin : begin + chunk])

        answer = self.buffer_stub.Upload(messages(), timeout=CALL_TIMEOUT_S)
        self.assertEqual(answer.received_bytes, len(data))
        self.assertEqual(answer.buffer.state, buffers.Buffer.STATE_READY)
        return answer.buffer

    def download(self, name, offset=0, limit=0):
        data = b""
        request = buffers.DownloadRequest(name=name, offset=offset, limit=limit)
        for message in self.buffer_stub.Download(request, timeout=CALL_TIMEOUT_S):
            self.assertEqual(message.offset, offset + len(data))
            self.assertLessEqual(len(message.data), CHUNK)
            data += message.data
        return data

    def download_array(self, buffer):
        return np.frombuffer(self.download(buffer.name), NUMPY_TYPES[buffer.dtype]).reshape(
            tuple(buffer.shape)
        )

    def strategies(self, operation, array):
        """Names of the rows that run here on the array's type; "" is the server's choice."""
        request = compute.ListStrategiesRequest(operation=operation)
        rows = self.call("ListStrategies", request).strategies
        names = [row.name for row in rows if row.available and dtype_of(array) in row.dtypes]
        self.assertTrue(names)
        return ["", *names]

    def check_error(self, code, reason, rpc, request, **metadata):
        """The call fails with that code, reason and at least those figures."""
        with self.assertRaises(grpc.RpcError) as caught:
            self.call(rpc, request)
        error = caught.exception
        self.assertEqual(error.code(), code, error.details())
        trailers = dict(error.trailing_metadata())
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        self.assertEqual(status.code, code.value[0])
        self.assertEqual(status.message, error.details())
        info = error_details_pb2.ErrorInfo()
        self.assertTrue(any(detail.Unpack(info) for detail in status.details))
        self.assertEqual(info.reason, reason, error.details())
        self.assertEqual(info.domain, "tessera")
        for key, value in metadata.items():
            self.assertEqual(info.metadata[key], value)

    def assert_close(self, actual, expected, terms, dtype, what):
        """Within the rounding of a long accumulation, relative to the sum of the |terms|."""
        tolerance = (1e-4 if dtype == np.float32 else 1e-12) * np.asarray(terms) + 1e-300
        error = np.abs(np.asarray(actual, np.float64) - expected)
        self.assertTrue(np.all(error <= tolerance), f"{what}: {actual} is not {expected}")

    # --- buffers ----------------------------------------------------------------------------------

    def test_every_dtype_comes_back_bit_for_bit(self):
        for dtype in ("f4", "f8", "f2", "u2", "i4", "i8"):
            for shape in ((), (0,), (1,), (3, 5, 7), (1 << 19,), (0, 4)):
                with self.subTest(dtype=dtype, shape=shape):
                    count = int(np.prod(shape))
                    bits = self.rng.bytes(count * np.dtype(dtype).itemsize)
                    array = np.frombuffer(bits, dtype).reshape(shape)
                    buffer = self.upload("types", array, chunk=777777, replace=True)
                    self.assertEqual(tuple(buffer.shape), shape)
                    self.assertEqual(buffer.size_bytes, len(bits))
                    self.assertEqual(buffer.committed_bytes, len(bits))
                    self.assertEqual(self.download("types"), bits)

    def test_download_of_ranges(self):
        array = np.arange(1_000_000, dtype=np.int32)
        self.upload("ranges", array)
        data = array.tobytes()
        for offset, limit in (
            (0, 1),
            (5, 0),
            (3_999_999, 0),
            (1_048_575, 2),
            (123, 2_500_001),
            (4_000_000, 0),
        ):
            with self.subTest(offset=offset, limit=limit):
                end = offset + limit if limit else len(data)
                self.assertEqual(self.download("ranges", offset, limit), data[offset:end])

    def test_ranges_written_apart_are_sealed_together(self):
        array = self.rng.standard_normal(300_000)
        data = array.tobytes()
        spec = buffers.BufferSpec(dtype=buffers.DTYPE_F64, shape=array.shape)
        self.call("CreateBuffer", buffers.CreateBufferRequest(name="apart", spec=spec))
        half = 1_200_000
        for begin, end in ((half, len(data)), (0, half - 8)):
            request = buffers.UploadRequest(name="apart", offset=begin, data=data[begin:end])
            self.buffer_stub.Upload(iter([request]), timeout=CALL_TIMEOUT_S)
        state = self.call("GetBuffer", buffers.GetBufferRequest(name="apart"))
        self.assertEqual(state.buffer.state, buffers.Buffer.STATE_WRITING)
        self.assertEqual(state.buffer.committed_bytes, half - 8)
        self.assertEqual([(gap.begin, gap.end) for gap in state.missing], [(half - 8, half)])
        self.check_error(
            grpc.StatusCode.FAILED_PRECONDITION,
            "BUFFER_NOT_READY",
            "SealBuffer",
            buffers.SealBufferRequest(name="apart"),
        )
        request = buffers.UploadRequest(name="apart", offset=half - 8, data=data[half - 8 : half])
        self.buffer_stub.Upload(iter([request]), timeout=CALL_TIMEOUT_S)
        sealed = self.call("SealBuffer", buffers.SealBufferRequest(name="apart")).buffer
        self.assertEqual(sealed.state, buffers.Buffer.STATE_READY)
        self.assertEqual(self.download("apart"), data)

    def test_listing_pages_in_order_of_name(self):
        names = [f"page/{i:02}" for i in range(11)]
        for name in reversed(names):
            self.upload(name, np.zeros(2, np.float32))
        seen, token = [], ""
        while True:
            page = self.call(
                "ListBuffers",
                buffers.ListBuffersRequest(prefix="page/", page_size=4, page_token=token),
            )
            self.assertLessEqual(len(page.buffers), 4)
            seen += [buffer.name for buffer in page.buffers]
            token = page.next_page_token
            if not token:
                break
        self.assertEqual(seen, names)

    def test_replacement_grows_the_version_and_deletion_unlinks(self):
        first = self.upload("versions", np.zeros(3, np.float32))
        second = self.upload("versions", np.ones(5, np.float64), replace=True)
        self.assertGreater(second.version, first.version)
        self.call("DeleteBuffer", buffers.DeleteBufferRequest(name="versions"))
        self.check_error(
            grpc.StatusCode.NOT_FOUND,
            "BUFFER_NOT_FOUND",
            "GetBuffer",
            buffers.GetBufferRequest(name="versions"),
            name="versions",
        )

    def test_ttl_is_set_renewed_and_dropped(self):
        request = buffers.UpdateBufferRequest(name="leased")
        request.ttl.seconds = 3600
        buffer = self.upload("leased", np.zeros(1, np.float32), ttl=request.ttl)
        self.assertAlmostEqual(buffer.expire_time.seconds, time.time() + 3600, delta=60)
        request.ttl.seconds = 7200
        buffer = self.call("UpdateBuffer", request).buffer
        self.assertAlmostEqual(buffer.expire_time.seconds, time.time() + 7200, delta=60)
        request.ClearField("ttl")
        self.assertFalse(self.call("UpdateBuffer", request).buffer.HasField("expire_time"))

    def test_an_upload_cut_short_leaves_nothing(self):
        def messages():
            yield buffers.UploadRequest(
                name="cut",
                spec=buffers.BufferSpec(dtype=buffers.DTYPE_F32, shape=[1000]),
                data=b"1234",
            )

        with self.assertRaises(grpc.RpcError) as caught:
            self.buffer_stub.Upload(messages(), timeout=CALL_TIMEOUT_S)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.check_error(
            grpc.StatusCode.NOT_FOUND,
            "BUFFER_NOT_FOUND",
            "GetBuffer",
            buffers.GetBufferRequest(name="cut"),
        )

    # --- operations -------------------------------------------------------------------------------

    def test_dot(self):
        for dtype in (np.float32, np.float64):
            for n in (0, 1, 255, 4099, 1_000_003):
                a, b = (self.rng.standard_normal(n).astype(dtype) for _ in range(2))
                self.upload("dot/a", a, replace=True)
                self.upload("dot/b", b, replace=True)
                terms = a.astype(np.float64) * b
                for strategy in self.strategies("dot", a):
                    with self.subTest(dtype=dtype, n=n, strategy=strategy):
                        answer = self.call(
                            "Dot",
                            compute.DotRequest(
                                a=resident("dot/a"),
                                b=resident("dot/b"),
                                strategy=strategy,
                                timing=True,
                            ),
                        )
                        self.assert_close(
                            answer.value.real, terms.sum(), np.abs(terms).sum(), dtype, "dot"
                        )
                        if strategy:
                            self.assertEqual(answer.stats.strategy, strategy)
                        if n:
                            self.assertGreater(answer.stats.kernel_us, 0)
                            self.assertGreaterEqual(answer.stats.bytes, a.nbytes + b.nbytes)

    # ReduceOp: the NumPy function and the terms whose rounding adds up.
    REDUCTIONS = {
        "SUM": (np.sum, lambda x, **k: np.abs(x).sum(**k)),
        "PRODUCT": (np.prod, lambda x, **k: np.abs(np.prod(x, **k))),
        "MIN": (np.min, lambda x, **k: 0),
        "MAX": (np.max, lambda x, **k: 0),
        "MEAN": (np.mean, lambda x, **k: np.abs(x).mean(**k)),
        "NORM_L1": (lambda x, **k: np.abs(x).sum(**k), lambda x, **k: np.abs(x).sum(**k)),
        "NORM_L2": (
            lambda x, **k: np.sqrt((x * x).sum(**k)),
            lambda x, **k: np.sqrt((x * x).sum(**k)),
        ),
        "SUM_SQUARES": (lambda x, **k: (x * x).sum(**k), lambda x, **k: (x * x).sum(**k)),
        "VARIANCE": (np.var, lambda x, **k: (x * x).mean(**k)),
    }

    def test_reduce_to_a_scalar(self):
        for dtype in (np.float32, np.float64):
            for n in (1, 33, 257, 100_003):
                # Close to 1, so that a product of many stays in range.
                x = (1 + 1e-3 * self.rng.standard_normal(n)).astype(dtype)
                self.upload("reduce/x", x, replace=True)
                wide = x.astype(np.float64)
                for strategy in self.strategies("reduce", x):
                    for op, (reference, terms) in self.REDUCTIONS.items():
                        with self.subTest(dtype=dtype, n=n, strategy=strategy, op=op):
                            request = compute.ReduceRequest(
                                x=resident("reduce/x"), op=f"REDUCE_OP_{op}", strategy=strategy
                            )
                            value = self.call("Reduce", request).value.real
                            self.assert_close(value, reference(wide), terms(wide), dtype, op)
                    for op, reference in (("ARGMIN", np.argmin), ("ARGMAX", np.argmax)):
                        with self.subTest(dtype=dtype, n=n, strategy=strategy, op=op):
                            request = compute.ReduceRequest(
                                x=resident("reduce/x"), op=f"REDUCE_OP_{op}", strategy=strategy
                            )
                            answer = self.call("Reduce", request)
                            self.assertEqual(answer.index, reference(x))
                            self.assertEqual(answer.value.real, wide[answer.index])

    def test_reduce_of_nothing(self):
        x = inline(np.zeros(0, np.float32))
        for op, value in (("SUM", 0), ("PRODUCT", 1), ("NORM_L2", 0), ("SUM_SQUARES", 0)):
            request = compute.ReduceRequest(x=x, op=f"REDUCE_OP_{op}")
            self.assertEqual(self.call("Reduce", request).value.real, value)
        for op, value in (("ALL", 1), ("ANY", 0)):
            request = compute.ReduceRequest(x=x, op=f"REDUCE_OP_{op}")
            self.assertEqual(self.call("Reduce", request).value.integer, value)
        for op in ("MIN", "MAX", "ARGMIN", "ARGMAX", "MEAN", "VARIANCE"):
            request = compute.ReduceRequest(x=x, op=f"REDUCE_OP_{op}")
            self.check_error(grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_INPUT", "Reduce", request)

    def test_nan_and_ties_follow_numpy(self):
        cases = [
            np.array([3, 1, 1, 3], np.float32),
            np.array([2, np.nan, -5, np.nan], np.float32),
            np.array([-0.0, 0.0], np.float64),
            np.array([np.inf, -np.inf, np.inf], np.float64),
        ]
        for x in cases:
            for strategy in self.strategies("reduce", x):
                for op, reference in (("MIN", np.min), ("MAX", np.max)):
                    request = compute.ReduceRequest(
                        x=inline(x), op=f"REDUCE_OP_{op}", strategy=strategy
                    )
                    # Adding 0 forgets the sign of a zero, which is either's choice in a tie.
                    np.testing.assert_equal(
                        self.call("Reduce", request).value.real + 0.0, float(reference(x)) + 0.0
                    )
                for op, reference in (("ARGMIN", np.argmin), ("ARGMAX", np.argmax)):
                    request = compute.ReduceRequest(
                        x=inline(x), op=f"REDUCE_OP_{op}", strategy=strategy
                    )
                    self.assertEqual(
                        self.call("Reduce", request).index, reference(x), f"{op} of {x}"
                    )

    def test_reduce_of_axes(self):
        for dtype in (np.float32, np.float64):
            x = (1 + 1e-2 * self.rng.standard_normal((5, 33, 70))).astype(dtype)
            self.upload("axes/x", x, replace=True)
            wide = x.astype(np.float64)
            for axes in ((0,), (1,), (2,), (-1,), (0, 1), (1, 2), (0, 2), (-3, 1, 2)):
                for keep in (False, True):
                    for op, (reference, terms) in self.REDUCTIONS.items():
                        with self.subTest(dtype=dtype, axes=axes, keep=keep, op=op):
                            answer = self.call(
                                "Reduce",
                                compute.ReduceRequest(
                                    x=resident("axes/x"),
                                    op=f"REDUCE_OP_{op}",
                                    axes=axes,
                                    keep_dims=keep,
                                ),
                            )
                            actual = to_numpy(answer.tensor)
                            expected = reference(wide, axis=axes, keepdims=keep)
                            self.assertEqual(actual.shape, expected.shape)
                            self.assertEqual(actual.dtype, dtype)
                            bound = terms(wide, axis=axes, keepdims=keep)
                            # The result itself is rounded to the operand's type.
                            bound = bound + np.finfo(dtype).eps / 1e-12 * np.abs(expected)
                            self.assert_close(actual, expected, bound, dtype, op)
            for axis in (0, 1, 2):
                answer = self.call(
                    "Reduce",
                    compute.ReduceRequest(x=resident("axes/x"), op="REDUCE_OP_ARGMAX", axes=[axis]),
                )
                np.testing.assert_array_equal(to_numpy(answer.tensor), x.argmax(axis))

    def test_matmul(self):
        for dtype in (np.float32, np.float64):
            for m, n, k in ((1, 1, 1), (3, 5, 7), (65, 33, 130), (31, 1, 257), (4, 6, 0)):
                for transpose_a in (False, True):
                    for transpose_b in (False, True):
                        a = self.rng.standard_normal((k, m) if transpose_a else (m, k)).astype(
                            dtype
                        )
                        b = self.rng.standard_normal((n, k) if transpose_b else (k, n)).astype(
                            dtype
                        )
                        wide_a = (a.T if transpose_a else a).astype(np.float64)
                        wide_b = (b.T if transpose_b else b).astype(np.float64)
                        for strategy in self.strategies("matmul", a):
                            if (strategy == "skinny" and min(m, n) > 32) or (
                                strategy == "outer_product" and k > 8
                            ):
                                continue  # it refuses
                            with self.subTest(
                                dtype=dtype,
                                m=m,
                                n=n,
                                k=k,
                                ta=transpose_a,
                                tb=transpose_b,
                                strategy=strategy,
                            ):
                                answer = self.call(
                                    "Matmul",
                                    compute.MatmulRequest(
                                        a=inline(a),
                                        b=inline(b),
                                        transpose_a=transpose_a,
                                        transpose_b=transpose_b,
                                        strategy=strategy,
                                    ),
                                )
                                self.assert_close(
                                    to_numpy(answer.tensor),
                                    wide_a @ wide_b,
                                    np.abs(wide_a) @ np.abs(wide_b),
                                    dtype,
                                    "matmul",
                                )

    def test_add(self):
        for dtype in (np.float32, np.float64):
            a, b = (self.rng.standard_normal((17, 129)).astype(dtype) for _ in range(2))
            for strategy in self.strategies("add", a):
                answer = self.call(
                    "Add", compute.AddRequest(a=inline(a), b=inline(b), strategy=strategy)
                )
                np.testing.assert_array_equal(to_numpy(answer.tensor), a + b)

    def test_window_sum(self):
        for dtype in (np.float32, np.float64, np.int32, np.int64):
            x = (100 * self.rng.standard_normal(3001)).astype(dtype)
            self.upload("window/x", x, replace=True)
            for radius in (0, 1, 8, 500, 1 << 40):
                wide = x.astype(np.float64)
                reach = min(radius, x.size)
                sums = np.convolve(wide, np.ones(2 * reach + 1))[reach : reach + x.size]
                terms = np.convolve(np.abs(wide), np.ones(2 * reach + 1))[reach : reach + x.size]
                for strategy in self.strategies("window_sum", x):
                    with self.subTest(dtype=dtype, radius=radius, strategy=strategy):
                        answer = self.call(
                            "WindowSum",
                            compute.WindowSumRequest(
                                x=resident("window/x"), radius=radius, strategy=strategy
                            ),
                        )
                        actual = to_numpy(answer.tensor)
                        if np.issubdtype(dtype, np.integer):
                            self.assertEqual(actual.dtype, np.int64)
                            np.testing.assert_array_equal(actual, np.rint(sums))
                        else:
                            self.assertEqual(actual.dtype, dtype)
                            self.assert_close(actual, sums, terms, dtype, "window sum")
        answer = self.call(
            "WindowSum",
            compute.WindowSumRequest(
                x=resident("window/x", buffers.View(offset=3000, shape=[4], strides=[-1000])),
                radius=1,
                result=into("window/y"),
            ),
        )
        expected = np.convolve(x[::-1000], [1, 1, 1])[1:-1]
        np.testing.assert_array_equal(self.download_array(answer.buffer), expected)
        self.check_error(
            grpc.StatusCode.INVALID_ARGUMENT,
            "BAD_RADIUS",
            "WindowSum",
            compute.WindowSumRequest(x=resident("window/x"), radius=-1),
            value="-1",
        )

    def test_copies_stay_on_the_server(self):
        x = (1000 * self.rng.standard_normal((30, 40))).astype(np.float32)
        self.upload("copy/x", x)
        transpose = buffers.View(shape=[40, 30], strides=[1, 40])
        for dtype in ("f4", "f8", "f2", "i4", "i8"):
            with self.subTest(dtype=dtype):
                buffer = self.call(
                    "CopyBuffer",
                    buffers.CopyBufferRequest(
                        source="copy/x",
                        view=transpose,
                        name="copy/y",
                        dtype=dtype_of(np.zeros(0, dtype)),
                        replace=True,
                    ),
                ).buffer
                self.assertEqual(buffer.state, buffers.Buffer.STATE_READY)
                # Astype rounds and truncates as CopyBuffer says it does.
                np.testing.assert_array_equal(self.download_array(buffer), x.T.astype(dtype))
        bf16 = self.call(
            "CopyBuffer",
            buffers.CopyBufferRequest(
                source="copy/x", name="copy/bits", dtype=buffers.DTYPE_BF16
            ),
        ).buffer
        bits = x.view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        np.testing.assert_array_equal(self.download_array(bf16), nearest)
        self.check_error(
            grpc.StatusCode.ALREADY_EXISTS,
            "BUFFER_EXISTS",
            "CopyBuffer",
            buffers.CopyBufferRequest(source="copy/x", name="copy/y"),
        )
        self.check_error(
            grpc.StatusCode.NOT_FOUND,
            "BUFFER_NOT_FOUND",
            "CopyBuffer",
            buffers.CopyBufferRequest(source="copy/none", name="copy/z"),
            name="copy/none",
        )

    def test_whole_numbers_and_two_byte_types(self):
        """Small whole numbers, on which every type and every strategy is exact."""
        whole = self.rng.integers(-3, 4, 250)
        square = whole[:225].reshape(15, 15)
        for dtype in ("f4", "f8", "f2", "i4", "i8"):
            x, m = whole.astype(dtype), square.astype(dtype)
            self.upload("whole/x", x, replace=True)
            operand = resident("whole/x")

            def value(answer):
                return getattr(answer.value, answer.value.WhichOneof("value"))

            for strategy in self.strategies("dot", x):
                with self.subTest(dtype=dtype, op="dot", strategy=strategy):
                    answer = self.call("Dot", compute.DotRequest(a=operand, b=operand, strategy=strategy))
                    self.assertEqual(value(answer), (whole * whole).sum())
            for strategy in self.strategies("reduce", x):
                for op, expected in (
                    ("SUM", whole.sum()),
                    ("MAX", whole.max()),
                    ("NORM_L1", np.abs(whole).sum()),
                    ("ALL", int(whole.all())),
                    ("ANY", int(whole.any())),
                ):
                    with self.subTest(dtype=dtype, op=op, strategy=strategy):
                        request = compute.ReduceRequest(
                            x=operand, op=f"REDUCE_OP_{op}", strategy=strategy
                        )
                        self.assertEqual(value(self.call("Reduce", request)), expected)
            for strategy in self.strategies("add", x):
                with self.subTest(dtype=dtype, op="add", strategy=strategy):
                    answer = self.call("Add", compute.AddRequest(a=operand, b=operand, strategy=strategy))
                    np.testing.assert_array_equal(to_numpy(answer.tensor), 2 * x)
            if dtype == "i8":
                self.check_error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "BAD_DTYPE",
                    "Matmul",
                    compute.MatmulRequest(a=inline(m), b=inline(m)),
                )
                continue
            for strategy in self.strategies("matmul", m):
                with self.subTest(dtype=dtype, op="matmul", strategy=strategy):
                    answer = self.call(
                        "Matmul", compute.MatmulRequest(a=inline(m), b=inline(m), strategy=strategy)
                    )
                    np.testing.assert_array_equal(to_numpy(answer.tensor), square @ square)

    def test_views_with_zero_and_negative_strides(self):
        x = self.rng.standard_normal((40, 50)).astype(np.float32)
        self.upload("views/x", x)
        views = [
            (buffers.View(shape=[40, 50]), x),
            (buffers.View(offset=1, shape=[39, 3], strides=[50, 2]), x[:39, 1:7:2]),
            (buffers.View(offset=49, shape=[40, 50], strides=[50, -1]), x[:, ::-1]),
            (buffers.View(offset=1999, shape=[2000], strides=[-1]), x.ravel()[::-1]),
            (buffers.View(shape=[50, 40], strides=[1, 50]), x.T),
            (
                buffers.View(offset=7, shape=[6, 4], strides=[0, 1]),
                np.broadcast_to(x[0, 7:11], (6, 4)),
            ),
            (buffers.View(offset=3, shape=[]), x[0, 3]),
        ]
        zeros = np.zeros(1, np.float32)
        for view, expected in views:
            with self.subTest(view=view):
                nothing = buffers.View(shape=view.shape, strides=[0] * len(view.shape))
                answer = self.call(
                    "Add", compute.AddRequest(a=resident("views/x", view), b=inline(zeros, nothing))
                )
                np.testing.assert_array_equal(to_numpy(answer.tensor), expected)
                answer = self.call(
                    "Dot",
                    compute.DotRequest(a=resident("views/x", view), b=resident("views/x", view)),
                )
                squares = np.asarray(expected, np.float64) ** 2
                self.assert_close(
                    answer.value.real, squares.sum(), squares.sum(), np.float32, "dot"
                )

    def test_results_stay_resident_and_chain(self):
        """Squared distances between two sets of points; not one of them comes back."""
        points = self.rng.standard_normal((300, 16)).astype(np.float32)
        queries = self.rng.standard_normal((40, 16)).astype(np.float32)
        self.upload("chain/points", points)
        self.upload("chain/queries", -2 * queries)
        self.call(
            "Reduce",
            compute.ReduceRequest(
                x=resident("chain/points"),
                op="REDUCE_OP_SUM_SQUARES",
                axes=[1],
                result=into("chain/norms"),
            ),
        )
        self.call(
            "Matmul",
            compute.MatmulRequest(
                a=resident("chain/queries"),
                b=resident("chain/points"),
                transpose_b=True,
                result=into("chain/distances"),
            ),
        )
        answer = self.call(
            "Add",
            compute.AddRequest(
                a=resident("chain/distances"),
                b=resident("chain/norms", buffers.View(shape=[40, 300], strides=[0, 1])),
                result=into("chain/distances", replace=True),
            ),
        )
        self.assertFalse(answer.HasField("tensor"))
        self.assertEqual(tuple(answer.buffer.shape), (40, 300))
        answer = self.call(
            "Reduce",
            compute.ReduceRequest(x=resident("chain/distances"), op="REDUCE_OP_ARGMIN", axes=[1]),
        )
        distances = ((queries[:, None, :].astype(np.float64) - points[None]) ** 2).sum(-1)
        np.testing.assert_array_equal(to_numpy(answer.tensor), distances.argmin(1))
        stored = self.download_array(
            self.call("GetBuffer", buffers.GetBufferRequest(name="chain/distances")).buffer
        )
        offsets = (queries.astype(np.float64) ** 2).sum(1)[:, None]
        np.testing.assert_allclose(stored + offsets, distances, rtol=1e-4, atol=1e-4)

    def test_the_calls_of_the_load_test_succeed(self):
        for name, shape in (("load/x", 4096), ("load/y", 4096), ("load/matrix", (512, 512))):
            self.upload(name, self.rng.standard_normal(shape).astype(np.float32))
        for path in sorted((ROOT / "deploy" / "loadtest").glob("*.json")):
            with self.subTest(case=path.name):
                case = json.loads(path.read_text())
                # What ghz makes of its templates.
                data = json.dumps(case["data"]).replace("{{.WorkerID}}", "w0")
                data = re.sub(
                    r"\{\{repeat (\d+) `(\w+)`\}\}", lambda m: m.group(2) * int(m.group(1)), data
                )
                self.assertNotIn("{{", data)
                data = json.loads(data)
                method = case["call"].rsplit(".", 1)[1]
                if method == "Upload":
                    messages = [
                        json_format.ParseDict(message, buffers.UploadRequest()) for message in data
                    ]
                    for _ in range(2):  # A worker uploads the same name again and again.
                        self.buffer_stub.Upload(iter(messages), timeout=CALL_TIMEOUT_S)
                else:
                    request = json_format.ParseDict(data, getattr(compute, method + "Request")())
                    for _ in range(2):
                        self.call(method, request)

    # --- errors -----------------------------------------------------------------------------------

    def test_errors_carry_code_reason_and_figures(self):
        three, four = np.zeros(3, np.float32), np.zeros(4, np.float32)
        self.upload("errors/x", three)
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        x = resident("errors/x")
        short = compute.Tensor(dtype=buffers.DTYPE_F32, shape=[3], data=b"1234")
        self.check_error(invalid, "BAD_SHAPE", "Dot", compute.DotRequest(a=x, b=inline(four)))
        self.check_error(
            invalid, "BAD_DTYPE", "Dot", compute.DotRequest(a=x, b=inline(three.astype(np.float64)))
        )
        self.check_error(
            invalid, "UNKNOWN_STRATEGY", "Dot", compute.DotRequest(a=x, b=x, strategy="guess")
        )
        self.check_error(
            invalid, "BAD_OPERAND", "Dot", compute.DotRequest(a=x, b=compute.Operand(tensor=short))
        )
        self.check_error(
            invalid,
            "BAD_VIEW",
            "Dot",
            compute.DotRequest(a=resident("errors/x", buffers.View(offset=2, shape=[2])), b=x),
        )
        self.check_error(
            invalid, "BAD_AXES", "Reduce", compute.ReduceRequest(x=x, op="REDUCE_OP_SUM", axes=[1])
        )
        self.check_error(
            invalid,
            "BAD_NAME",
            "CreateBuffer",
            buffers.CreateBufferRequest(
                name="white space", spec=buffers.BufferSpec(dtype=buffers.DTYPE_F32, shape=[1])
            ),
        )
        self.check_error(
            grpc.StatusCode.NOT_FOUND,
            "BUFFER_NOT_FOUND",
            "Dot",
            compute.DotRequest(a=resident("errors/none"), b=x),
            name="errors/none",
        )
        self.check_error(
            grpc.StatusCode.ALREADY_EXISTS,
            "BUFFER_EXISTS",
            "CreateBuffer",
            buffers.CreateBufferRequest(
                name="errors/x", spec=buffers.BufferSpec(dtype=buffers.DTYPE_F32, shape=[1])
            ),
        )
        self.check_error(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUOTA_EXCEEDED",
            "CreateBuffer",
            buffers.CreateBufferRequest(
                name="errors/huge",
                spec=buffers.BufferSpec(dtype=buffers.DTYPE_F32, shape=[1 << 50]),
            ),
            requested=str(1 << 52),
        )
        self.call(
            "CreateBuffer",
            buffers.CreateBufferRequest(
                name="errors/open", spec=buffers.BufferSpec(dtype=buffers.DTYPE_F32, shape=[3])
            ),
        )
        self.check_error(
            grpc.StatusCode.FAILED_PRECONDITION,
            "BUFFER_NOT_READY",
            "Dot",
            compute.DotRequest(a=resident("errors/open"), b=x),
        )
        # And the server answers the next call.
        self.assertEqual(self.call("Dot", compute.DotRequest(a=x, b=x)).value.real, 0)

    # --- what else is served ----------------------------------------------------------------------

    def test_server_info_names_devices_and_limits(self):
        info = self.call("GetServerInfo", compute.GetServerInfoRequest())
        self.assertRegex(info.version, r"^\d+\.\d+\.\d+")
        self.assertTrue(info.devices)
        for device in info.devices:
            self.assertIn(device.backend, ("cpu", "cuda"))
            self.assertGreater(device.memory_total_bytes, 0)
        self.assertGreater(info.limits.queue_length, 0)

    def test_health(self):
        # grpc.health.v1 is not packaged for Python here: HealthCheckRequest { string service = 1; }
        # and HealthCheckResponse { enum status = 1; } with SERVING = 1, spelled in bytes.
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        for service in (b"", b"tessera.v1.ComputeService"):
            request = b"\x0a" + bytes([len(service)]) + service if service else b""
            self.assertEqual(check(request, timeout=CALL_TIMEOUT_S), b"\x08\x01")
        with self.assertRaises(grpc.RpcError) as caught:
            check(b"\x0a\x04none", timeout=CALL_TIMEOUT_S)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

    def reflect(self, **request):
        call = self.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection.ServerReflectionResponse.FromString,
        )
        requests = iter([reflection.ServerReflectionRequest(**request)])
        return next(call(requests, timeout=CALL_TIMEOUT_S))

    def test_reflection_describes_every_service_and_method_it_lists(self):
        methods = {
            "tessera.v1.BufferService": {"Upload", "Download"},
            "tessera.v1.ComputeService": {"Dot", "GetServerInfo"},
            "grpc.health.v1.Health": {"Check", "Watch"},
        }
        listed = self.reflect(list_services="*").list_services_response.service
        self.assertLessEqual(set(methods), {service.name for service in listed})
        for service, names in methods.items():
            for symbol in [service, *(f"{service}.{name}" for name in names)]:
                with self.subTest(symbol):
                    answer = self.reflect(file_containing_symbol=symbol)
                    self.assertFalse(answer.HasField("error_response"), answer)
                    file = descriptor_pb2.FileDescriptorProto.FromString(
                        answer.file_descriptor_response.file_descriptor_proto[0]
                    )
                    found = {f"{file.package}.{s.name}": s for s in file.service}
                    self.assertIn(service, found)
                    self.assertLessEqual(names, {m.name for m in found[service].method})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--server", required=True)
    arguments, rest = parser.parse_known_args()
    server_program = arguments.server
    unittest.main(argv=[sys.argv[0], *rest])
