#!/usr/bin/env python3
"""Tests the asyncio version of the Python client: the same results and errors, awaited."""

import asyncio
import gc
import inspect
import itertools
import pickle
import threading
import unittest
from unittest import mock

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from callers import line_of
from tessera import _async, _core


class AioTest(o.Case, unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = cls.serve_class("--no-warm-up", *python_outsider.PATIENT)

    async def asyncSetUp(self):
        self.t = await ts.aio.connect(self.server.address)
        self.addAsyncCleanup(self.t.close)
        for array in await self.t.list():
            await array.delete()
        self.a = np.random.default_rng(5).standard_normal((20, 30)).astype("f4")

    async def until(self, condition):
        """Returns when the condition's value, awaited if necessary, is true."""
        while not (await found if inspect.isawaitable(found := condition()) else found):
            await asyncio.sleep(0.01)

    async def test_the_same_as_the_blocking_client(self):
        a = self.a
        x = await self.t.put(a, "x")
        np.testing.assert_array_equal(await x[::2, ::-1].numpy(), a[::2, ::-1])
        e = (x @ x.T - x[:, 0]).sum(axis=1)
        np.testing.assert_allclose(await e.numpy(), (a @ a.T - a[:, 0]).sum(axis=1), rtol=1e-3)
        self.assertEqual(e.stats[0].operation, "matmul")
        await (2 * x).save("z")
        np.testing.assert_allclose(await (await self.t.get("z")).numpy(), 2 * a)
        self.assertEqual([array.name for array in await self.t.list()], ["x", "z"])
        self.assertAlmostEqual(await x[0].dot(x[1]).item(), float(a[0] @ a[1]), 4)
        _, indices = await self.t.compute(*ts.topk(x, 2))
        np.testing.assert_array_equal(indices, np.argsort(-a, axis=1, kind="stable")[:, :2])
        async with self.t.scope() as s:
            await s.put(a, "scoped")
        with self.assertRaises(ts.BufferNotFound):
            await self.t.get("scoped")
        self.assertTrue((await self.t.info()).devices)

    async def test_the_same_names_as_the_blocking_client(self):
        self.assertEqual({*ts.aio.__all__}, {*ts.__all__} - {"Ring", "aio"})
        self.assertEqual(sorted(dir(ts.aio)), sorted(ts.aio.__all__))
        for name in {*ts.aio.__all__} - {"Array", "Client", "Expr", "Scope", "connect"}:
            self.assertIs(getattr(ts.aio, name), getattr(ts, name))

    async def test_a_cancelled_task(self):
        x = await self.t.put(np.ones((2000, 2000), "f4"))
        running = asyncio.ensure_future((x @ x).with_(strategy="cpu_naive").numpy())
        busy = self.server.cpu_seconds() + 0.1
        await self.until(lambda: self.server.cpu_seconds() > busy)
        running.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await running
        self.assertEqual(await x[0].dot(x[0]).item(), 2000)

    async def test_a_cancelled_upload(self):
        """The upload leaves nothing behind."""
        begun = asyncio.Event()
        data = np.zeros(16 << 20, "f4")
        running = asyncio.ensure_future(
            self.t.put(data, "half", progress=lambda done, total: begun.set()))
        await begun.wait()
        running.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await running
        await self.t.info()
        await self.until(lambda: self.holds([]))
        await self.t.put(self.a, "half")

    async def test_a_put_that_is_cancelled_while_its_buffer_is_made(self):
        """The buffer is deleted as soon as the server has made it. The name can be used again
        immediately, and close() waits for the deletion."""
        for size, name, again in itertools.product((2 << 20, 9), ("made", None), (True, False)):
            data = np.zeros(size)
            async with await ts.aio.connect(self.server.address) as t:
                made, waited_for, perform = asyncio.Event(), asyncio.Event(), t._io.perform

                def slow(call, made=made, waited_for=waited_for):
                    async def called(*args):
                        answer = await call(*args)
                        if hasattr(answer, "buffer") and not made.is_set():
                            made.set()
                            await waited_for.wait()
                        return answer

                    return called

                async def watched(command, perform=perform, waited_for=waited_for):
                    if isinstance(command, _core.Pause):
                        waited_for.set()
                    return await perform(command)

                t._io.call, t._io._upload = slow(t._io.call), slow(t._io._upload)
                t._io.perform = watched
                running = asyncio.ensure_future(t.put(data, name))
                await made.wait()
                running.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await running
                if again:
                    x = await t.put(data, name)
                    waited_for.set()
                    await self.until(lambda x=x: self.holds([(x.name, x.version)]))
                    if name:
                        await x.delete()
            self.assertTrue(await self.holds([]))

    async def holds(self, buffers):
        """Checks that the server has exactly these buffers."""
        found = (await self.t.call("ListBuffers")).buffers
        return [(b.name, b.version) for b in found] == buffers

    async def test_a_client_that_is_closed_in_the_middle_of_a_put(self):
        for name in ("closed", None):
            t, begun = await ts.aio.connect(self.server.address), asyncio.Event()
            running = asyncio.ensure_future(
                t.put(np.zeros(6 << 20), name, progress=lambda *_: begun.set()))
            await begun.wait()
            await t.close()
            with self.assertRaisesRegex(ts.Error, "closed"):
                await running
            self.assertTrue(await self.holds([]))

    async def test_streams_that_fail_when_their_tasks_are_cancelled(self):
        """A failure is not reported if no task waits for it."""
        said = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: said.append(what))
        x = await self.t.put(np.zeros(600_000))

        async def fail(_=None):
            running.cancel()
            raise ValueError("unheard")

        def failing(make):
            """Returns the call of a stream whose task is cancelled just when it fails."""

            def begin(*args, **options):
                call = make(*args, **options)
                call.read = fail
                return call

            return begin

        calls = self.t._io.calls
        with mock.patch.dict(calls, Download=failing(calls["Download"])):
            running = asyncio.ensure_future(x.numpy())
            with self.assertRaises(asyncio.CancelledError):
                await running
        with mock.patch.object(_async, "_answer", fail):
            running = asyncio.ensure_future(self.t.put(self.a))
            with self.assertRaises(asyncio.CancelledError):
                await running
        await self.t.put(self.a, "taken")
        running = asyncio.ensure_future(self.t.put(self.a, "taken"))
        while not self.t._io._tasks:
            await asyncio.sleep(0)
        running.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await running
        await self.until(lambda: not self.t._io._tasks)
        del running
        await asyncio.sleep(0)
        gc.collect()
        self.assertEqual(said, [])

    async def test_an_abandoned_region_is_closed(self):
        made = []

        class Region:
            closed = False

            def close(self):
                self.closed = True

        def share(path, seconds):
            loop.call_soon_threadsafe(running.cancel)
            cancelled.wait()
            made.append(Region())
            return made[0]

        loop, cancelled = asyncio.get_running_loop(), threading.Event()
        with mock.patch.object(_async, "share", share):
            running = asyncio.ensure_future(self.t._io.perform(_core.Share("", 1)))
            with self.assertRaises(asyncio.CancelledError):
                await running
            cancelled.set()
            await self.until(lambda: made and made[0].closed)

    async def test_refusals(self):
        x = await self.t.put(self.a)
        for attempt in (lambda: bool(x), lambda: float(x[0, 0]), lambda: np.asarray(x)):
            with self.assertRaises(TypeError):
                attempt()
        for attempt in (lambda: x[x > 0], lambda: np.nonzero(x), lambda: x[0].compress(x[0] > 0)):
            with self.assertRaisesRegex(ts.Unsupported, "where"):
                attempt()
        np.testing.assert_array_equal(await x[self.a > 0].numpy(), self.a[self.a > 0])
        for attempt in (lambda: np.histogram(x), lambda: np.bincount(x[0].astype("i4")),
                        lambda: np.unique(x), lambda: np.digitize(x, x[0])):
            with self.assertRaisesRegex(ts.Unsupported, "ts.aio cannot wait"):
                attempt()
        counts, _ = np.histogram(x, 4, (-1, 1))
        np.testing.assert_array_equal(await counts.numpy(), np.histogram(self.a, 4, (-1, 1))[0])
        with self.assertRaises(TypeError):
            pickle.dumps(x)
        with self.assertRaises(ts.Unreachable):
            await ts.aio.connect("127.0.0.1:1", connect_timeout=0.3)

    async def test_the_twins_have_the_same_names(self):
        for name in ("Client", "Expr", "Array", "Scope"):
            mine, theirs = getattr(ts.aio, name), getattr(ts, name)
            def public(kind):
                return {n for n, _ in inspect.getmembers(kind) if not n.startswith("_")}

            self.assertEqual(public(theirs) ^ public(mine), {"get"} if name == "Client" else set())


