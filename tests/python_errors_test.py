#!/usr/bin/env python3
"""Errors of the Python client: a class for every reason, arrays that are gone, refusals that
are tried again, tokens.

usage: python_errors_test.py --server build/bin/tessera-server [unittest arguments]
"""

import asyncio
import os
import pathlib
import pickle
import re
import subprocess
import tempfile
import time
import unittest
from unittest import mock

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from tessera import _connect, _core, _errors, _retry
from tessera import _protocol as p

LONG = {"timeout": 20, "connect_timeout": 2, "stall_timeout": 8}
# Within each of these a call has ended, whatever became of the server.
BOUND_S = 30


def reasons_of_the_protocol():
    """Every reason that a comment of the .proto files names after a code of gRPC."""
    codes = "|".join(code.name for code in _errors.grpc.StatusCode if code.name != "OK")
    found = set()
    for path in o.PROTO.glob("tessera/**/*.proto"):
        text = re.sub(r"\n\s*//", " ", path.read_text())
        for names in re.findall(rf"(?:{codes}) / ([^.;:)]*)", text):
            names = re.sub(r"{[^}]*}|\([^)]*", "", names)
            found |= set(re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", names))
    return found - {code.name for code in _errors.grpc.StatusCode}


class ReasonsTest(unittest.TestCase):
    def test_every_reason_of_the_protocol_has_its_class(self):
        reasons = reasons_of_the_protocol()
        self.assertGreater(len(reasons), 35)
        self.assertIn("SCRATCH_EXHAUSTED", reasons)
        self.assertEqual(reasons - set(_errors.Error._of_reason), set())

    def test_what_people_catch(self):
        for name, builtin in (
            ("BufferNotFound", KeyError),
            ("BadShape", ValueError),
            ("QuotaExceeded", MemoryError),
            ("ConnectionLost", ConnectionError),
            ("Stalled", TimeoutError),
            ("Unsupported", NotImplementedError),
        ):
            self.assertTrue(issubclass(getattr(ts, name), (builtin, ts.Error)), name)
            self.assertTrue(issubclass(getattr(ts, name), builtin), name)

    def test_an_unknown_reason_is_an_error_with_that_reason(self):
        error = _errors.make("text", "NOT_FOUND", "SOMETHING_ELSE", {"a": "b"}, 2.0)
        self.assertIs(type(error), ts.Error)
        self.assertEqual(str(error), "text [NOT_FOUND/SOMETHING_ELSE]")
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((again.reason, again.details, again.retry_after), ("SOMETHING_ELSE",
                         {"a": "b"}, 2.0))

    def test_what_is_tried_again(self):
        options = _connect.Options("127.0.0.1:1")
        full = _errors.make("", "RESOURCE_EXHAUSTED", "QUEUE_FULL", retry_after=0.5)
        lost = _errors.make("", "UNAVAILABLE", "CONNECTION_LOST")
        device = _errors.make("", "UNAVAILABLE", "DEVICE_LOST")
        pause = _retry.Retry(options, False, 60).pause(full)
        self.assertTrue(0.5 <= pause <= 0.625)
        self.assertIsNone(_retry.Retry(options, False, 0.1).pause(full))
        self.assertIsNone(_retry.Retry(options, False, 60).pause(lost))
        self.assertIsNone(_retry.Retry(options, True, 60).pause(device))
        late = _errors.make("", "RESOURCE_EXHAUSTED", "QUEUE_FULL", retry_after=1000)
        self.assertTrue(10 <= _retry.Retry(options, False, 60).pause(late) <= 12.5)
        # What the server has not done, or has dropped, is tried again whatever it was.
        for error in (
            _errors.make("", "UNAVAILABLE", "DRAINING"),
            _errors.make("", "DATA_LOSS", "BAD_CHECKSUM"),
        ):
            self.assertTrue(_retry.Retry(options, False, 60).pause(error), error.reason)
        retry = _retry.Retry(options, True, 60)
        pauses = [retry.pause(lost) for _ in range(5)]
        self.assertIsNone(pauses[4])
        self.assertTrue(all(pauses[:4]))

    def test_all_attempts_have_the_time_of_one(self):
        steps = _core.Core(_connect.Options("127.0.0.1:1", timeout=20)).call("ListStrategies", b"")
        first = next(steps)
        pause = steps.throw(_errors.make("", "UNAVAILABLE", "CONNECTION_LOST"))
        self.assertIsInstance(pause, _core.Pause)
        second = steps.send(True)
        self.assertEqual(first.timeout, 20)
        self.assertTrue(0 < second.timeout < 20, second.timeout)


class TokensTest(unittest.TestCase):
    def test_a_token_does_not_leave_the_host_in_the_clear(self):
        for target in ("gpu:50051", "10.0.0.1:1", "dns:///gpu:1", "[2001:db8::1]:5"):
            with self.assertRaisesRegex(ValueError, "in the clear"):
                _connect.Options(target, token="secret")
            _connect.Options(target, token="secret", tls=True)
        for target in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/x", "ipv4:127.0.0.1:1"):
            options = _connect.Options(target, token="secret")
            self.assertEqual(options.metadata(), (("authorization", "Bearer secret"),))
            self.assertNotIn("secret", repr(options))

    def test_where_tokens_come_from(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "token")
            path.write_text("one\n")
            options = _connect.Options("localhost:1", token_file=str(path))
            self.assertEqual(options.metadata()[0][1], "Bearer one")
            path.write_text("two\n")
            self.assertEqual(options.metadata()[0][1], "Bearer two")
        os.environ["TESSERA_TOKEN"] = "of the environment"
        try:
            self.assertEqual(_connect.Options("localhost:1").token, "of the environment")
        finally:
            del os.environ["TESSERA_TOKEN"]
        self.assertIsNone(_connect.Options("localhost:1").metadata())


class LostArraysTest(unittest.TestCase):
    """Each test has a server of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.server = o.Server(folder.name, *python_outsider.PATIENT)
        self.addCleanup(self.server.kill)
        self.t = ts.connect(self.server.address, **LONG)
        self.addCleanup(self.t.close)
        self.begin = time.monotonic()

    def tearDown(self):
        self.assertLess(time.monotonic() - self.begin, BOUND_S)

    def restart(self):
        """Another server at the same address."""
        self.server.process.kill()
        self.server.process.wait()
        process = subprocess.Popen(
            [o.Program.path, "--listen", self.server.address, "--device", o.Program.device],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        # A sanitized server takes its time; what is bounded is the client's.
        self.assertTrue(o.eventually(self.listens, o.START_TIMEOUT_S))
        self.begin = time.monotonic()

    def listens(self):
        try:
            self.server.socket(1).close()
            return True
        except OSError:
            return False

    def test_after_a_restart_buffers_are_gone_and_the_client_goes_on(self):
        x = self.t.put(np.ones(5, "f4"), "x")
        self.restart()
        with self.assertRaisesRegex(ts.BufferNotFound, "gone.*restarted"):
            x.sum().numpy()
        with self.assertRaisesRegex(ts.BufferNotFound, "gone.*restarted"):
            (x + 1).sum().numpy()
        with self.assertRaisesRegex(ts.BufferNotFound, "gone.*restarted"):
            x.numpy()
        x = self.t.put(np.ones(5, "f4"), "x")
        self.assertEqual(float(x.sum()), 5)

    def test_a_replaced_array_is_gone(self):
        x = self.t.put(np.ones(5, "f4"), "x")
        self.t.put(np.zeros(5, "f4"), "x", replace=True)
        with self.assertRaisesRegex(ts.VersionMismatch, "gone"):
            x.sum().numpy()
        with self.assertRaises(ts.VersionMismatch):
            x.numpy()

    def test_nobody_there(self):
        self.server.kill()
        with self.assertRaises(ts.Unreachable):
            ts.connect(self.server.address, connect_timeout=0.5)


class ErrorsOfCallsTest(python_outsider.Case):
    FLAGS = ("--memory-limit", "64Mi")

    def test_reasons_and_figures(self):
        x = self.t.put(np.ones((3, 4), "f4"))
        with self.assertRaises(ts.QuotaExceeded) as caught:
            self.t.put(np.zeros(80 << 20, np.uint8).view("f4"))
        self.assertEqual(caught.exception.code, "RESOURCE_EXHAUSTED")
        self.assertIn("requested", caught.exception.details)
        with self.assertRaises(ts.BadName):
            self.t.put(np.zeros(1), "no spaces")
        with self.assertRaises(ts.EmptyInput):
            x[:0].max().numpy()
        with self.assertRaises(ts.EmptyInput):
            (x[:0] + 1).max().numpy()
        with self.assertRaises(ts.BufferNotFound):
            self.t["none"]
        with self.assertRaises(ts.BufferNotFound):
            self.t.delete("none")
        with self.assertRaises(ValueError):
            self.t.put(np.zeros(1), ttl="soon")
        for call in (ts.sum_squares, ts.norm, lambda a: ts.window_sum(a, 1),
                     lambda a: ts.topk(a, 1), lambda a: ts.vecdot(a, a)):
            with self.assertRaisesRegex(TypeError, r"client\.put"):
                call(np.ones(3, "f4"))
        self.assertEqual(self.t.call("GetBuffer", name=x.name).buffer.version, x.version)


class Cut:
    """A method whose answers are cut short, by the client's calls of either kind."""

    def __init__(self, real):
        self.real = real
        self.length = None
        self.answer = None

    def cut(self, answer):
        if not isinstance(answer, bytes):
            return answer
        self.answer = answer
        return answer[: self.length]

    def __call__(self, *arguments, **more):
        call = self.real(*arguments, **more)
        return self.cut(call) if isinstance(call, bytes) else CutCall(self, call)

    def future(self, *arguments, **more):
        return CutCall(self, self.real.future(*arguments, **more))


class CutCall:
    def __init__(self, method, call):
        self.method = method
        self.call = call

    def __getattr__(self, name):
        return getattr(self.call, name)

    def __iter__(self):
        return map(self.method.cut, self.call)

    def __await__(self):
        return self.method.cut((yield from self.call.__await__()))

    def result(self, timeout=None):
        return self.method.cut(self.call.result(timeout))

    async def read(self):
        return self.method.cut(await self.call.read())


class CutAnswersTest(python_outsider.Case):
    """Answers that were cut short are an Error, unless what is left has all that was asked for."""

    # Fields that are not there have their defaults: these answers, and an index, cannot tell.
    SILENT = {"ListBuffers", "GetServerInfo"}

    def setUp(self):
        self.a = np.arange(12, dtype="f4").reshape(3, 4)
        self.x = self.t.put(self.a, "cut/x", replace=True)
        self.k = self.t.put(np.arange(5), "cut/k", replace=True)

    def same(self, one, other):
        return type(one) is type(other) and np.array_equal(one, other)

    def test_blocking(self):
        t, x, k, large = self.t, self.x, self.k, np.ones(1 << 19, "f4")
        reads = (
            ("Dot", lambda: x[0].dot(x[1]).numpy()),
            ("Dot", lambda: k.dot(k).numpy()),
            ("Reduce", lambda: x.sum().numpy()),
            ("Reduce", lambda: x.argmin().numpy()),
            ("Reduce", lambda: x.sum(axis=1).numpy()),
            ("Reduce", lambda: (k > 3).any().numpy()),
            ("Matmul", lambda: (x @ x.T).numpy()),
            ("Map", lambda: (x + 1).numpy()),
            ("WindowSum", lambda: ts.window_sum(k, 1).numpy()),
            ("Execute", lambda: ts.topk(x, 2)[1].numpy()),
            ("Execute", lambda: (x + 1).sum().numpy() + (x.T @ x).sum().numpy()),
            ("Execute", lambda: np.concatenate(t.compute(x.sum(axis=0), x.max(axis=1)))),
            ("Execute", lambda: t.keep(x + 1, x.T @ x)[1].shape),
            ("GetBuffer", lambda: t["cut/x"].shape),
            ("GetServerInfo", lambda: len(t.info().devices)),
            ("ListBuffers", lambda: len(t.list("cut/"))),
            ("Download", lambda: x.numpy()),
            ("Download", lambda: large_x.numpy()),
            ("Upload", lambda: t.put(self.a, "cut/small", replace=True).shape),
            ("CreateBuffer", lambda: t.put(large, "cut/large", replace=True).shape),
            ("SealBuffer", lambda: t.put(large, "cut/large", replace=True).shape),
            ("CopyBuffer", lambda: x.copy("cut/copy", replace=True).shape),
            ("CopyBuffer", lambda: x.link("cut/link", replace=True).shape),
            ("Map", lambda: (x + 1).save("cut/saved", replace=True).shape),
        )
        large_x = t.put(large)
        for method, work in reads:
            cut = Cut(t._io.calls[method])
            with mock.patch.dict(t._io.calls, {method: cut}):
                want = work()
                self.assertTrue(cut.answer, method)
                size = len(cut.answer)
                lengths = range(size) if size < 500 else [0, 1, 2, 9, size // 2, size - 1]
                for cut.length in lengths:
                    with self.subTest(method=method, length=cut.length, of=size):
                        try:
                            got = work()
                        except ts.Error as error:
                            self.assertTrue(error.code or isinstance(error, ts.Unsupported))
                        else:
                            self.assertTrue(self.same(got, want) or method in self.SILENT)

    def test_what_a_number_cost(self):
        """The number is read without the rest of the answer, which is read when it is asked for."""
        cut = Cut(self.t._io.calls["Dot"])
        with mock.patch.dict(self.t._io.calls, Dot=cut):
            cut.length = 15
            e = self.x[0].dot(self.x[1])
            self.assertEqual(float(e), 38)
            with self.assertRaises(ts.Error) as caught:
                print(e.stats)
            self.assertEqual(caught.exception.code, "DATA_LOSS")

    def test_asyncio(self):
        async def work():
            async with await ts.aio.connect(self.server.address) as t:
                x = await t.get("cut/x")
                for method, work in (
                    ("Dot", lambda: x[0].dot(x[1]).numpy()),
                    ("Map", lambda: (x + 1).numpy()),
                    ("Download", lambda: x.numpy()),
                    ("GetBuffer", lambda: t.get("cut/x")),
                    ("Upload", lambda: t.put(self.a, "cut/small", replace=True)),
                ):
                    cut = Cut(t._io.calls[method])
                    with mock.patch.dict(t._io.calls, {method: cut}):
                        await work()
                        for cut.length in range(1, 9):
                            with self.subTest(method=method, length=cut.length):
                                with self.assertRaises(ts.Error) as caught:
                                    await work()
                                self.assertEqual(caught.exception.code, "DATA_LOSS")

        asyncio.run(work())

    def test_details_of_a_refusal(self):
        class Refusal(_errors.grpc.RpcError):
            value = b"\x0a\x09"

            def code(self):
                return _errors.grpc.StatusCode.NOT_FOUND

            def details(self):
                return "none"

            def trailing_metadata(self):
                return (("grpc-status-details-bin", self.value),)

        self.assertEqual(_errors.from_rpc(Refusal()).code, "NOT_FOUND")
        delay = p.RetryInfo(retry_delay={"seconds": 1, "nanos": 250_000_000})
        status = p.Status()
        status.details.add(
            type_url="type.googleapis.com/google.rpc.RetryInfo", value=delay.SerializeToString()
        )
        Refusal.value = status.SerializeToString()
        self.assertEqual(_errors.from_rpc(Refusal()).retry_after, 1.25)


if __name__ == "__main__":
    python_outsider.main("__main__")
