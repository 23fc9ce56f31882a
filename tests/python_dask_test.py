#!/usr/bin/env python3
"""Dask arrays on several servers, against NumPy: a cluster of four workers and four servers here.
Workers and servers that are killed, links that break. And names with homes.

usage: python_dask_test.py --server build/bin/tessera-server [unittest arguments]
"""

import concurrent.futures
import gc
import itertools
import logging
import os
import pickle
import signal
import sys
import tempfile
import unittest
import warnings

import grpc
import numpy as np

import outsider as o
import python_outsider

try:
    import dask
    import dask.array as da
    import distributed
except ImportError:
    print("python3-dask and python3-distributed are missing")
    sys.exit(1)

import tessera as ts
import tessera.dask as td
from home import home_of
from relay import Relay
from tessera.dask import _servers, _tree

RNG = np.random.default_rng(20261125)
FLAGS = ("--import-from", "127.0.0.1:*", "--no-warm-up", "--workers", "2")


def close_to(found, expected, dtype=np.float32):
    np.testing.assert_allclose(found, expected, rtol=200 * np.finfo(dtype).eps, atol=1e-6)


def servers_of(test, count):
    """Servers, which end with a test or with a class."""
    clean_up = test.addClassCleanup if isinstance(test, type) else test.addCleanup
    folder = tempfile.TemporaryDirectory()
    clean_up(folder.cleanup)
    servers = []
    for _ in range(count):
        servers.append(o.Server(folder.name, *FLAGS))
        clean_up(servers[-1].kill)
    return servers


def whole_numbers(*shape):
    """Floats whose sums are exact."""
    return RNG.integers(-50, 50, shape).astype(np.float32)


def used(server):
    with ts.connect(server.address) as client:
        return sum(device.buffer_used_bytes for device in client.info().devices)


def tell_own_server():
    """A call of a worker, with which it deletes what nobody refers to."""
    gc.collect()
    _servers.own().info()


