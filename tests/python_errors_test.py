#!/usr/bin/env python3
"""Tests errors of the Python client: a class for every reason, arrays that are gone, refusals that
are retried, and tokens."""

import copy
import datetime
import itertools
import os
import pathlib
import pickle
import re
import tempfile
import unittest
from unittest import mock

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from rolling import lasting_address
from tessera import _core
from tessera.graph import _graph
from tessera.graph._elementwise import apply, constant
from tessera.transfers import _messages
from tessera.wire import _connect, _errors, _retry
from tessera.wire import _protocol as p

LONG = {"timeout": 20, "connect_timeout": o.START_TIMEOUT_S, "stall_timeout": 8}


def reasons_of_the_protocol():
    """Returns every reason that a comment of the .proto files names after a gRPC code."""
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
        for kind, builtin in (
            (ts.BufferNotFound, KeyError), (ts.BadShape, ValueError), (ts.Stalled, TimeoutError),
            (ts.QuotaExceeded, MemoryError), (ts.ConnectionLost, ConnectionError),
            (ts.Unsupported, NotImplementedError),
        ):
            self.assertTrue(issubclass(kind, builtin) and issubclass(kind, ts.Error), kind)

    def test_errors_travel(self):
        """Pickles and copies of errors keep their type and details."""
        of = ("text", "INTERNAL", "", {"a": "b"}, 2)
        known = [getattr(ts, name)(*of) for name in _errors.__all__]
        known.append(ts.BadAxes("text"))
        known[-1].details, known[-1].retry_after = {"a": "b"}, 2
        new = _errors.make("text", "NOT_FOUND", "SOMETHING_ELSE", {"a": "b"}, 2)
        self.assertIs(type(new), ts.Error)
        self.assertEqual(str(new), "text [NOT_FOUND/SOMETHING_ELSE]")
        for error in (*known, new):
            for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
                self.assertIs(type(again), type(error))
                self.assertEqual((str(again), again.reason, again.details, again.retry_after),
                                 (str(error), error.reason, {"a": "b"}, 2))
                self.assertEqual((repr(again), again.args), (repr(error), error.args))

    def test_what_counts_as_a_lost_connection(self):
        for code, text, kind in (
            ("UNAVAILABLE", "", ts.ConnectionLost), ("CANCELLED", "", ts.ConnectionLost),
            ("INTERNAL", "Internal error from Core", ts.ConnectionLost),
            ("INTERNAL", "another text", ts.Error), ("NOT_FOUND", "", ts.Error),
        ):
            error = mock.Mock()
            error.code.return_value = _errors.grpc.StatusCode[code]
            error.details.return_value, error.trailing_metadata.return_value = text, None
            self.assertIs(type(_errors.from_rpc(error)), kind, (code, text))

    def test_what_is_tried_again(self):
        options = _connect.Options("127.0.0.1:1")

        def pause(code, reason, idempotent=False, left=60, **more):
            error = _errors.make("", code, reason, **more)
            return _retry.Retry(options, idempotent, left).pause(error)

        full, lost = ("RESOURCE_EXHAUSTED", "QUEUE_FULL"), ("UNAVAILABLE", "CONNECTION_LOST")
        self.assertTrue(0.5 <= pause(*full, retry_after=0.5) <= 0.625)
        self.assertTrue(10 <= pause(*full, retry_after=1000) <= 12.5)
        self.assertIsNone(pause(*full, left=0.1, retry_after=0.5))
        self.assertIsNone(pause(*lost))
        self.assertIsNone(pause("UNAVAILABLE", "DEVICE_LOST", True))
        # Calls that the server has not run, or whose data it has dropped, are retried.
        self.assertTrue(pause("UNAVAILABLE", "DRAINING"))
        self.assertTrue(pause("DATA_LOSS", "BAD_CHECKSUM"))
        lost, full = _errors.make("", *lost), _errors.make("", *full, retry_after=0)
        never = _connect.Options("127.0.0.1:1", retry_refused=False)
        with mock.patch.object(_retry.random, "uniform", lambda low, high: high):
            for chosen, error, pauses in (
                    (options, lost, [0.1, 0.2, 0.4, 0.8, None]), (never, full, [None]),
                    (options, full, [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2]), (never, lost, [0.1])):
                retry = _retry.Retry(chosen, True, 60)
                self.assertEqual([retry.pause(error) for _ in pauses], pauses)

    def test_a_transfer_that_moves_begins_patience_and_failures_again(self):
        now = [0.0]
        lost = _errors.make("", "UNAVAILABLE", "CONNECTION_LOST")
        with mock.patch.object(_retry.time, "monotonic", lambda: now[0]):
            for method, failures in (("moved", 1), ("progress", 4)):
                retry = _retry.Retry(_connect.Options("127.0.0.1:1"), True, 60, since=-10.0)
                self.assertEqual(retry.left(), 50)
                self.assertTrue(all([retry.pause(lost) for _ in range(3)]))
                now[0] += 7
                getattr(retry, method)()
                self.assertEqual(retry.left(), 60)
                # Bytes that have arrived reset the count of failures, but bytes that are still on
                # their way do not.
                self.assertTrue(all([retry.pause(lost) for _ in range(failures)]), method)
                self.assertIsNone(retry.pause(lost), method)
                now[0] = 0


