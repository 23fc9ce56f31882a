#!/usr/bin/env python3
"""Transfers of the Python client: resumed after a broken connection, without a copy of the whole.

usage: python_transfers_test.py --server build/bin/tessera-server [unittest arguments]
"""

import asyncio
import io
import os
import resource
import socket
import tempfile
import threading
import unittest
from unittest import mock

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from tessera import _progress, _shared, _wire

MIB = 1 << 20


class Proxy:
    """A TCP relay that breaks its connections once, after so many bytes in one direction."""

    def __init__(self, address, upstream=0, downstream=0):
        host, port = address.split(":")
        self.target = host, int(port)
        self.left = {"up": upstream, "down": downstream}
        self.breaks = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            for way, a, b in (("up", near, far), ("down", far, near)):
                threading.Thread(target=self._relay, args=(way, a, b), daemon=True).start()

    def _relay(self, way, a, b):
        try:
            while data := a.recv(65536):
                if self.left[way]:
                    self.left[way] -= len(data)
                    if self.left[way] <= 0:
                        self.left[way] = 0
                        self.breaks += 1
                        break
                b.sendall(data)
        except OSError:
            pass
        for end in (a, b):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class TransfersTest(python_outsider.Case):
    def setUp(self):
        self.data = np.random.default_rng(3).integers(0, 1 << 30, 6 * MIB, "i8")  # 48 MiB

    def through_a_break(self, **where):
        proxy = Proxy(self.server.address, **where)
        self.addCleanup(proxy.close)
        t = ts.connect(proxy.address)
        self.addCleanup(t.close)
        return proxy, t

    def test_an_upload_resumes(self):
        proxy, t = self.through_a_break(upstream=30 * MIB)
        begins = []
        perform = t._io.perform

        def watched(command):
            if isinstance(command, _wire.Upload):
                begins.append(command.sent)
            return perform(command)

        t._io.perform = watched
        sent = []
        x = t.put(self.data, "resumed", progress=lambda done, total: sent.append(done))
        self.assertEqual(proxy.breaks, 1)
        self.assertEqual(sent[-1], self.data.nbytes)
        # It went on where the server's bytes ended. That may be beyond what the client was told of
        # before the break, so the progress need not show it.
        self.assertEqual(begins[0], 0)
        self.assertEqual(len(begins), 2)
        self.assertGreater(begins[1], 0)
        np.testing.assert_array_equal(self.t["resumed"].numpy(), self.data)
        self.assertEqual(x.version, self.t["resumed"].version)

    def test_a_download_resumes(self):
        x = self.t.put(self.data, "down", replace=True)
        proxy, t = self.through_a_break(downstream=30 * MIB)
        done = []
        got = t["down"].numpy(progress=lambda now, total: done.append(now))
        self.assertEqual(proxy.breaks, 1)
        self.assertEqual(done, sorted(done))
        np.testing.assert_array_equal(got, self.data)
        self.assertEqual(x.version, t["down"].version)

    def test_an_upload_that_fails_leaves_nothing(self):
        def fail(done, total):
            raise RuntimeError("enough")

        with self.assertRaisesRegex(RuntimeError, "enough"):
            self.t.put(self.data, "failed", progress=fail)
        self.assertNotIn("failed", self.t)
        self.t.put(self.data, "failed")

    def test_memory_stays_at_the_array(self):
        big = np.zeros(256 * MIB, np.uint8).view("f4")
        big[:] = 1
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        x = self.t.put(big)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.assertLess(after - before, 96 * MIB)
        got = x.numpy()
        whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.assertLess(whole - after, got.nbytes + 96 * MIB)
        self.assertEqual(float(got[-1]), 1)

    def test_into_an_array_that_is_there(self):
        x = self.t.put(self.data, "into", replace=True)
        out = np.empty_like(self.data)
        self.assertIs(x.numpy(out=out), out)
        np.testing.assert_array_equal(out, self.data)
        for view in (slice(5, 900), slice(None, None, -1), slice(None, None, 100), slice(7, 7)):
            part = np.zeros_like(self.data[view])
            self.assertIs(x[view].numpy(out=part), part)
            np.testing.assert_array_equal(part, self.data[view])
        for wrong in (out[1:], out.astype("i4"), out.reshape(1, -1)):
            self.assertRaises(ts.BadShape, x.numpy, out=wrong)
        fixed = np.empty_like(self.data)
        fixed.flags.writeable = False
        for wrong in (fixed, np.empty((len(out), 2), "i8")[:, 0]):
            self.assertRaisesRegex(ValueError, "row-major", x.numpy, out=wrong)
        self.assertRaises(TypeError, x.numpy, out=[0])

    def test_a_window_fetches_its_range_alone(self):
        x = self.t.put(self.data, "window", replace=True)
        fetched = []
        perform = self.t._io.perform
        self.t._io.perform = lambda command: fetched.append(command) or perform(command)
        try:
            np.testing.assert_array_equal(x[100:200].numpy(), self.data[100:200])
            self.assertEqual([command.size for command in fetched], [800])
            fetched.clear()
            np.testing.assert_array_equal(x[::100].numpy(), self.data[::100])
            *_, gathered, download = fetched  # The first such call asks for the server's limits.
            self.assertEqual(gathered.method, "CopyBuffer")
            self.assertEqual(download.size, self.data[::100].nbytes)
        finally:
            del self.t._io.perform


