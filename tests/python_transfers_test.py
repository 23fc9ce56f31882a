#!/usr/bin/env python3
"""Tests transfers of the Python client: resumed after a break, without copying the whole array."""

import asyncio
import contextlib
import io
import os
import pathlib
import signal
import socket
import threading
import time
import unittest
from unittest import mock

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from python_outsider import impatient
from relay import Relay
from tessera import _async, _blocking, _core
from tessera.graph import _dtypes, _graph
from tessera.transfers import _messages, _progress, _shared
from tessera.wire import _connect, _errors
from tessera.wire import _protocol as p

MIB = 1 << 20
STALL_S = 0.4  # The timeout of transfers that stall.


def performed(t, kind=object):
    """Returns a list that collects the commands of a kind that a client performs from now on."""
    commands, perform = [], t._io.perform

    def watched(command):
        if isinstance(command, kind):
            commands.append(command)
        return perform(command)

    t._io.perform = watched
    return commands


def fail(done, total):
    """A progress function that fails."""
    raise RuntimeError("enough")


class TransfersTest(python_outsider.Case):
    FLAGS = ("--no-warm-up",)
    STREAMS = 1  # The number of streams of an upload.
    CUTS = [30 * MIB]  # One per connection, in the order of creation.
    data = np.random.default_rng(3).integers(0, 1 << 30, 6 * MIB, "i8")  # 48 MiB

    def through(self, relay, **options):
        """Returns a client whose connections go through the relay."""
        self.addCleanup(relay.close)
        return self.enterContext(ts.connect(relay.where, **options))

    def test_an_upload_resumes(self):
        relay = Relay(self.server.address, request_cuts=self.CUTS)
        t = self.through(relay)
        streams = performed(t, _messages.Stream)
        sent = []
        x = t.put(self.data, "resumed", progress=lambda done, total: sent.append(done))
        self.assertEqual(relay.breaks, 1)
        self.assertEqual(sent, sorted(sent))
        self.assertEqual(sent[-1], self.data.nbytes)
        # The transfer continued where the server's bytes ended. That may be beyond the bytes that
        # the client knew of before the break, so the progress need not show it.
        resumed = sum(relay.requests)
        self.assertLess(resumed, self.data.nbytes * 5 // 4)
        self.assertGreater(len(streams), self.STREAMS)
        np.testing.assert_array_equal(self.t["resumed"].numpy(), self.data)
        self.assertEqual(x.version, self.t["resumed"].version)
        self.t.delete("resumed")

    def test_a_download_resumes(self):
        x = self.t.put(self.data, "down", replace=True)
        relay = Relay(self.server.address, cuts=self.CUTS)
        t = self.through(relay)
        done = []
        got = t["down"].numpy(progress=lambda now, total: done.append(now))
        self.assertEqual(relay.breaks, 1)
        self.assertEqual(done, sorted(done))
        self.assertEqual(done[-1], self.data.nbytes)
        # Bytes that were on their way to a busy client are sent again, but not the whole array,
        # which would add 30 of 48 MiB.
        self.assertLess(sum(relay.passed), self.data.nbytes * 8 // 5)
        np.testing.assert_array_equal(got, self.data)
        self.assertEqual(x.version, t["down"].version)

    def test_patience_begins_with_the_break(self):
        """The stall timeout does not count from the beginning of the transfer, which may last
        longer than the timeout."""
        relay = Relay(self.server.address, request_cuts=self.CUTS)
        t = self.through(relay, stall_timeout=60)
        ahead, now = 0, time.monotonic

        def slow(done, total):
            nonlocal ahead
            ahead = done // MIB * 10  # Each MiB takes 10 s by the client's clock.

        with mock.patch("time.monotonic", lambda: now() + ahead):
            x = t.put(self.data, progress=slow)
        self.assertEqual(relay.breaks, 1)
        np.testing.assert_array_equal(x.numpy(), self.data)

    def test_a_transfer_that_stands_still(self):
        self.t.put(self.data, "still", replace=True)
        relay = Relay(self.server.address)
        t = self.through(relay, stall_timeout=STALL_S)
        x = t["still"]

        def hold(done, total):
            relay.silent.set()

        for work in (lambda: x.numpy(progress=hold), lambda: t.put(self.data, progress=hold)):
            self.assertRaises(ts.Stalled, work)
            relay.silent.clear()

    def test_what_the_caller_raises(self):
        x = self.t.put(self.data, "raising", replace=True)

        out = np.zeros_like(self.data)
        with self.assertRaisesRegex(RuntimeError, "enough"):
            x.numpy(progress=fail, out=out)
        came = out.copy()
        np.testing.assert_array_equal(x.numpy(), self.data)
        np.testing.assert_array_equal(out, came)
        with self.assertRaisesRegex(RuntimeError, "enough"):
            self.t.put(self.data, "failed", progress=fail)
        self.assertNotIn("failed", self.t)

        def lose(done, total):
            raise ts.ConnectionLost("another server is away", "UNAVAILABLE")

        for data in (self.data, self.data[:1000]):  # Errors of this client are not those of others.
            with self.assertRaisesRegex(ts.ConnectionLost, "another server"):
                self.t.put(data, progress=lose)
            with self.assertRaisesRegex(ts.ConnectionLost, "another server"):
                self.t.put(data).numpy(progress=lose)

    def test_into_an_array_that_is_there(self):
        x = self.t.put(self.data, "into", replace=True)
        out = np.empty_like(self.data)
        self.assertIs(x.numpy(out=out), out)
        np.testing.assert_array_equal(out, self.data)
        for view in np.s_[5:900, ::-1, ::100, 7:7]:
            part = np.zeros_like(self.data[view])
            self.assertIs(x[view].numpy(out=part), part)
            np.testing.assert_array_equal(part, self.data[view])
        for wrong in (out[1:], out.reshape(1, -1)):
            self.assertRaises(ts.BadShape, x.numpy, out=wrong)
        self.assertRaises(ts.BadDtype, x.numpy, out=out.astype("i4"))
        short = self.t.put(np.arange(12.0).reshape(3, 4), dtype="bf16")
        for view in (short, short.T, short[:0]):
            part = np.empty_like(view.numpy())
            self.assertIs(view.numpy(out=part), part)
            np.testing.assert_array_equal(part, view.numpy())
        with self.assertRaisesRegex(ts.BadDtype, "(bf16|float32|bfloat16), not float64"):
            short.numpy(out=np.empty((3, 4)))
        fixed = np.empty_like(self.data)
        fixed.flags.writeable = False
        for wrong in (fixed, np.empty((len(out), 2), "i8")[:, 0]):
            self.assertRaisesRegex(ValueError, "row-major", x.numpy, out=wrong)
        self.assertRaises(TypeError, x.numpy, out=[0])

    def test_a_window_fetches_its_range_alone(self):
        x = self.t.put(self.data, "window", replace=True)
        fetched = performed(self.t)
        self.addCleanup(delattr, self.t._io, "perform")
        np.testing.assert_array_equal(x[100:200].numpy(), self.data[100:200])
        self.assertEqual([command.size for command in fetched], [800])
        fetched.clear()
        np.testing.assert_array_equal(x[::100].numpy(), self.data[::100])
        *_, gathered, download = fetched  # The first such call requests the limits.
        self.assertEqual(gathered.method, "CopyBuffer")
        self.assertEqual(download.size, self.data[::100].nbytes)


class DividedTest(TransfersTest):
    """The same tests with several connections."""

    STREAMS = _messages.UPLOADS
    CUTS = [None, 8 * MIB]
    test_a_window_fetches_its_range_alone = None  # Small windows are not divided.

    def setUp(self):
        self.enterContext(mock.patch.object(_messages, "DIVIDED", 8 * MIB))

    def test_connections(self):
        relay = Relay(self.server.address)
        t = self.through(relay)
        streams = performed(t, _messages.Stream)
        t.put(self.data[: MIB - 1], "small", replace=True)
        t["small"].numpy()
        self.assertEqual((len(relay.passed), len(streams)), (1, 2))
        told, callers = [], set()

        def tell(*done):
            told.append(done)
            callers.add(threading.current_thread())

        for work, count in (
                (lambda: t.put(self.data, "large", replace=True, progress=tell), _messages.UPLOADS),
                (lambda: t["large"].numpy(progress=tell), _messages.DOWNLOADS),
                (lambda: t["large"][9 : 3 * MIB].numpy(), _messages.DOWNLOADS)):
            streams.clear()
            got = work()
            self.assertEqual(sorted(s.connection for s in streams), list(range(count)))
        np.testing.assert_array_equal(got, self.data[9 : 3 * MIB])
        self.assertEqual(callers, {threading.current_thread()})
        size = self.data.nbytes
        self.assertEqual(told, 2 * [(done, size) for done in range(MIB, size + 1, MIB)])
        # The connections are kept.
        self.assertEqual(len(relay.passed), max(_messages.UPLOADS, _messages.DOWNLOADS))
        ends = relay.open[::2]
        t.close()

        def hung_up():
            return all(end.fileno() < 0 or end.recv(1, socket.MSG_PEEK) == b"" for end in ends)

        self.assertTrue(o.eventually(hung_up))

    def test_ranges(self):
        for begin, end in ((0, 8 * MIB), (5, 48 * MIB + 3), (MIB + 1, 100 * MIB), (0, 8 * MIB - 1)):
            parts = _messages.divided(begin, end, 4)
            self.assertEqual(len(parts), 4 if end - begin >= 8 * MIB else 1)
            self.assertEqual((parts[0][0], parts[-1][1]), (begin, end))
            for (a, b), (c, d) in zip(parts, parts[1:]):
                self.assertEqual(b, c)
                self.assertLess(a, b)
                self.assertEqual((b - begin) % MIB, 0)

    def test_what_a_server_lacks(self):
        first = _core._first_missing
        self.assertEqual(first([(0, 3), (5, 9)], (4, 8)), (5, 8))
        self.assertEqual(first([(0, 3), (5, 9)], (6, 12)), (6, 12))
        self.assertEqual(first([(0, 3), (8, 9)], (4, 8)), None)
        self.assertEqual(first([(0, 3)], (4, 8)), None)
        self.assertEqual(first([(i, i + 1) for i in range(0, 200, 2)], (300, 400)), (300, 400))

    def test_a_server_with_room_for_one_stream(self):
        server = self.serve("--no-warm-up", "--max-transfers", "1")
        with ts.connect(server.address, retry_refused=False) as t:
            np.testing.assert_array_equal(t.put(self.data).numpy(), self.data)

    def test_connections_that_lead_to_another_server(self):
        other = self.serve("--no-warm-up")
        relay = Relay(self.server.address)
        t = self.through(relay)
        relay.address = other.address.split(":")
        np.testing.assert_array_equal(t.put(self.data).numpy(), self.data)
        self.assertEqual(len(relay.passed), max(_messages.UPLOADS, _messages.DOWNLOADS))

    def test_a_server_that_never_has_room(self):
        """gRPC accepts the first bytes of a stream before it knows of the refusal. They do not
        count as progress."""
        t = self.enterContext(ts.connect(self.server.address, shared_memory=False))
        perform, refused, ahead, now = t._io.perform, [], 0, time.monotonic

        def refuse(command):
            nonlocal ahead
            if isinstance(command, _core.Pause):
                ahead += command.seconds
                return True
            if not isinstance(command, (_messages.Upload, _messages.Several)):
                return perform(command)
            for stream in getattr(command, "streams", [command]):
                messages = iter(stream)
                next(messages), next(messages)
            refused.append(command)
            if ahead > t._core.options.stall_timeout:
                raise AssertionError("it continues")
            raise _errors.make("", "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXHAUSTED", retry_after=0.02)

        t._io.perform = refuse
        clock = mock.patch("time.monotonic", lambda: now() + ahead)
        with self.assertRaises(ts.HostMemoryExhausted), clock:
            t.put(self.data)
        self.assertGreater(len(refused), 1)

    def test_a_refusal(self):
        """The server says which byte it does not accept, wherever that byte is."""
        wrong = np.zeros(48 * MIB, np.uint8)
        wrong[40 * MIB] = 2
        as_it_is = mock.patch.object(ts.graph._dtypes, "_converted", lambda array, _: array)
        with self.assertRaises(ts.BadBool) as caught, as_it_is:
            self.t.put(wrong.view(bool))
        self.assertEqual(caught.exception.details["offset"], str(40 * MIB))


class AsyncioTest(python_outsider.Case):
    """Several connections with asyncio."""

    FLAGS = ("--no-warm-up",)

    data = TransfersTest.data

    def setUp(self):
        self.enterContext(mock.patch.object(_messages, "DIVIDED", 8 * MIB))

    def run_through(self, relay, work, **options):
        self.addCleanup(relay.close)

        async def run():
            async with await ts.aio.connect(relay.where, **options) as t:
                return await work(t)

        return asyncio.run(run())

    def test_both_ways(self):
        relay = Relay(self.server.address)
        told = []

        async def work(t):
            x = await t.put(self.data, progress=lambda done, total: told.append(done))
            return await x.numpy(progress=lambda done, total: told.append(done))

        np.testing.assert_array_equal(self.run_through(relay, work), self.data)
        self.assertEqual(len(relay.passed), max(_messages.UPLOADS, _messages.DOWNLOADS))
        self.assertEqual(told, 2 * list(range(MIB, self.data.nbytes + 1, MIB)))

    def test_breaks(self):
        async def work(t):
            x = await t.put(self.data)
            with self.assertRaisesRegex(RuntimeError, "enough"):
                await t.put(self.data, "raising", progress=fail)
            self.assertEqual(await t.list("raising"), [])
            return await x.numpy()

        for cuts in ({"cuts": [None, 8 * MIB]}, {"request_cuts": [None, 8 * MIB]}):
            relay = Relay(self.server.address, **cuts)
            np.testing.assert_array_equal(self.run_through(relay, work), self.data)
            self.assertEqual(relay.breaks, 1)

    def test_cancelled_and_stalled(self):
        relay, held = Relay(self.server.address), None

        def hold(done, total):
            relay.silent.set()
            held.set()

        async def work(t):
            nonlocal held
            x = await t.put(self.data)
            out = np.zeros_like(self.data)
            for begin in (
                lambda: x.numpy(progress=hold, out=out), lambda: t.put(self.data, progress=hold),
            ):
                held = asyncio.Event()
                task = asyncio.ensure_future(begin())
                await held.wait()
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                came = out.copy()
                relay.silent.clear()
                np.testing.assert_array_equal(await x[:5].numpy(), self.data[:5])
                np.testing.assert_array_equal(out, came)
                impatient(t, stall_timeout=STALL_S)
                with self.assertRaises(ts.Stalled):
                    await begin()
                relay.silent.clear()
                impatient(t, stall_timeout=60)
            np.testing.assert_array_equal(await x.numpy(), self.data)

        self.run_through(relay, work)


class SharedTest(o.Case):
    """Transfers through memory that the server shares."""

    DEVICE = "cpu"
    PLACEMENT = ()

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.socket_path = f"{cls.folder}/socket"
        flags = ("--no-warm-up", "--shared-memory", cls.socket_path)
        cls.server = cls.serve_class(*flags, device=cls.DEVICE)
        cls.data = np.random.default_rng(4).integers(0, 1 << 30, 5 * MIB, "i4")  # Two parts.
        cls.long = np.concatenate([cls.data, cls.data])  # Three parts.

    def setUp(self):
        self.t = self.enterContext(ts.connect(self.server.address))
        put = self.t.put
        self.t.put = lambda *args, **more: put(*args, placement=self.PLACEMENT, **more)
        self.performed = performed(self.t)

    def kinds(self):
        """Returns the transfers since the last call, by class."""
        transfers = _shared.Transfer, _messages.Upload, _messages.Download
        found = [type(c).__name__ for c in self.performed if isinstance(c, transfers)]
        self.performed.clear()
        return found

    def test_large_arrays_go_through_it(self):
        told = []
        x = self.t.put(self.data, progress=lambda done, total: told.append((done, total)))
        self.assertEqual(self.kinds(), ["SharedUpload"])
        size = self.data.nbytes
        self.assertEqual(told, [(16 * MIB, size), (size, size)])
        np.testing.assert_array_equal(x.numpy(), self.data)
        np.testing.assert_array_equal(x[5:-7].numpy(), self.data[5:-7])
        np.testing.assert_array_equal(x.numpy(out=np.empty_like(self.data)), self.data)
        np.testing.assert_array_equal((x + 1).numpy(), self.data + 1)
        self.assertEqual(self.kinds(), ["SharedDownload"] * 4)
        self.t.put(self.data[:100])
        self.assertEqual(self.kinds(), ["Upload"])

    def test_threads_share_it(self):
        def work(i):
            for _ in range(2):
                x = self.t.put(self.data + i)
                np.testing.assert_array_equal(x.numpy(), self.data + i)

        o.in_threads(3, work)
        region, slot = self.t._core.pool.region(), _shared.SLOT
        self.assertEqual(sorted(region._free), [0, 1, 2, 3])
        parts = [region.take(size) for size in (slot, slot + 1, slot + 1, 1)]
        self.assertEqual([len(part) for part in parts], [1, 2, 1, 0])
        region.give_back(sum(parts, []))

    def test_a_region_that_is_lost_under_way(self):
        """Streams transfer the rest. The region, to which the server may still write, is not used
        again."""
        self.t.put(self.long)
        for way in ("up", "down"):
            region = self.t._core.pool.region()
            x = self.t.put(self.long, "x", replace=True)

            def lose(done, total, region=region):
                region.token = b"gone"

            self.kinds()
            if way == "up":
                x = self.t.put(self.long, "x", replace=True, progress=lose)
            got = x.numpy(progress=lose)
            np.testing.assert_array_equal(got, self.long)
            self.assertIn({"up": "Upload", "down": "Download"}[way], self.kinds())
            self.assertIsNot(self.t._core.pool.region(), region)

    def stop(self):
        """Stops the server. Returns when none of its threads is running."""
        self.server.signal(signal.SIGSTOP)
        tasks = pathlib.Path(f"/proc/{self.server.process.pid}/task")
        stopped = lambda: all("State:\tT" in t.read_text() for t in tasks.glob("*/status"))
        self.assertTrue(o.eventually(stopped))

    @contextlib.contextmanager
    def stopped(self):
        """Resumes the server when the block ends. The block itself must stop it."""
        try:
            yield
        finally:
            self.server.signal(signal.SIGCONT)

    def test_a_server_that_hangs(self):
        """All attempts share one stall timeout. If a shared transfer, or a request for shared
        memory, has used it up, no stream follows. A stream gets no further time."""
        x = self.t.put(self.data, "hangs", replace=True)
        for pool in (self.t._core.pool, _shared.Pool()):
            with ts.connect(self.server.address) as t:
                t._core.pool = pool
                hung = t["hangs"]
                impatient(t, stall_timeout=STALL_S, timeout=2 * STALL_S)
                attempts = performed(t)
                with self.stopped():
                    self.stop()
                    self.assertRaises(ts.Stalled, hung.numpy)
                self.assertEqual(len(attempts), 1, attempts)

        self.t._core.pool.close()
        perform, begin = self.t._io.perform, []

        def stop(command):
            if isinstance(command, _core.Share):
                impatient(self.t, stall_timeout=STALL_S)
                command.seconds = STALL_S
                begin.append(time.monotonic())
                self.stop()
            return perform(command)

        self.t._io.perform = stop
        with self.stopped():
            self.assertRaises(ts.Stalled, x.numpy)
        download = self.performed[-1]
        self.assertIsInstance(download, _messages.Download)
        self.assertLess(download.tally.moved, begin[0])

    def test_patience_begins_with_the_last_part(self):
        """Two calls run at the same time, and the second call may use up its time while the server
        works for the first. Then streams transfer the rest, unless nothing has arrived for that
        long."""
        x = self.t.put(self.long)
        perform, patience = self.t._io.perform, self.t._core.options.stall_timeout

        def slow(command):
            if not isinstance(command, _shared.Transfer):
                return perform(command)
            command.finish(self.t._io.call(command.method, command.begin(), o.START_TIMEOUT_S))
            command.moved -= ago
            command.begin()
            raise ts.Error("late", "DEADLINE_EXCEEDED")

        self.t._io.perform = slow
        ago = 0
        self.performed.clear()
        np.testing.assert_array_equal(self.t.put(self.long).numpy(), self.long)
        self.assertEqual(self.kinds(), ["Upload", "Download"])
        ago = patience
        self.assertRaises(ts.Stalled, self.t.put, self.long)
        self.assertRaises(ts.Stalled, x.numpy)
        self.assertEqual(self.kinds(), [])

    def test_the_end_of_a_client_of_a_server_that_hangs(self):
        """The client waits for one call, and for nothing else."""
        self.t.put(self.data)
        self.t._io._forgotten.add("another call")
        self.performed.clear()
        with self.stopped(), mock.patch.object(_blocking, "LAST_CALLS_S", 3600):
            self.stop()
            closing = threading.Thread(target=self.t.close, daemon=True)
            closing.start()
            closing.join(o.START_TIMEOUT_S)
            self.assertFalse(closing.is_alive())
        self.assertEqual([command.method for command in self.performed], ["ListBuffers"])

    def test_an_upload_that_fails_leaves_nothing(self):
        with self.assertRaisesRegex(RuntimeError, "enough"):
            self.t.put(self.data, "y", progress=fail)
        self.assertNotIn("y", self.t)

    def test_without(self):
        with ts.connect(self.server.address, shared_memory=False) as t:
            np.testing.assert_array_equal(t.put(self.data).numpy(), self.data)
            self.assertIsNone(t._core.pool.region())
        os.rename(self.socket_path, f"{self.socket_path}.away")
        self.addCleanup(os.rename, f"{self.socket_path}.away", self.socket_path)
        np.testing.assert_array_equal(self.t.put(self.data).numpy(), self.data)
        self.assertEqual(self.kinds(), ["Upload", "Download"])

    def test_asyncio(self):
        async def work():
            async with await ts.aio.connect(self.server.address) as t:
                arrays = await asyncio.gather(*(t.put(self.data + i) for i in range(3)))
                outs = [None, np.empty_like(self.data), None]
                found = await asyncio.gather(*(x.numpy(out=out) for x, out in zip(arrays, outs)))
                self.assertIs(found[1], outs[1])
                for i, got in enumerate(found):
                    np.testing.assert_array_equal(got, self.data + i)
                self.assertEqual(len(t._core.pool.region()._free), 4)

        asyncio.run(work())


class ShardedTest(SharedTest):
    """The same tests with arrays on several devices."""

    DEVICE = "cpu:0,cpu:1,cpu:2"
    PLACEMENT = ("cpu:2", "cpu:0")

    def test_placement(self):
        x = self.t.put(self.long)
        self.assertEqual(x.devices, ("cpu:2", "cpu:0"))
        self.assertEqual(self.kinds(), ["SharedUpload"])
        np.testing.assert_array_equal(x.numpy(), self.long)

    # These tests do not depend on where the bytes go.
    test_a_server_that_hangs = test_patience_begins_with_the_last_part = None
    test_the_end_of_a_client_of_a_server_that_hangs = test_asyncio = None


class ProgressTest(unittest.TestCase):
    def test_a_bar_on_a_terminal(self):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        shown = Terminal()
        clock = mock.patch("time.monotonic", side_effect=[0, 0.5, 2, 4])
        with mock.patch("sys.stderr", shown), clock:
            report = _progress.reporter(True, 4 * MIB, "put x")
            for part in (1, 2, 4):
                report(part * MIB)
        lines = shown.getvalue().split("\r")[1:]
        self.assertEqual(len(lines), 2)  # Nothing is printed in the first second.
        self.assertIn(f"put x [{15 * '#'}{15 * '.'}] 2 of 4 MB, 1 MB/s", lines[0])
        self.assertTrue(lines[1].endswith("4 of 4 MB, 1 MB/s\n"))
        with mock.patch("sys.stderr", io.StringIO()):
            self.assertIsNone(_progress.reporter(True, 1, ""))
        self.assertIsNone(_progress.reporter(None, 1, ""))

    def test_a_function_is_told_no_fewer_bytes_than_before(self):
        told = []
        report = _progress.reporter(lambda *bytes_: told.append(bytes_), 9, "")
        for done in (3, 5, 2, 4, 9):
            report(done)
        self.assertEqual(told, [(3, 9), (5, 9), (5, 9), (5, 9), (9, 9)])

    def test_streams_of_an_earlier_attempt_tell_nothing_more(self):
        told, now = [], [100.0]
        with mock.patch.object(_messages.time, "monotonic", lambda: now[0]):
            first = _messages.Tally(told.append, 5, since=90.0)
            self.assertEqual((first.done, first.moved), (5, 90))
            first.add(2)
            self.assertEqual((told, first.done, first.moved), ([7], 7, 100))
            first.tell = lambda done: told.append(-done)  # Several streams do the same.
            now[0] = 200.0
            second = first.restarted(6)
            first.add(10)
            self.assertEqual((told, second.done, second.moved), ([7], 6, 200))
            now[0] = 300.0
            second.add(1)
            third = second.restarted(second.done)
            second.add(1)
            third.add(2)
            self.assertEqual((told, third.done, third.moved), ([7, 7, 9], 9, 300))

    def test_parts_in_shared_memory_count_when_they_have_arrived(self):
        told = []
        region = mock.Mock(take=lambda size: [0, 1], part=lambda *_: bytearray(), token=b"")
        with mock.patch.object(_shared.SharedUpload, "_request", lambda *_: b""):
            data = bytes(2 * _shared.SLOT + 5)
            transfer = _shared.SharedUpload(region, "x", 1, 0, data, told.append)
            self.assertTrue(transfer.begin() is not None and transfer.begin() is not None)
            self.assertEqual((transfer.begin(), transfer.done, transfer.moved), (None, 0, None))
            for done in (_shared.SLOT, 2 * _shared.SLOT, 2 * _shared.SLOT + 5):
                transfer.finish(None)
                transfer.begin()
                transfer.tell()
                self.assertEqual((told.pop(), transfer.done), (done, done))
        transfer.end()
        region.give_back.assert_called_once_with([0, 1])
        with mock.patch.object(_shared.SharedDownload, "_request", lambda *_: b""):
            transfer = _shared.SharedDownload(region, "x", 1, 0, bytearray(9), told.append)
            transfer.begin()
            with self.assertRaisesRegex(ts.Error, "not requested"):
                transfer.finish(mock.Mock(size=8))

    @mock.patch.object(_shared, "SLOT", 1 << 16)
    def test_a_region_that_the_server_refuses(self):
        refusal = p.RegisterRegionResponse(reason="TOO_MANY_REGIONS").SerializeToString()
        for answer in (OSError, [refusal]):
            with mock.patch.object(_shared.socket, "socket") as made:
                made().recv.side_effect = answer
                self.assertIsNone(_shared.share("socket", 1))
            made().close.assert_called_once_with()

    def test_a_region_is_used_while_its_server_is_there(self):
        now, pool = [100.0], _shared.Pool()
        first, second, third = (mock.Mock(connected=True) for _ in range(3))
        self.assertIsNone(pool.region())
        self.assertIs(pool.made(first), first)
        self.assertIs(pool.made(second), first)  # Another thread was faster.
        second.close.assert_called_once_with()
        first.connected = False  # The next server has another region.
        self.assertIsNone(pool.region())
        self.assertIs(pool.made(third), third)
        self.assertIs(pool.region(), third)
        with mock.patch.object(_shared.time, "monotonic", lambda: now[0]):
            self.assertTrue(pool.worth_asking())
            pool.refused()
            for now[0], worth in ((100.0, False), (159.0, False), (160.0, True)):
                self.assertIs(pool.worth_asking(), worth)


class SeveralTest(unittest.TestCase):
    """Which failure of several streams is reported to the caller."""

    # The streams' outcomes in chronological order, and which of them is reported.
    FULL, LOST, ENDED = ts.TooManyDownloads("", "RESOURCE_EXHAUSTED"), ts.ConnectionLost(""), None
    ALSO_FULL, STALLED = ts.HostMemoryExhausted("", "RESOURCE_EXHAUSTED"), ts.Stalled("")
    CASES = (((ENDED, ENDED, ENDED), None),
             ((FULL, ENDED, ENDED), FULL),  # The other streams continue.
             ((ENDED, ENDED, FULL), FULL),
             ((FULL, ALSO_FULL, ENDED), FULL),
             ((FULL, ALSO_FULL, LOST), LOST),
             ((FULL, LOST, ALSO_FULL), LOST),
             ((LOST, FULL, STALLED), LOST),
             ((ENDED, LOST, STALLED), LOST),
             ((STALLED, LOST, ENDED), STALLED))

    def check(self, run, want):
        raised = None
        try:
            run()
        except ts.Error as error:
            raised = error
        self.assertIs(raised, want)

    def test_blocking(self):
        io = _blocking.Blocking(_connect.Options("127.0.0.1:1"))
        self.addCleanup(io.close)
        for outcomes, want in self.CASES:
            threads = [None] * len(outcomes)
            begun = [threading.Event() for _ in outcomes]

            def perform(stream, outcomes=outcomes, threads=threads, begun=begun):
                threads[stream.connection] = threading.current_thread()
                begun[stream.connection].set()
                if stream.connection:
                    begun[stream.connection - 1].wait()
                    threads[stream.connection - 1].join()
                if outcomes[stream.connection] is not None:
                    raise outcomes[stream.connection]

            io.perform = perform
            several = _messages.Several([_messages.Stream(_messages.Tally(None)) for _ in outcomes])
            with self.subTest(outcomes):
                self.check(lambda several=several: io._several(several), want)

    def test_asyncio(self):
        async def several(outcomes):
            io = _async.Async(_connect.Options("127.0.0.1:1"))
            ended = [asyncio.Event() for _ in outcomes]

            async def perform(stream):
                if stream.connection:
                    await ended[stream.connection - 1].wait()
                    for _ in range(9):  # The client receives that one first.
                        await asyncio.sleep(0)
                ended[stream.connection].set()
                if outcomes[stream.connection] is not None:
                    raise outcomes[stream.connection]

            io.perform = perform
            try:
                streams = [_messages.Stream(_messages.Tally(None)) for _ in outcomes]
                await io._several(_messages.Several(streams))
            finally:
                await io.close()

        for outcomes, want in self.CASES:
            with self.subTest(outcomes):
                self.check(lambda outcomes=outcomes: asyncio.run(several(outcomes)), want)


class WireTest(unittest.TestCase):
    def test_slices_of_bytes(self):
        """The slices are slices of the array that is sent, wherever they begin and end."""
        a = np.arange(3 * 5 * 7).reshape(3, 5, 7)
        arrays = [a.T, a.T[::-1, ::2], a.astype(">f8"), np.broadcast_to(a[0], (4, 5, 7)), a > 9, a]
        arrays += [np.float32(2), np.array(7, ">i4"), a[:0], a[:0].T.astype(">f4")]
        for array in arrays:
            for dtype in (None, "f4", "f64", "f16", "bf16", "i4", "bool", "uint8"):
                want = _dtypes.to_server(array, dtype)
                data = _dtypes.Outgoing(array, dtype)
                self.assertEqual((data.shape, data.dtype), (want.shape, want.dtype))
                want = want.tobytes()
                self.assertEqual(len(data), len(want))
                for key in (slice(0, len(want)), slice(3, 50), slice(len(want) - 1, len(want))):
                    self.assertEqual(bytes(data[key]), want[key])

    def test_patience_ends_soon_after_its_time(self):
        now = [100.0]
        tally = _messages.Tally(None)
        with mock.patch.object(_messages.time, "monotonic", lambda: now[0]):
            patience = _messages.Patience(tally, 8)
            waited = []
            for looks in range(60):
                now[0] += patience.step
                if looks == 4:
                    tally.add(1)  # 0.9 s after the previous check
                if patience.over():
                    waited.append(now[0] - 100)
                    break
        # The check at 5 s sees that the transfer has moved. It then stalls for 8 s.
        self.assertEqual(waited, [13])

    def test_messages_by_hand_are_those_of_protobuf(self):
        data = memoryview(os.urandom(3 * MIB + 5))
        messages = list(_messages.Upload("x", data, MIB, len(data), 7, None, _messages.Tally(None)))
        parsed = [p.UploadRequest.FromString(message) for message in messages]
        self.assertEqual((parsed[0].name, parsed[0].version, parsed[0].offset), ("x", 7, MIB))
        self.assertEqual(b"".join(m.data for m in parsed), bytes(data[MIB:]))
        response = p.METHODS["Download"].response
        message = response(offset=1 << 40, data=b"abc", crc32c=9, buffer=p.Buffer(name="n"))
        offset, found = _messages.data_of(message.SerializeToString())
        self.assertEqual((offset, bytes(found)), (1 << 40, b"abc"))
        unknown = b"\x79" + 8 * b"\x1a" + b"\x7d" + 4 * b"\x1a"  # Fields of later versions.
        self.assertEqual(_messages.data_of(unknown + message.SerializeToString()), (offset, b"abc"))

    def test_a_stream_that_is_stopped_sends_nothing_more(self):
        def upload():
            return _messages.Upload("x", bytes(3 * MIB), 0, 3 * MIB, 7, None, _messages.Tally(None))

        early, late = upload(), upload()
        messages = iter(late)
        next(messages)
        for stream, steps in ((early, ("stop", "begun")), (late, ("begun", "stop"))):
            call = mock.Mock()
            for step in steps:
                getattr(stream, step)(*[call][: step == "begun"])
            call.cancel.assert_called_once_with()
        self.assertEqual((list(early), list(messages)), ([], []))
        messages = iter(full := upload())
        next(messages)
        messages.close()  # gRPC does this if the server needs no more messages.
        self.assertIsNone(full.failure)

    def test_a_download_takes_the_bytes_that_it_lacks_and_no_others(self):
        method, out = p.METHODS["Download"], np.zeros(5, np.uint8)
        download = _messages.Download("x", 7, 100, out, _messages.Tally(None))

        def take(offset, data):
            download.take(method.response(offset=offset, data=data).SerializeToString())

        take(100, b"ab")
        for offset, data in ((100, b"c"), (103, b"c"), (2, b"c"), (102, b"cdef")):
            with self.assertRaisesRegex(ts.Error, "not requested"):
                take(offset, data)
        self.assertEqual((bytes(out), download.done), (b"ab\0\0\0", 2))
        request = method.request.FromString(download.request())
        self.assertEqual((request.version, request.offset, request.limit), (7, 102, 3))
        take(102, b"cde")
        self.assertEqual((bytes(out), download.done, download.tally.done), (b"abcde", 5, 5))

    def test_a_divided_download_resumes_with_the_bytes_that_it_lacks(self):
        method, data = p.METHODS["Download"], os.urandom(4 * MIB)
        core = _core.Core(_connect.Options("127.0.0.1:1", shared_memory=False))
        x = _graph.Leaf(p.Buffer(name="x", version=7, dtype=8, shape=[len(data)]))

        def take(stream, count):
            """Answers with this number of bytes. Returns the range that the stream requests."""
            request = method.request.FromString(stream.request())
            piece = data[request.offset : request.offset + count]
            stream.take(method.response(offset=request.offset, data=piece).SerializeToString())
            return request.offset, request.limit

        with mock.patch.object(_messages, "DIVIDED", len(data)):
            steps = core.fetch(x, x.whole)
            counts = MIB, 3, 0, MIB
            ranges = [take(*one) for one in zip(next(steps).streams, counts)]
            steps.throw(ts.ConnectionLost(""))  # The client pauses.
            ranges += [take(steps.send(True), MIB - 3), take(steps.send(None), MIB)]
            with self.assertRaises(StopIteration) as caught:
                steps.send(None)
        self.assertEqual(ranges[:4], [(begin, MIB) for begin in range(0, len(data), MIB)])
        self.assertEqual(ranges[4:], [(MIB + 3, MIB - 3), (2 * MIB, MIB)])
        self.assertEqual(caught.exception.value.tobytes(), data)


if __name__ == "__main__":
    python_outsider.main("__main__")