class Accepted(Exception):
    """A request that LimitedServer accepts. Its argument is the lifetime in nanoseconds."""


class LimitedServer:
    """Performs the commands of a Core like a server that lets no buffer live longer than
    max_ttl."""

    def __init__(self, max_ttl):
        self.max_ttl = max_ttl
        self.methods = []
        self.lost = 0  # How many of the next calls will be lost.

    def perform(self, command):
        if isinstance(command, _core.Pause):
            return True
        if isinstance(command, _core.Create):
            command = command.command
        upload = isinstance(command, _messages.Upload)
        method = "Upload" if upload else command.method
        self.methods.append(method)
        if self.lost:
            self.lost -= 1
            raise ts.ConnectionLost("", "UNAVAILABLE")
        if method == "GetServerInfo":
            limits = {"max_ttl": self.max_ttl, "max_inline_result_bytes": 3 * o.MI}
            return p.METHODS[method].response(limits=limits)
        if method == "ListStrategies":
            return p.METHODS[method].response()
        message = next(iter(command)) if upload else command.request
        request = (p.UploadRequest if upload else p.METHODS[method].request).FromString(message)
        if method in ("Upload", "CreateBuffer"):
            request = request.spec
        elif method == "Map":
            request = request.result.buffer
        if nanoseconds(request.ttl) > nanoseconds(self.max_ttl):
            raise ts.BadTtl("", "INVALID_ARGUMENT")
        raise Accepted(nanoseconds(request.ttl))

    def run(self, steps):
        """Returns the result of a Core's steps."""
        try:
            command = next(steps)
            while True:
                try:
                    outcome = self.perform(command)
                except ts.Error as error:
                    command = steps.throw(error)
                else:
                    command = steps.send(outcome)
        except StopIteration as stop:
            return stop.value


def nanoseconds(duration):
    return duration.seconds * 10**9 + duration.nanos