class SharedTest(unittest.TestCase):
    """Through memory that the server shares."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.socket_path = f"{folder.name}/socket"
        self.server = o.Server(folder.name, "--no-warm-up", "--shared-memory", self.socket_path)
        self.addCleanup(self.server.kill)
        self.t = ts.connect(self.server.address)
        self.addCleanup(self.t.close)
        self.data = np.random.default_rng(4).integers(0, 1 << 30, 5 * MIB, "i4")  # two parts
        self.long = np.concatenate([self.data, self.data])  # three parts
        self.performed = []
        perform = self.t._io.perform
        self.t._io.perform = lambda command: self.performed.append(command) or perform(command)

    def kinds(self):
        """The transfers since the last call, by class."""
        transfers = _shared.Transfer, _wire.Upload, _wire.Download
        found = [type(c).__name__ for c in self.performed if isinstance(c, transfers)]
        self.performed.clear()
        return found

    def test_large_arrays_go_through_it(self):
        told = []
        x = self.t.put(self.data, "x", progress=lambda done, total: told.append((done, total)))
        self.assertEqual(self.kinds(), ["SharedUpload"])
        size = self.data.nbytes
        self.assertEqual(told, [(16 * MIB, size), (size, size)])
        np.testing.assert_array_equal(x.numpy(), self.data)
        np.testing.assert_array_equal(x[5:-7].numpy(), self.data[5:-7])
        np.testing.assert_array_equal(x.numpy(out=np.empty_like(self.data)), self.data)
        self.assertEqual(self.kinds(), ["SharedDownload"] * 3)
        self.t.put(self.data[:100])
        self.assertEqual(self.kinds(), ["Upload"])

    def test_arrays_beyond_an_answer_go_through_it(self):
        x = self.t.put(self.data)
        np.testing.assert_array_equal((x + 1).numpy(), self.data + 1)
        self.assertEqual(self.kinds(), ["SharedUpload", "SharedDownload"])

    def test_threads_share_it(self):
        def work(i):
            for _ in range(2):
                x = self.t.put(self.data + i)
                np.testing.assert_array_equal(x.numpy(), self.data + i)

        o.in_threads(3, work)
        self.assertTrue(self.t._core.pool.region())
        self.assertEqual(sorted(self.t._core.pool.region()._free), [0, 1, 2, 3])

    def test_a_region_that_is_lost_under_way(self):
        """Streams do the rest; the region, which the server may write to, is not used again."""
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

    def test_a_server_that_dies_under_way(self):
        with ts.connect(self.server.address, connect_timeout=2, stall_timeout=5) as t:
            x = t.put(self.long)
            with self.assertRaises(ts.ConnectionLost):
                x.numpy(progress=lambda done, total: self.server.process.kill())
            with self.assertRaises(ts.ConnectionLost):
                t.put(self.long)

    def test_what_is_wrong_is_said(self):
        x = self.t.put(self.data, "x")
        self.t.delete("x")
        with self.assertRaisesRegex(ts.BufferNotFound, "gone"):
            x.numpy()
        with self.assertRaisesRegex(RuntimeError, "enough"):
            self.t.put(self.data, "y", progress=self.fail_)
        self.assertNotIn("y", self.t)

    @staticmethod
    def fail_(done, total):
        raise RuntimeError("enough")

    def test_without(self):
        with ts.connect(self.server.address, shared_memory=False) as t:
            np.testing.assert_array_equal(t.put(self.data).numpy(), self.data)
            self.assertIsNone(t._core.pool.region())
        os.unlink(self.socket_path)
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
    """The same to and from arrays on several devices."""

    def setUp(self):
        with mock.patch.object(o.Program, "device", "cpu:0,cpu:1,cpu:2"):
            super().setUp()
        put = self.t.put
        self.t.put = lambda *args, **more: put(*args, placement=["cpu:2", "cpu:0"], **more)

    def test_placement(self):
        x = self.t.put(self.long)
        self.assertEqual(x.devices, ("cpu:2", "cpu:0"))
        self.assertEqual(self.kinds(), ["SharedUpload"])
        np.testing.assert_array_equal(x.numpy(), self.long)


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
        self.assertEqual(len(lines), 2)  # Nothing in the first second.
        self.assertIn(f"put x [{15 * '#'}{15 * '.'}] 2 of 4 MB, 1 MB/s", lines[0])
        self.assertTrue(lines[1].endswith("4 of 4 MB, 1 MB/s\n"))
        with mock.patch("sys.stderr", io.StringIO()):
            self.assertIsNone(_progress.reporter(True, 1, ""))


class WireTest(unittest.TestCase):
    def test_messages_by_hand_are_those_of_protobuf(self):
        from tessera import _protocol as p

        data = memoryview(os.urandom(3 * MIB + 5))
        messages = list(_wire.Upload("x", data, MIB, 7, None, None))
        parsed = [p.UploadRequest.FromString(message) for message in messages]
        self.assertEqual((parsed[0].name, parsed[0].version, parsed[0].offset), ("x", 7, MIB))
        self.assertEqual(b"".join(m.data for m in parsed), bytes(data[MIB:]))
        response = p.METHODS["Download"].response
        message = response(offset=1 << 40, data=b"abc", crc32c=9, buffer=p.Buffer(name="n"))
        offset, found = _wire.data_of(message.SerializeToString())
        self.assertEqual((offset, bytes(found)), (1 << 40, b"abc"))


if __name__ == "__main__":
    python_outsider.main("__main__")