class Rings(unittest.TestCase):
    """ts.Ring, and the route that calls carry."""

    def test_homes_are_those_of_the_servers(self):
        names = {"a": "h:1", "gpu-0.x": "h:2", "c_9": "h:3", "z": "h:4"}
        ring = ts.Ring(names)
        for i in range(500):
            name = f"run{i}/{'deep/' * (i % 3)}x{i}" if i % 7 else f"plain{i}"
            self.assertEqual(ring.server(name), home_of(names, name))

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ring")

            def written(text):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
                return ts.Ring(path)

            ring = written("# two\n b\thost-b:2 # second\r\n\na host-a:1")
            self.assertEqual(ring.servers, {"a": "host-a:1", "b": "host-b:2"})
            for text, complaint in (
                ("a", "line 1"), ("a b c", "line 1"), ("a h:1\n\na h:2", "line 3"),
                ("a/b h:1", "line 1"), ("", "at least one"),
            ):  # fmt: skip
                with self.assertRaisesRegex(ValueError, complaint):
                    written(text)

    def test_servers_with_one_ring(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ring")
            with open(path, "w", encoding="utf-8") as file:
                file.write("a h:1\nb h:2\n")
            servers = {
                name: o.Server(folder, *FLAGS, "--ring", path, "--ring-name", name) for name in "ab"
            }
            for server in servers.values():
                self.addCleanup(server.kill)
            with ts.Ring({name: one.address for name, one in servers.items()}) as ring:
                x = np.arange(6, dtype=np.float32)
                seen = set()
                for i in range(8):
                    t = ring.home(f"run{i}/x")
                    a = t.put(x, name=f"run{i}/x")
                    self.assertEqual((a * 2 + t.put(x)).sum().item(), 45.0)  # unnamed ones as well
                    seen.add(ring.server(f"run{i}/y"))
                    other = ring.home(next(n for n in map("o{}".format, range(99))
                                           if ring.server(n) != ring.server(f"run{i}/x")))  # fmt: skip
                    with self.assertRaises(ts.WrongHost) as error:
                        other[f"run{i}/x"]
                    self.assertEqual(error.exception.details["owner"], ring.server(f"run{i}/x"))
                self.assertEqual(seen, {"a", "b"})

    def test_route(self):
        seen = []

        class Deaf(grpc.GenericRpcHandler):
            def service(self, details):
                seen.append(dict(details.invocation_metadata).get("tessera-route"))

        wire = grpc.server(concurrent.futures.ThreadPoolExecutor(2), handlers=[Deaf()])
        port = wire.add_insecure_port("127.0.0.1:0")
        wire.start()
        self.addCleanup(wire.stop, None)
        for options, expected in ((dict(route="run7/a/x"), "run7/a"), (dict(), None)):
            with ts.connect(f"127.0.0.1:{port}", **options) as t:
                with self.assertRaises(ts.Error):
                    t["run7/a/x"]
                with self.assertRaises(ts.Error):
                    t.put(np.ones(3), name="run7/a/y")
            self.assertEqual(set(seen), {expected})
            seen.clear()


class Local(unittest.TestCase):
    """Two servers, the first one of which is that of this process."""

    @classmethod
    def setUpClass(cls):
        cls.servers = servers_of(cls, 2)
        td.use(cls.servers[0].address)


class OneProcess(Local):
    """Chunks without a cluster: what NumPy's functions give, and how chunks travel."""

    def chunk(self, array):
        return td.Chunk(_servers.own().put(array), _servers.own_address())

    def test_operations_of_a_chunk(self):
        x = RNG.normal(size=(60, 50)).astype(np.float32)
        y = RNG.normal(size=(50, 40)).astype(np.float32)
        a, b = self.chunk(x), self.chunk(y)
        for found, expected in (
            (a @ b, x @ y), (a + a, x + x), (np.exp(a), np.exp(x)), (a[3:9, ::-2], x[3:9, ::-2]),
            (a.T, x.T), (a[..., None, :], x[..., None, :]), (a.reshape(-1), x.reshape(-1)),
            (a.sum(axis=0), x.sum(axis=0)), (np.max(a, axis=1, keepdims=True),
            np.max(x, axis=1, keepdims=True)), (np.tensordot(a, b, ((1,), (0,))), x @ y),
            (a * 2 - 1, x * 2 - 1), (np.where(a > 0, a, 0), np.where(x > 0, x, 0)),
        ):  # fmt: skip
            self.assertEqual(found.shape, expected.shape)
            self.assertEqual(found.dtype, expected.dtype)
            close_to(found if isinstance(found, np.ndarray) else found.numpy(), expected)
        self.assertEqual(np.argmax(a), np.argmax(x))
        self.assertIsInstance(a @ b, td.Chunk)
        self.assertIsInstance(a.sum(axis=0), np.ndarray)  # small: it comes home
        with self.assertRaises(TypeError):
            np.asarray(memoryview(a))
        with self.assertRaisesRegex(TypeError, "no silent download"):
            a.__array__()

    def test_empty_chunks_need_no_server(self):
        empty = td.Chunk(np.empty((0, 0), np.float32))
        for made, shape, dtype in (
            (empty[0:0], (0, 0), np.float32), (empty.astype(np.float64), (0, 0), np.float64),
            (empty.reshape((0,)), (0,), np.float32), (empty @ empty, (0, 0), np.float32),
            (empty + 1, (0, 0), np.float32), (np.sum(empty, axis=(0,), keepdims=True), (1, 0),
            np.float32), (empty.T, (0, 0), np.float32), (np.exp(empty), (0, 0), np.float32),
        ):  # fmt: skip
            self.assertIsInstance(made, td.Chunk)
            self.assertEqual((made.shape, made.dtype), (shape, dtype))
        self.assertEqual(dask.sizeof.sizeof(empty), 256)

    def test_size_and_token(self):
        a = self.chunk(np.ones((1000, 100), np.float32))
        self.assertEqual(dask.sizeof.sizeof(a), 400_000 + 256)
        self.assertEqual(dask.base.tokenize(a), dask.base.tokenize(a[:]))
        b = self.chunk(np.ones((1000, 100), np.float32))
        tokens = {dask.base.tokenize(one) for one in (a, b, a[1:], a.T)}
        self.assertEqual(len(tokens), 4)

    def test_handles_travel(self):
        x = whole_numbers(1000, 300)
        a = self.chunk(x)
        before = used(self.servers[0])
        sent = pickle.dumps(a)
        self.assertLess(len(sent), 500)
        self.assertEqual(used(self.servers[0]), before, "a handle takes memory")
        del a  # the handle keeps the array
        again = pickle.loads(sent)
        np.testing.assert_array_equal(again.numpy(), x)
        third = pickle.loads(sent)  # more than once
        part = pickle.dumps(third[10:20, ::2])
        self.assertLess(len(part), 500)
        # On another server: it fetches the array from this one.
        td.use(self.servers[1].address)
        try:
            there = pickle.loads(part)
            np.testing.assert_array_equal(there.numpy(), x[10:20, ::2])
            self.assertEqual(there.array._session._core.options.target, self.servers[1].address)
            self.assertEqual(used(self.servers[1]) > 0, True)
            whole = pickle.loads(sent)
            np.testing.assert_array_equal((whole * 2).sum(axis=0), (x * 2).sum(axis=0))
            del there, whole
            self.assertTrue(
                o.eventually(lambda: _servers.own().info() and not used(self.servers[1]), 20)
            )
        finally:
            td.use(self.servers[0].address)

    def test_joined_chunks(self):
        x = [whole_numbers(700, 500) for _ in range(3)]
        joined = np.concatenate([self.chunk(one) for one in x], axis=0)
        whole = np.concatenate(x, axis=0)
        self.assertIsInstance(joined, td.Joined)
        self.assertEqual((joined.shape, joined.dtype), (whole.shape, whole.dtype))
        np.testing.assert_array_equal(joined.numpy(), whole)
        np.testing.assert_array_equal(joined.sum(axis=0), whole.sum(axis=0))
        np.testing.assert_array_equal(joined.max(axis=(0, 1)), whole.max())
        np.testing.assert_array_equal(joined.sum(axis=1), whole.sum(axis=1))
        np.testing.assert_array_equal((joined + 1)[5:9].numpy(), whole[5:9] + 1)
        for name, found, expected in (
            ("reshape", joined.reshape(-1, 250), whole.reshape(-1, 250)),
            ("ravel", joined.ravel(), whole.ravel()), ("transpose", joined.T, whole.T),
            ("squeeze", joined[:1].squeeze(0), whole[0]),
        ):  # fmt: skip
            with self.subTest(name):
                np.testing.assert_array_equal(found.numpy(), expected)

    def test_a_chunk_and_one_in_parts(self):
        """Whichever comes first, also among the options."""
        x, y = whole_numbers(90, 40), whole_numbers(90, 40)
        a, b = self.chunk(x), np.concatenate([self.chunk(y[:50]), self.chunk(y[50:])], axis=0)
        self.assertIsInstance(b, td.Joined)
        for name, found, expected in (
            ("ufunc", a - b, x - y), ("the other way", b - a, y - x), ("comparison", a < b, x < y),
            ("matmul", a @ b.T, x @ y.T), ("where", np.where(a > 0, b, a), np.where(x > 0, y, x)),
            ("clip", np.clip(a, b, b + 1), np.clip(x, y, y + 1)),
            ("an option", np.clip(a, a_min=b, a_max=b + 1), np.clip(x, y, y + 1)),
            ("maximum", np.maximum(a, b), np.maximum(x, y)),
        ):  # fmt: skip
            with self.subTest(name):
                np.testing.assert_array_equal(found.numpy(), expected)

    def test_rechunked_arrays(self):
        x = whole_numbers(40, 30)
        v = td.put(da.from_array(x, chunks=(15, 11)))
        r = v.rechunk((20, 10))
        u = td.put(da.from_array(np.full(9, 200, "u1"), chunks=4))
        for name, found, expected in (
            ("reshape", v.reshape(-1), x.reshape(-1)), ("ravel", v.ravel(), x.ravel()),
            ("more axes", v.reshape(4, 10, 30), x.reshape(4, 10, 30)),
            ("expand_dims", da.expand_dims(r, 0), x[None]), ("add", r * 2 + r, x * 2 + x),
            ("matmul", (r * 2) @ v.T.rechunk((10, 20)), x * 2 @ x.T),
            ("where", da.where(r > 0, r, 0), np.where(x > 0, x, 0)),
            ("clip", da.clip(r * 2, r, r + 1), np.clip(x * 2, x, x + 1)),
            ("sum of bytes", u.sum(), np.full(9, 200, "u1").sum()),
            ("product of bytes", u.prod(), np.full(9, 200, "u1").prod()),
        ):  # fmt: skip
            with self.subTest(name):
                got = td.numpy(found).compute(scheduler="sync")
                np.testing.assert_array_equal(got, expected)
                self.assertEqual(got.dtype, expected.dtype)


def random_chunks(n):
    """Of up to 7 blocks, some of them perhaps empty."""
    cuts = sorted(RNG.integers(0, n + 1, RNG.integers(0, 7)))
    return tuple(int(end - begin) for begin, end in zip([0, *cuts], [*cuts, n]))


class SameBits(Local):
    """tessera.dask.sum and its like: the bits of one buffer, whatever the chunks."""

    def same(self, *pairs):
        """Of a lazy array of Dask and an expression of one buffer each."""
        computed = dask.compute(*(found for found, _ in pairs), scheduler="threads")
        for (found, expression), got in zip(pairs, computed):
            expected = expression.numpy()
            self.assertIsInstance(found, da.Array)
            self.assertEqual((found.shape, found.dtype), (expected.shape, expected.dtype))
            self.assertIsInstance(got, np.ndarray if expected.shape else np.generic)
            self.assertEqual(got.dtype, expected.dtype)
            self.assertEqual(np.asarray(got).tobytes(), np.asarray(expected).tobytes())
        return computed

    def test_whole_arrays(self):
        for shape in ((300_000,), (70_001,), (401, 300), (1, 1, 90_000), (50, 60, 70), (3,), (1, 1), ()):
            for dtype in ("f4", "f8", "f2", "i4", "i8"):
                x = RNG.normal(scale=0.3 if dtype[0] == "f" else 900, size=shape).astype(dtype)
                axis = next((i for i, extent in enumerate(shape) if extent != 1), 0)
                chunks = tuple(
                    random_chunks(extent) if i == axis else (extent,) for i, extent in enumerate(shape)
                )
                a, b = td.put(da.from_array(x, chunks=chunks)), _servers.own().put(x)
                with self.subTest(shape=shape, dtype=dtype, chunks=chunks):
                    pairs = [
                        (td.sum(a), b.sum()), (td.prod(a), b.prod()), (td.mean(a), b.mean()),
                        (td.var(a), b.var()), (td.var(a, ddof=1), b.var(ddof=1)),
                        (td.std(a, ddof=1.5), b.std(ddof=1.5)),
                    ]
                    if len(shape) == 1:
                        y = RNG.permutation(x)
                        c = td.put(da.from_array(y, chunks=chunks))
                        pairs.append((td.dot(a, c), b @ _servers.own().put(y)))
                    self.same(*pairs)

    def test_chunks_of_the_tree(self):
        """As tests/tree_test.cc has them."""
        for n, size, chunk in (
            (1, 4, 8192), (8192, 4, 8192), (8193, 4, 4096), (2**20, 4, 4096), (2**20 + 1, 4, 8192),
            (2**24, 4, 28 * 1024), (2**26, 4, 60 * 1024), (2**30, 4, 252 * 1024),
            (2**34, 4, 1020 * 1024), (2**20, 8, 4096), (2**20, 2, 8192),
        ):  # fmt: skip
            self.assertEqual(_tree._chunk_of(n, size), chunk, (n, size))

    def test_many_blocks_in_a_chunk_of_the_tree(self):
        x = RNG.normal(size=20_000).astype(np.float32)
        whole = _servers.own().put(x)
        for size in (7, 4096, 4097):
            a = td.put(da.from_array(x[: 40 * size], chunks=size))
            b = whole[: 40 * size]
            self.same((td.sum(a), b.sum()), (td.dot(a, a), b @ b))

    def test_bytes_and_truth_values(self):
        x = RNG.integers(0, 200, 30_000).astype(np.uint8)
        a = td.put(da.from_array(x, chunks=7001))
        for made, expected in (
            (td.sum(a), x.sum(dtype="i8")), (td.prod(a), x.prod(dtype="i8")), (td.mean(a), x.mean()),
            (td.sum(a > 9), (x > 9).sum()), (td.mean(a > 9), (x > 9).mean()), (td.dot(a > 9, a > 99), True),
        ):  # fmt: skip
            got = made.compute(scheduler="threads")
            self.assertEqual((got, got.dtype), (expected, np.asarray(expected).dtype))
        self.same((td.var(a), _servers.own().put(x).var()))

    def test_bf16(self):
        x = RNG.normal(size=50_000).astype(np.float32)
        whole = _servers.own().put(x, dtype="bf16")
        places = []
        for i, (begin, end) in enumerate(((0, 1000), (1000, 30_001), (30_001, 50_000))):
            _servers.own().put(x[begin:end], f"bf16/{i}", dtype="bf16", replace=True)
            places.append((self.servers[0].address, f"bf16/{i}"))
        a = td.from_buffers(places)
        self.same((td.sum(a), whole.sum()), (td.mean(a), whole.mean()),
                  (td.dot(a, a), whole @ whole), (td.std(a, ddof=1), whole.std(ddof=1)))

    def test_views_and_results(self):
        x = RNG.normal(size=(300, 200)).astype(np.float32)
        a, b = td.put(da.from_array(x, chunks=(90, 200))), _servers.own().put(x)
        rows = td.sum(a, axis=1)  # NumPy arrays of the workers
        sums = b.sum(axis=1).save().sum()
        self.same((td.sum(a[::-1, ::2]), b[::-1, ::2].sum()), (td.sum(rows), sums),
                  (td.sum(a.T.rechunk((70, 300))), b.T.sum()),
                  (td.sum(td.sum(td.put(x), axis=1)), sums))

    def test_sums_that_leave_the_range_on_their_way(self):
        x = np.repeat(np.float32([3e38, -3e38]), 30_000)
        x[-1] = 1
        for chunks in (60_000, 9999):
            a = td.put(da.from_array(x, chunks=chunks))
            b = _servers.own().put(x)
            self.assertTrue(np.isfinite(b.sum().item()))
            self.same((td.sum(a), b.sum()), (td.mean(a), b.mean()), (td.dot(a, a), b @ b))
        x[0] = np.nan
        self.same((td.sum(td.put(da.from_array(x, chunks=7000))), _servers.own().put(x).sum()))

    def test_no_elements(self):
        for shape in ((0,), (0, 5), (4, 0)):
            a, x = td.put(da.zeros(shape, dtype="f4")), np.zeros(shape, np.float32)
            b = _servers.own().put(x)
            self.same((td.sum(a), b.sum()), (td.prod(a), b.prod()), (td.mean(a), b.mean()),
                      (td.std(a), b.std()))
        zero = _servers.own().put([0.0]).sum()
        self.same((td.dot(td.put(da.zeros(0)), td.put(da.zeros(0))), zero))

    def test_axes(self):
        for shape, cut in (((90, 70, 50), 0), ((1, 300, 400), 1), ((5, 300_000), 0)):
            x = RNG.normal(size=shape).astype(np.float32)
            chunks = tuple(
                random_chunks(extent) if i == cut else (extent,) for i, extent in enumerate(shape)
            )
            a, b = td.put(da.from_array(x, chunks=chunks)), _servers.own().put(x)
            for axis in (-1, tuple(range(cut + 1, len(shape)))):
                with self.subTest(shape=shape, chunks=chunks, axis=axis):
                    self.same((td.sum(a, axis), b.sum(axis)), (td.mean(a, axis), b.mean(axis)),
                              (td.std(a, axis, ddof=1), b.std(axis, ddof=1)),
                              (td.std(a, axis, ddof=np.int64(1)), b.std(axis, ddof=1)),
                              (td.prod(a, axis), b.prod(axis)))
        # Results of more than a megabyte stay on the servers, as what smaller ones are.
        x = RNG.integers(0, 255, (300_000, 3), dtype=np.uint8)
        a, b = td.put(da.from_array(x, chunks=(150_000, 3))), _servers.own().put(x)
        self.same((td.numpy(td.sum(a, 1)), b.sum(1)), (td.sum(td.sum(a, 1)), b.sum(1).sum()))
        y = td.put(da.from_array(x.astype("f4"), chunks=(150_000, 3)))
        b = _servers.own().put(x.astype("f4"))
        self.same((td.numpy(td.std(y, 1, ddof=np.float64(1))), b.std(1, ddof=1)))
        # Rows without elements.
        a, b = td.put(da.zeros((4, 0), dtype="f4", chunks=(2, 0))), _servers.own().put(np.zeros((4, 0), "f4"))
        self.same(*((getattr(td, name)(a, 1), getattr(b, name)(1))
                    for name in ("sum", "prod", "mean", "var", "std")),
                  (td.var(a, 1, ddof=-1), b.var(1, ddof=-1)))

    def test_deviations_of_fewer_than_they_take(self):
        """They are infinite, or NaN where nothing deviates, as NumPy's."""
        for n, dtype in itertools.product((1, 4), ("f4", "i4")):
            x = np.arange(3 * n, dtype=dtype).reshape(3, n)
            x[0] = 5
            pairs, expected = [], []
            for array, axis in ((x, 1), (x, None), (np.full_like(x, 2), None)):
                a, b = td.put(da.from_array(array, chunks=(2, n))), _servers.own().put(array)
                count = n if axis else array.size
                ddofs = (count - 1, count - 0.5, count, count + 2)
                for name, ddof in itertools.product(("var", "std"), ddofs):
                    pairs.append((getattr(td, name)(a, axis, ddof=ddof),
                                  getattr(b, name)(axis, ddof=ddof)))
                    with warnings.catch_warnings(), np.errstate(all="ignore"):
                        warnings.simplefilter("ignore")
                        expected.append(getattr(np, name)(array, axis=axis, ddof=ddof))
            for got, want in zip(self.same(*pairs), expected):
                np.testing.assert_allclose(got, want, rtol=1e-5)

    def test_what_is_refused(self):
        x = td.put(da.ones((40, 30), chunks=(10, 15)))
        with self.assertRaisesRegex(ValueError, r"x\.rechunk\(\{1: -1\}\)"):
            td.sum(x)
        self.assertEqual(td.sum(x.rechunk({1: -1})).compute(scheduler="threads"), 1200)
        whole = x.rechunk({1: -1})
        for axis in (0, (0, 1), -2):
            with self.assertRaisesRegex(ValueError, r"x\.sum\(axis\)"):
                td.sum(whole, axis)
        with self.assertRaisesRegex(TypeError, "tessera.dask.put"):
            td.sum(da.ones(4))
        with self.assertRaisesRegex(ValueError, "not known"):
            td.sum(whole[whole[:, 0] > 0])
        with self.assertRaisesRegex(ValueError, "rechunk"):
            td.dot(x[:, 0], x[:, 1].rechunk(7))
        with self.assertRaisesRegex(ValueError, "shapes"):
            td.dot(whole, whole)


class Cluster(unittest.TestCase):
    """Four workers, each a process with a server beside it."""

    @classmethod
    def setUpClass(cls):
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        dask.config.set({"distributed.worker.memory.target": False,
                         "distributed.worker.memory.spill": False,
                         "distributed.worker.memory.pause": False,
                         "distributed.worker.memory.terminate": False,
                         "distributed.admin.tick.limit": "60s",
                         # A cluster gives up a worker that does not come back so soon, and the
                         # nanny that starts it again: on a busy machine that takes its time.
                         "distributed.deploy.lost-worker-timeout": "1h"})  # fmt: skip
        cls.servers = servers_of(cls, 4)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cluster = distributed.LocalCluster(
            n_workers=4, threads_per_worker=1, processes=True, dashboard_address=None,
            memory_limit=0, local_directory=folder.name,
            # For so long workers ask one that was killed for its chunks.
            config={"distributed.comm.timeouts.connect": "3s"},
        )  # fmt: skip
        cls.addClassCleanup(cluster.close)
        cls.client = distributed.Client(cluster)
        cls.addClassCleanup(cls.client.close)
        addresses = [server.address for server in cls.servers]
        cls.client.register_worker_plugin(td.Servers(addresses))

    def put(self, x, chunks):
        found = td.put(da.from_array(x, chunks=chunks)).persist()
        distributed.wait(found)
        return found

    def test_resident_arrays_are_no_part_of_a_graph_that_is_sent(self):
        x = np.arange(12.0)
        kept = self.put(x, 5)
        with self.assertRaisesRegex(ts.Unsupported, "from_buffers"):
            da.from_array(_servers.client_of(self.servers[0].address).put(x), chunks=5)
        np.testing.assert_array_equal(td.numpy(kept).compute(), x)

    def test_arrays(self):
        x = RNG.normal(size=(1200, 400)).astype(np.float32)
        y = RNG.normal(size=(400, 300)).astype(np.float32)
        a, b = self.put(x, (300, 200)), self.put(y, (200, 150))
        self.assertIsInstance(a._meta, td.Chunk)
        self.assertGreater(sum(used(server) > 0 for server in self.servers), 1)
        for name, found, expected in (
            ("sum", a.sum(), x.sum()), ("sum of an axis", a.sum(axis=0), x.sum(axis=0)),
            ("mean", a.mean(), x.mean()), ("mean of an axis", a.mean(axis=1), x.mean(axis=1)),
            ("var", a.var(), x.var()), ("var of an axis", a.var(axis=0), x.var(axis=0)),
            ("std", a.std(ddof=1), x.std(ddof=1)), ("min", a.min(axis=1), x.min(axis=1)),
            ("max", a.max(), x.max()), ("argmax", a.argmax(axis=1), x.argmax(axis=1)),
            ("argmin", a.argmin(axis=0), x.argmin(axis=0)), ("argmax of all", a.argmax(),
            x.argmax()), ("any", (a > 4).any(), (x > 4).any()),
        ):  # fmt: skip
            with self.subTest(name):
                self.assertEqual(found.shape, np.shape(expected))
                self.assertEqual(found.dtype, expected.dtype)
                got = found.compute()
                self.assertIsInstance(got, (np.ndarray, np.generic))
                np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-4)
        for name, found, expected in (
            ("matmul", a @ b, x @ y), ("dot", a.dot(b), x.dot(y)), ("vector", a @ b[:, 0], x @ y[:, 0]),
            ("tensordot", da.tensordot(a, b, ((1,), (0,))), np.tensordot(x, y, ((1,), (0,)))),
            ("both axes", da.tensordot(a, a, ((0, 1), (0, 1))), np.tensordot(x, x, 2)),
            ("slices", a[100:900:3, 50:250], x[100:900:3, 50:250]), ("reversed", a[::-1], x[::-1]),
            ("elementwise", da.exp(a * 0.5) - 1, np.exp(x * np.float32(0.5)) - 1),
            ("transposed", a.T, x.T), ("row", a[7], x[7]), ("sum of products",
            (a * a).sum(axis=0), (x * x).sum(axis=0)),
        ):  # fmt: skip
            with self.subTest(name):
                self.assertEqual(found.shape, expected.shape)
                got = td.numpy(found).compute()
                self.assertIsInstance(got, (np.ndarray, np.generic))
                np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)

    def test_same_bits(self):
        for dtype in (np.float32, np.float64, np.int32):
            x = RNG.normal(scale=99, size=(500, 700)).astype(dtype)
            with ts.connect(self.servers[0].address) as client:
                whole = client.put(x)
                expected = [one.numpy() for one in (whole.sum(), whole.mean(), whole.std(ddof=1))]
                rows = whole.sum(axis=1).numpy()
                vector = (whole.reshape(-1) @ whole.reshape(-1)[::-1].copy()).numpy()
            for chunks in ((500, 700), ((1, 3, 200, 0, 296), 700), (37, 700)):
                a = self.put(x, chunks)
                found = dask.compute(td.sum(a), td.mean(a), td.std(a, ddof=1))
                for got, want in zip(found, expected):
                    self.assertEqual((got.tobytes(), got.dtype), (want.tobytes(), want.dtype))
                np.testing.assert_array_equal(td.sum(a, axis=1).compute(), rows)
            flat, back = (self.put(one, 99_999) for one in (x.reshape(-1), x.reshape(-1)[::-1]))
            self.assertEqual(td.dot(flat, back).compute().tobytes(), vector.tobytes())

    def test_large_partial_results(self):
        """Chunks of products are above what comes home: they are added where they are."""
        x = RNG.integers(-4, 5, (640, 640)).astype(np.float64)
        a = self.put(x, (640, 160))  # four products of 640 x 640: 3.1 MiB each
        product = da.tensordot(a, self.put(x, (160, 640)), ((1,), (0,)))
        np.testing.assert_array_equal(td.numpy(product).compute(), x @ x)
        np.testing.assert_array_equal(td.numpy(a @ a.T).compute(), x @ x.T)

    def test_buffers_of_servers(self):
        parts = [RNG.normal(size=(100 + i, 30)).astype(np.float32) for i in range(4)]
        names = []
        for i, (server, part) in enumerate(zip(self.servers, parts)):
            with ts.connect(server.address) as client:
                client.put(part, name=f"shard/{i}", replace=True)
            names.append((server.address, f"shard/{i}"))
        x = np.concatenate(parts)
        array = td.from_buffers(names)
        self.assertEqual((array.shape, array.dtype), (x.shape, x.dtype))
        np.testing.assert_allclose(array.sum(axis=0).compute(), x.sum(axis=0), rtol=1e-3, atol=1e-4)
        for server, (_, name) in zip(self.servers, names):  # they are not Dask's to delete
            with ts.connect(server.address) as client:
                self.assertIn(name, client)
                client.delete(name)

    def test_memory_goes_with_the_array(self):
        def held():
            self.client.run(tell_own_server)
            return sum(map(used, self.servers))

        seen = []  # what other tests have left goes first

        def rests():
            seen.append(held())
            return len(seen) > 3 and len(set(seen[-4:])) == 1

        self.assertTrue(o.eventually(rests, 60, 0.1))
        before = seen[-1]
        x = np.ones((2000, 500), np.float32)
        a = self.put(x, (500, 500))
        self.assertGreaterEqual(held(), before + x.nbytes)
        self.assertEqual((a + 1).sum().compute(), 2 * x.size)
        del a
        self.assertTrue(o.eventually(lambda: held() <= before, 60))

    def test_worker_that_is_killed(self):
        x = RNG.normal(size=(800, 300)).astype(np.float32)
        a = self.put(x, (100, 300))
        victim = self.client.run(os.getpid)
        pid = sorted(victim.values())[0]
        future = self.client.compute((a @ a.T).sum())
        os.kill(pid, signal.SIGKILL)
        # Dask makes the lost chunks again, on a new worker with its server, or on others.
        np.testing.assert_allclose(future.result(timeout=120), (x @ x.T).sum(), rtol=1e-2)
        self.client.wait_for_workers(4, timeout=60)
        np.testing.assert_allclose(a.sum().compute(), x.sum(), rtol=1e-3, atol=1e-2)