class CallsTest(unittest.TestCase):
    """What a client sends, and what it remembers about its server, tested without a server."""

    def core(self, **options):
        return _core.Core(_connect.Options("127.0.0.1:1", **options))

    def test_all_attempts_have_the_time_of_one(self):
        steps = self.core(timeout=20).call("ListStrategies", b"")
        first = next(steps)
        pause = steps.throw(_errors.make("", "UNAVAILABLE", "CONNECTION_LOST"))
        self.assertIsInstance(pause, _core.Pause)
        second = steps.send(True)
        self.assertEqual(first.timeout, 20)
        self.assertTrue(0 < second.timeout < 20, second.timeout)

    def test_durations(self):
        for text, want in (
                ("1ms", 10**6), ("1500ms", 1.5e9), ("90s", 90e9), ("1.5s", 1.5e9), ("2m", 120e9),
                ("1.5h", 5400e9), ("7d", 604800e9), (2, 2e9), (0.25, 0.25e9),
                (datetime.timedelta(minutes=1, milliseconds=5), 60.005e9)):
            self.assertEqual(nanoseconds(_connect.duration(text)), want, text)
        self.assertIsNone(_connect.duration(None))

    def test_an_unnamed_buffer_lives_as_long_as_both_sides_allow(self):
        durations = ("999ms", "1s", "1001ms", "1500ms", "2s", "59.5s", "1m", "61.25s", "1h", "1d")
        for wanted, longest in itertools.product(durations, repeat=2):
            core, server = self.core(unnamed_ttl=wanted), LimitedServer(_connect.duration(longest))
            got = server.run(core._lifetime())
            both = [nanoseconds(_connect.duration(one)) for one in (wanted, longest)]
            self.assertEqual(nanoseconds(got), min(both), (wanted, longest))
            # A lifetime that the caller gives is sent unchanged.
            self.assertEqual(server.run(core._lifetime(wanted)), _connect.duration(wanted))
        server = LimitedServer(None)
        self.assertIsNone(server.run(self.core(unnamed_ttl=None)._lifetime()))
        self.assertEqual(server.methods, [])
        self.assertEqual(server.run(self.core(unnamed_ttl="2d")._lifetime()).seconds, 172800)

    def makers(self):
        """Returns the methods that make unnamed buffers, with their steps. The steps take a
        lifetime from the caller if the method accepts one."""
        x = _graph.Leaf(p.Buffer(name="x", version=1, dtype=1, shape=[1 << 20]))
        added = apply("add", (x, x.whole), constant(1))
        return (
            ("Upload", lambda core, ttl: put(core, np.ones(3), ttl)),
            ("CreateBuffer", lambda core, ttl: put(core, np.ones(o.MI), ttl)),
            ("CopyBuffer", lambda core, ttl: core.copy(x, x.whole, None, ttl=ttl)),
            ("CopyBuffer", lambda core, ttl: core.link(x, None, ttl=ttl)),
            ("CopyBuffer", lambda core, ttl: core.save((x, x.whole), None, False, ttl)),
            ("ImportBuffer",
             lambda core, ttl: core.import_from("h:1", "x", None, 0, False, ttl, "", 60.0)),
            ("Map", lambda core, ttl: core.keep([added], ttl=ttl)),
            ("Map", lambda core, ttl: core.save(added, None, False, ttl)),
            ("Map", lambda core, ttl: core.evaluate([added])),  # It is too large for a response.
        )

    def accepted(self, server, steps):
        with self.assertRaises(Accepted) as caught:
            server.run(steps)
        (lifetime,) = caught.exception.args
        return lifetime

    def test_limits_of_a_server_are_those_of_the_next_one_no_more(self):
        minute, second = _connect.duration("1m"), _connect.duration("1s")
        for i, (method, steps) in enumerate(self.makers()):
            with self.subTest(method=method, number=i):
                core, server = self.core(), LimitedServer(minute)
                self.assertEqual(self.accepted(server, steps(core, None)), 60e9)
                self.assertEqual(server.methods, ["GetServerInfo", method])
                # Another server has taken the address, and no call has noticed the change.
                server.max_ttl, server.methods = second, []
                self.assertEqual(self.accepted(server, steps(core, None)), 1e9)
                self.assertEqual(server.methods[-3:], [method, "GetServerInfo", method])
                server.methods = []
                self.assertEqual(self.accepted(server, steps(core, None)), 1e9)
                self.assertEqual(server.methods[-1:], [method])
                self.assertNotIn("GetServerInfo", server.methods)

    def test_limits_are_asked_for_again_after_a_lost_call(self):
        for i, (method, steps) in enumerate(self.makers()):
            with self.subTest(method=method, number=i):
                core, server = self.core(), LimitedServer(_connect.duration("1s"))
                self.accepted(server, steps(core, None))
                server.lost, server.methods = 1, []
                server.max_ttl = _connect.duration("1m")
                server.run(core.unary("ListStrategies"))
                self.assertEqual(self.accepted(server, steps(core, None)), 60e9)
                self.assertEqual(server.methods, 2 * ["ListStrategies"] + ["GetServerInfo", method])

    def test_a_lifetime_of_the_callers_that_is_too_long_is_refused(self):
        for method, steps in self.makers()[:-1]:
            with self.subTest(method), self.assertRaises(ts.BadTtl):
                LimitedServer(_connect.duration("1s")).run(steps(self.core(), "2s"))


def put(core, array, ttl):
    return core.put(array, None, None, False, ttl, "", (), None)


