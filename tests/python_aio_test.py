#!/usr/bin/env python3
"""The asyncio twin of the Python client: the same answers and errors, awaited.

usage: python_aio_test.py --server build/bin/tessera-server [unittest arguments]
"""

import asyncio
import inspect
import pathlib
import pickle
import tempfile
import unittest

import numpy as np

import outsider as o
import python_outsider
import tessera as ts

BOUND_S = 30


class AioTest(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        asyncio.get_running_loop().slow_callback_duration = 10  # Starting a server blocks.
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.server = o.Server(folder.name, *python_outsider.PATIENT)
        self.addCleanup(self.server.kill)
        self.t = await ts.aio.connect(
            self.server.address, timeout=20, connect_timeout=2, stall_timeout=8
        )
        self.addAsyncCleanup(self.t.close)
        self.a = np.random.default_rng(5).standard_normal((20, 30)).astype("f4")

    async def bounded(self, work):
        return await asyncio.wait_for(work, BOUND_S)

    async def test_the_same_as_the_blocking_client(self):
        a = self.a
        x = await self.t.put(a, "x")
        np.testing.assert_array_equal(await x[::2, ::-1].numpy(), a[::2, ::-1])
        e = (x @ x.T - x[:, 0]).sum(axis=1)
        np.testing.assert_allclose(await e.numpy(), (a @ a.T - a[:, 0]).sum(axis=1), rtol=1e-3)
        self.assertEqual(e.stats[0].operation, "matmul")
        z = await (2 * x).save("z")
        np.testing.assert_allclose(await (await self.t.get("z")).numpy(), 2 * a)
        self.assertEqual([array.name for array in await self.t.list()], ["x", "z"])
        self.assertAlmostEqual(await x[0].dot(x[1]).item(), float(a[0] @ a[1]), 4)
        half = z.astype("f16")
        self.assertEqual((await half.numpy()).dtype, np.float16)
        first, second = await self.t.compute(x.sum(), x.max(axis=0))
        np.testing.assert_allclose(second, a.max(axis=0))
        self.assertAlmostEqual(float(first), float(a.sum()), 3)
        values, indices = await self.t.compute(*ts.topk(x, 2))
        np.testing.assert_array_equal(indices, np.argsort(-a, axis=1, kind="stable")[:, :2])
        np.testing.assert_array_equal(await x.topk(2)[0].numpy(), values)
        async with self.t.scope() as s:
            await s.put(a, "scoped")
        with self.assertRaises(ts.BufferNotFound):
            await self.t.get("scoped")
        self.assertTrue((await self.t.info()).devices)

    async def test_large_arrays(self):
        big = np.arange(8 << 20, dtype="f4")
        x = await self.t.put(big)
        np.testing.assert_array_equal(await x.numpy(), big)
        np.testing.assert_array_equal(await (x + x).numpy(), big + big)

    async def test_64_callers(self):
        x = await self.t.put(self.a)

        async def caller(i):
            for _ in range(20):
                got = await (x[i % 20] + i).sum().item()
                np.testing.assert_allclose(got, (self.a[i % 20] + i).sum(), rtol=1e-3)

        await self.bounded(asyncio.gather(*(caller(i) for i in range(64))))

    async def test_a_cancelled_task(self):
        x = await self.t.put(np.ones((1100, 1100), "f4"))
        running = asyncio.ensure_future((x @ x).with_(strategy="cpu_naive").numpy())
        await asyncio.sleep(0.2)
        running.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await self.bounded(running)
        self.assertEqual(await self.bounded(x[0].dot(x[0]).item()), 1100)

    async def test_a_cancelled_upload(self):
        """Nothing of it stays."""
        begun = asyncio.Event()
        data = np.zeros(16 << 20, "f4")
        running = asyncio.ensure_future(
            self.t.put(data, "half", progress=lambda done, total: begun.set())
        )
        await self.bounded(begun.wait())
        running.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await self.bounded(running)
        await self.t.info()

        async def gone():
            while (await self.t.call("ListBuffers", prefix="half")).buffers:
                await asyncio.sleep(0.05)

        await self.bounded(gone())
        await self.t.put(self.a, "half")

    async def test_refusals(self):
        x = await self.t.put(self.a)
        for attempt in (lambda: bool(x), lambda: float(x[0, 0]), lambda: np.asarray(x)):
            with self.assertRaises(TypeError):
                attempt()
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


if __name__ == "__main__":
    python_outsider.main("__main__")