class Faults(unittest.TestCase):
    """A server or a link that ends while an array moves."""

    def setUp(self):
        self.servers = servers_of(self, 2)

    def sent(self, x, address=None):
        """A handle from the first server, by which the second one is to fetch it."""
        td.use(self.servers[0].address)
        sent = pickle.dumps(td.Chunk(_servers.own().put(x), address or self.servers[0].address))
        td.use(self.servers[1].address)
        return sent

    def test_a_link_that_is_cut(self):
        x = RNG.normal(size=(2048, 1024)).astype(np.float32)  # 8 MiB
        # The first connection is that of this process, the next ones are the other server's.
        relay = Relay(self.servers[0].address, cuts=[None, 3 << 20, 2 << 20])
        self.addCleanup(relay.close)
        sent = self.sent(x, relay.where)
        chunk = pickle.loads(sent)
        np.testing.assert_array_equal(chunk.numpy(), x)
        self.assertFalse(relay.cuts)

    def test_a_server_that_dies_and_comes_back_empty(self):
        x = RNG.normal(size=(2048, 2048)).astype(np.float32)
        relay = Relay(self.servers[0].address, hold=2 << 20)
        sent = self.sent(x, relay.where)
        chunk = pickle.loads(sent)
        self.assertTrue(o.eventually(relay.silent.is_set, 30))
        self.servers[0].kill()
        (other,) = servers_of(self, 1)
        relay.address = other.address.split(":")
        relay.silent.clear()
        with self.assertRaises(ts.SourceRefused):
            chunk.numpy()
        self.assertTrue(o.eventually(lambda: used(self.servers[1]) == 0, 20))
        relay.close()


if __name__ == "__main__":
    python_outsider.main(sys.modules[__name__])