class TokensTest(unittest.TestCase):
    def test_a_token_does_not_leave_the_host_in_the_clear(self):
        with self.assertRaisesRegex(ValueError, "in the clear"):
            _connect.Options("gpu:1", token="secret")
        _connect.Options("gpu:1", token="secret", tls=True)
        options = _connect.Options("unix:/run/x", token="secret")
        self.assertEqual(options.metadata(), (("authorization", "Bearer secret"),))
        self.assertNotIn("secret", repr(options))

    def test_where_tokens_come_from(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "token")
            path.write_text("one\n")
            options = _connect.Options("localhost:1", token_file=str(path))
            self.assertEqual(options.metadata()[0][1], "Bearer one")
            path.write_text("\ufeff two \r\n", encoding="utf-8")
            self.assertEqual(options.metadata()[0][1], "Bearer two")
            ring = pathlib.Path(folder, "ring")
            ring.write_text("\ufeffa localhost:1\r\n", encoding="utf-8")
            self.assertEqual(ts.Ring(str(ring)).servers, {"a": "localhost:1"})
        for token in ("secret", "secret\n", "secret\r\n", " secret ", "\ufeffsecret\n"):
            with mock.patch.dict(os.environ, TESSERA_TOKEN=token):
                self.assertEqual(_connect.Options("localhost:1").token, "secret")
            self.assertEqual(_connect.Options("localhost:1", token=token).token, "secret")
        self.assertIsNone(_connect.Options("localhost:1").metadata())
        for token in ("two words", "", "\n", "\u00e9", "a" * 1025):
            with self.assertRaisesRegex(ValueError, "1 to 1024 ASCII characters"):
                _connect.Options("localhost:1", token=token)

    def test_marks_and_blanks_around_names_and_addresses(self):
        for address in ("localhost:1", "unix:/run/x"):
            options = _connect.Options(f"\ufeff{address}\r\n", tls_server_name="\ufeffgpu\n",
                                       route=" run7/x\n")
            self.assertEqual(options.target, address)
            self.assertEqual(options.tls_server_name, "gpu")
            self.assertEqual(options.metadata(), (("tessera-route", "run7"),))
        for route in ("", "a\nb", "a b", "\u00e9"):
            with self.assertRaisesRegex(ValueError, "must be a buffer's name"):
                _connect.Options("localhost:1", route=route)

    def test_addresses_that_stay_on_this_host(self):
        lines = (o.ROOT / "tests" / "loopback_cases.txt").read_text().splitlines()
        cases = [(address, line.split()[0]) for line in lines for address in line.split()[1:]
                 if line[0] != "#"]
        self.assertGreater(len(cases), 80)
        for address, stays in cases:
            with self.subTest(address):
                self.assertEqual(_connect.is_loopback(address), stays == "yes")
                if stays == "no":
                    with self.assertRaises(ValueError):
                        _connect.Options(address, token="secret")