class SnapshotTest(o.Case):
    def test_what_is_written_and_what_fails(self):
        """Both clients report what was written, and raise an error for each reason."""

        def blocking(address, name=None, **options):
            with ts.connect(address, **options) as t:
                if name is not None:
                    t.put(np.ones(1000, np.float32), name)
                return t.snapshot()

        def in_a_loop(address, name=None, **options):
            async def snapshot():
                async with await ts.aio.connect(address, **options) as t:
                    if name is not None:
                        await t.put(np.ones(1000, np.float32), name)
                    return await t.snapshot(timeout=600)

            return asyncio.run(snapshot())

        tokens = self.folder / "tokens"
        tokens.write_text("\n".join((line_of("w"), line_of("r", "read"))))
        server = self.serve("--no-warm-up", "--data-dir", self.folder / "data", "--tokens", tokens,
                            prefix=("prlimit", "--fsize=100000"))
        off = self.serve("--no-warm-up")
        for i, snapshot in enumerate((blocking, in_a_loop)):
            with self.subTest(snapshot.__name__):
                taken = snapshot(server.address, f"x{i}", token="w")
                self.assertEqual((taken.buffers, taken.written_arrays, taken.written_bytes),
                                 (i + 1, 1, 4000))
                self.assertRaises(ts.RoleTooSmall, snapshot, server.address, token="r")
                self.assertRaises(ts.SnapshotsOff, snapshot, off.address)
        with ts.connect(server.address, token="w") as t:
            t.put(np.zeros(100_000, np.float32), "large")
        for snapshot in (blocking, in_a_loop):
            with self.assertRaises(ts.SnapshotFailed) as caught:
                snapshot(server.address, token="w")
            self.assertEqual(caught.exception.details["cause"], "File too large")


if __name__ == "__main__":
    python_outsider.main("__main__")