class LostArraysTest(o.Case):
    """Each test has its own server."""

    def setUp(self):
        self.server = self.serve("--max-ttl", "2h", listen=lasting_address())
        self.t = ts.connect(self.server.address, **LONG)
        self.addCleanup(self.t.close)

    def restart(self, *flags):
        """Starts another server at the same address."""
        self.server.kill()
        self.serve(*flags, listen=self.server.address)

    def test_after_a_restart_buffers_are_gone_and_the_client_goes_on(self):
        x = self.t.put(np.ones(5, "f4"), "x")
        self.restart()
        for call in (x.sum().numpy, (x + 1).sum().numpy, x.numpy):
            self.assertRaisesRegex(ts.BufferNotFound, "gone.*restarted", call)
        x = self.t.put(np.ones(5, "f4"), "x")
        self.assertEqual(float(x.sum()), 5)

    def test_a_server_that_allows_smaller_results_comes_back_between_two_calls(self):
        limits = self.t.info().limits
        a = np.arange(float(limits.max_inline_result_bytes // 4))
        limits.max_inline_result_bytes *= 4
        self.t._core._limits = limits
        np.testing.assert_array_equal((self.t.put(a) + 1).numpy(), a + 1)

    def test_a_program_that_is_too_long_names_the_way_out(self):
        x = self.t.put(np.ones(3))
        for _ in range(2100):
            x = x.dot(x) * x
        with self.assertRaisesRegex(ts.TooManySteps, "save intermediate results"):
            x.numpy()

    def test_only_programs_of_several_steps_name_the_way_out_and_name_it_once(self):
        self.restart("--scratch-limit", "1Mi")
        x = self.t.put(np.ones((2000, 2000), "f4"))
        single, several = ts.topk(x, 5, axis=0)[0], (x @ x @ x).sum(axis=0)
        for work, times in (
                (single.numpy, 0), (single.save, 0), (several.numpy, 1), (several.save, 1)):
            with self.assertRaises(ts.ScratchExhausted) as caught:
                work()
            self.assertEqual(str(caught.exception).count("intermediate results"), times)

    def test_a_replaced_array_is_gone(self):
        x = self.t.put(np.ones(5, "f4"), "x")
        new = self.t.put(np.zeros(5, "f4"), "x", replace=True)
        for work in (x.sum(), x, x + new, new + x, new.sum() - x.sum()):
            with self.assertRaisesRegex(ts.VersionMismatch, "gone"):
                work.numpy()


class ErrorsOfCallsTest(python_outsider.Case):
    FLAGS = ("--memory-limit", "64Mi")

    def test_reasons_and_figures(self):
        x = self.t.put(np.ones((3, 4), "f4"))
        with self.assertRaises(ts.QuotaExceeded) as caught:
            self.t.put(np.zeros(80 << 20, np.uint8).view("f4"))
        self.assertEqual(caught.exception.code, "RESOURCE_EXHAUSTED")
        self.assertIn("requested", caught.exception.details)
        for error, call in ((ts.BadName, lambda: self.t.put(np.zeros(1), "no spaces")),
                            (ts.EmptyInput, lambda: x[:0].max().numpy()),
                            (ts.EmptyInput, lambda: (x[:0] + 1).max().numpy()),
                            (ts.BufferNotFound, lambda: self.t["none"]),
                            (ts.BufferNotFound, lambda: self.t.delete("none"))):
            self.assertRaises(error, call)
        for call in (ts.sum_squares, ts.norm, lambda a: ts.window_sum(a, 1),
                     lambda a: ts.topk(a, 1), lambda a: ts.vecdot(a, a)):
            with self.assertRaisesRegex(TypeError, r"client\.put"):
                call(np.ones(3, "f4"))
        self.assertEqual(self.t.call("GetBuffer", name=x.name).buffer.version, x.version)


class Cut:
    """A method whose responses are truncated."""

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

    def result(self, timeout=None):
        return self.method.cut(self.call.result(timeout))


class CutAnswersTest(python_outsider.Case):
    """A truncated response is an Error unless the rest has everything that was requested."""

    # Missing fields have their default values, so a truncation of these responses, or of an index,
    # goes unnoticed.
    SILENT = {"ListBuffers", "GetServerInfo"}

    def setUp(self):
        self.a = np.arange(12, dtype="f4").reshape(3, 4)
        self.x = self.t.put(self.a, "cut/x", replace=True)
        self.k = self.t.put(np.arange(5), "cut/k", replace=True)

    def test_blocking(self):
        t, x, k, large = self.t, self.x, self.k, np.ones(1 << 19, "f4")
        reads = (
            ("Dot", lambda: x[0].dot(x[1]).numpy()), ("Dot", lambda: k.dot(k).numpy()),
            ("Reduce", lambda: x.sum().numpy()), ("Reduce", lambda: x.argmin().numpy()),
            ("Reduce", lambda: x.sum(axis=1).numpy()), ("Reduce", lambda: (k > 3).any().numpy()),
            ("Matmul", lambda: (x @ x.T).numpy()), ("Map", lambda: (x + 1).numpy()),
            ("WindowSum", lambda: ts.window_sum(k, 1).numpy()),
            ("Execute", lambda: ts.topk(x, 2)[1].numpy()),
            ("Execute", lambda: (x + 1).sum().numpy() + (x.T @ x).sum().numpy()),
            ("Execute", lambda: np.concatenate(t.compute(x.sum(axis=0), x.max(axis=1)))),
            ("Execute", lambda: t.keep(x + 1, x.T @ x)[1].shape),
            ("GetBuffer", lambda: t["cut/x"].shape), ("ListBuffers", lambda: len(t.list("cut/"))),
            ("GetServerInfo", lambda: len(t.info().devices)),
            ("Download", lambda: x.numpy()), ("Download", lambda: large_x.numpy()),
            ("Upload", lambda: t.put(self.a, "cut/small", replace=True).shape),
            ("CreateBuffer", lambda: t.put(large, "cut/large", replace=True).shape),
            ("SealBuffer", lambda: t.put(large, "cut/large", replace=True).shape),
            ("CopyBuffer", lambda: x.copy("cut/copy", replace=True).shape),
            ("CopyBuffer", lambda: x.link("cut/link", replace=True).shape),
            ("Map", lambda: (x + 1).save("cut/saved", replace=True).shape))
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
                            same = type(got) is type(want) and np.array_equal(got, want)
                            self.assertTrue(same or method in self.SILENT)

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
            type_url="type.googleapis.com/google.rpc.RetryInfo", value=delay.SerializeToString())
        Refusal.value = status.SerializeToString()
        self.assertEqual(_errors.from_rpc(Refusal()).retry_after, 1.25)


if __name__ == "__main__":
    python_outsider.main("__main__")
