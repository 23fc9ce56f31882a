#!/usr/bin/env python3
"""Tests Dask arrays on several servers against NumPy: a cluster of four workers and four servers on
this host, workers and servers that are killed, links that break, and names with homes."""

import gc
import logging
import os
import pickle
import signal
import sys

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
from tessera.dask import _servers

RNG = np.random.default_rng(20261125)
FLAGS = ("--import-from", "127.0.0.1:*", "--no-warm-up", "--workers", "2")


def whole_numbers(*shape):
    """Returns floats whose sums are exact."""
    return RNG.integers(-50, 50, shape).astype(np.float32)


def used(server):
    with ts.connect(server.address) as client:
        return sum(device.buffer_used_bytes for device in client.info().devices)


def tell_own_server():
    """Makes a worker delete its buffers without references, with a call to its server."""
    gc.collect()
    _servers.own().info()


class Rings(o.Case):
    """Tests ts.Ring, and the route in the metadata of calls."""

    def test_homes_are_those_of_the_servers(self):
        names = {"a": "h:1", "gpu-0.x": "h:2", "c_9": "h:3", "z": "h:4"}
        ring = ts.Ring(names)
        for i in range(500):
            name = f"run{i}/{'deep/' * (i % 3)}x{i}" if i % 7 else f"plain{i}"
            self.assertEqual(ring.server(name), home_of(names, name))

    def test_files(self):
        path = self.folder / "ring"

        def written(text):
            path.write_text(text)
            return ts.Ring(str(path))

        ring = written("# two\n b\thost-b:2 # second\r\n\na host-a:1")
        self.assertEqual(ring.servers, {"a": "host-a:1", "b": "host-b:2"})
        for text, complaint in (("a", "line 1"), ("a b c", "line 1"), ("a h:1\n\na h:2", "line 3"),
                                ("a/b h:1", "line 1"), ("", "at least one")):
            with self.assertRaisesRegex(ValueError, complaint):
                written(text)

    def test_servers_with_one_ring(self):
        path = self.folder / "two"
        path.write_text("a h:1\nb h:2\n")
        servers = {n: self.serve(*FLAGS, "--ring", path, "--ring-name", n).address for n in "ab"}
        with ts.Ring(servers) as ring:
            x = np.arange(6, dtype=np.float32)
            seen = set()
            for i in range(8):
                name = f"run{i}/x"
                t, owner = ring.home(name), ring.server(name)
                a = t.put(x, name=name)
                self.assertEqual((a * 2 + t.put(x)).sum().item(), 45.0)  # Unnamed arrays work too.
                seen.add(owner)
                elsewhere = next(n for n in map("o{}".format, range(99)) if ring.server(n) != owner)
                with self.assertRaises(ts.WrongHost) as error:
                    ring.home(elsewhere)[name]
                self.assertEqual(error.exception.details["owner"], owner)
            self.assertEqual(seen, {"a", "b"})

    def test_route(self):
        seen = []

        def deaf(details):
            seen.append(dict(details.invocation_metadata).get("tessera-route"))

        for options, expected in ((dict(route="run7/a/x"), "run7/a"), (dict(), None)):
            with o.handling(deaf) as address, ts.connect(address, **options) as t:
                with self.assertRaises(ts.Error):
                    t["run7/a/x"]
                with self.assertRaises(ts.Error):
                    t.put(np.ones(3), name="run7/a/y")
            self.assertEqual(set(seen), {expected})
            seen.clear()


class OneProcess(o.Case):
    """Chunks without a cluster: what NumPy functions return, and how chunks are sent. The first of
    two servers is the server of this process."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.servers = [cls.serve_class(*FLAGS) for _ in range(2)]
        td.use(cls.servers[0].address)

    def chunk(self, array):
        return td.Chunk(_servers.own().put(array), _servers.own_address())

    def test_operations_of_a_chunk(self):
        x = RNG.normal(size=(60, 50)).astype(np.float32)
        y = RNG.normal(size=(50, 40)).astype(np.float32)
        a, b = self.chunk(x), self.chunk(y)
        for call in (lambda a, b: a[..., None, :], lambda a, b: np.max(a, axis=1, keepdims=True),
                     lambda a, b: np.tensordot(a, b, ((1,), (0,)))):
            found, expected = call(a, b), call(x, y)
            self.assertEqual((found.shape, found.dtype), (expected.shape, expected.dtype))
            found = found if isinstance(found, np.ndarray) else found.numpy()
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
        self.assertEqual(np.argmax(a), np.argmax(x))
        self.assertIsInstance(a @ b, td.Chunk)
        self.assertIsInstance(a.sum(axis=0), np.ndarray)  # Small sums are in this process.
        with self.assertRaises(TypeError):
            np.asarray(memoryview(a))
        with self.assertRaisesRegex(TypeError, "not downloaded implicitly"):
            a.__array__()

    def test_empty_chunks_need_no_server(self):
        empty = td.Chunk(np.empty((0, 0), np.float32))
        for call in (lambda a: a[0:0], lambda a: a.astype(np.float64), lambda a: a.reshape((0,)),
                     lambda a: a @ a, lambda a: a + 1, lambda a: a.T, np.exp,
                     lambda a: np.sum(a, axis=(0,), keepdims=True)):
            made, want = call(empty), call(np.empty((0, 0), np.float32))
            self.assertIsInstance(made, td.Chunk)
            self.assertEqual((made.shape, made.dtype), (want.shape, want.dtype))
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
        del a  # The handle keeps the array alive.
        for _ in range(2):
            again = pickle.loads(sent)
            np.testing.assert_array_equal(again.numpy(), x)
        part = pickle.dumps(again[10:20, ::2])
        self.assertLess(len(part), 500)
        # The handle is opened on another server, which fetches the array from this one.
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
                o.eventually(lambda: _servers.own().info() and not used(self.servers[1])))
        finally:
            td.use(self.servers[0].address)

    def test_joined_chunks(self):
        x = [whole_numbers(700, 500) for _ in range(3)]
        joined = np.concatenate([self.chunk(one) for one in x], axis=0)
        whole = np.concatenate(x, axis=0)
        self.assertIsInstance(joined, td.Joined)
        self.assertEqual((joined.shape, joined.dtype), (whole.shape, whole.dtype))
        for number, call in enumerate((
                lambda a: a, lambda a: a.sum(axis=0), lambda a: a.max(axis=(0, 1)),
                lambda a: a.sum(axis=1), lambda a: (a + 1)[5:9], lambda a: a.reshape(-1, 250),
                lambda a: a.ravel(), lambda a: a.T, lambda a: a[:1].squeeze(0))):
            with self.subTest(number):
                found = call(joined)
                found = found.numpy() if hasattr(found, "numpy") else found
                np.testing.assert_array_equal(found, call(whole))

    def test_a_chunk_and_one_in_parts(self):
        """Combines a chunk with one in parts, in either order, also as optional arguments."""
        x, y = whole_numbers(90, 40), whole_numbers(90, 40)
        a, b = self.chunk(x), np.concatenate([self.chunk(y[:50]), self.chunk(y[50:])], axis=0)
        self.assertIsInstance(b, td.Joined)
        for number, call in enumerate((
                lambda a, b: a - b, lambda a, b: b - a, lambda a, b: a < b, lambda a, b: a @ b.T,
                lambda a, b: np.where(a > 0, b, a), lambda a, b: np.clip(a, b, b + 1),
                lambda a, b: np.clip(a, a_min=b, a_max=b + 1), np.maximum)):
            with self.subTest(number):
                np.testing.assert_array_equal(call(a, b).numpy(), call(x, y))

    def test_unsigned_sums(self):
        """The types are those of Dask, although the servers compute in int64."""
        x = RNG.integers(0, 256, (7, 8)).astype("u1")
        wide, long = x.astype("u8"), np.full((2, 150_000), 200, "u1")
        a = td.put(da.from_array(x, chunks=(4, 3)))
        for number, (found, expected) in enumerate((
                (a @ a.T, wide @ wide.T), (a @ a[0], wide @ wide[0]),
                (a.cumsum(axis=0), x.cumsum(0)), (a.cumsum(axis=1), x.cumsum(1)),
                ((a > 9).astype("u1").cumprod(axis=0), (x > 9).astype("u1").cumprod(0)),
                (a / a.sum(), x / x.sum()), (a + a.sum(axis=0), x + x.sum(0)),
                (td.put(da.from_array(long, chunks=(1, -1))).sum(axis=0), long.sum(0)))):
            with self.subTest(number):
                got = td.numpy(found).compute(scheduler="sync")
                np.testing.assert_array_equal(got, expected)
                self.assertEqual((got.dtype, found.dtype), (expected.dtype, expected.dtype))

    def test_rechunked_arrays(self):
        x = whole_numbers(40, 30)
        v = td.put(da.from_array(x, chunks=(15, 11)))
        r = v.rechunk((20, 10))
        u = td.put(da.from_array(np.full(9, 200, "u1"), chunks=4))
        for number, (found, expected) in enumerate((
                (v.reshape(-1), x.reshape(-1)), (v.reshape(4, 10, 30), x.reshape(4, 10, 30)),
                (da.expand_dims(r, 0), x[None]), (r * 2 + r, x * 2 + x),
                ((r * 2) @ v.T.rechunk((10, 20)), x * 2 @ x.T),
                (da.where(r > 0, r, 0), np.where(x > 0, x, 0)),
                (da.clip(r * 2, r, r + 1), np.clip(x * 2, x, x + 1)),
                (da.cumsum(r, axis=0), np.cumsum(x, 0)), (da.cumsum(v, axis=1), np.cumsum(x, 1)),
                (u.sum(), np.full(9, 200, "u1").sum()), (u.prod(), np.full(9, 200, "u1").prod()))):
            with self.subTest(number):
                got = td.numpy(found).compute(scheduler="sync")
                np.testing.assert_array_equal(got, expected)
                self.assertEqual(got.dtype, expected.dtype)


class Cluster(o.Case):
    """Four workers, each a process with its own server."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        dask.config.set({"distributed.worker.memory.target": False,
                         "distributed.worker.memory.spill": False,
                         "distributed.worker.memory.pause": False,
                         "distributed.worker.memory.terminate": False,
                         "distributed.admin.tick.limit": "60s",
                         # A cluster gives up a worker that does not come back within this time,
                         # together with the nanny that restarts it. On a busy machine, a restart is
                         # slow.
                         "distributed.deploy.lost-worker-timeout": "1h"})
        cls.servers = [cls.serve_class(*FLAGS) for _ in range(4)]
        cluster = distributed.LocalCluster(
            n_workers=4, threads_per_worker=1, processes=True, dashboard_address=None,
            memory_limit=0, local_directory=str(cls.folder),
            # Workers request chunks from a killed worker for this long.
            config={"distributed.comm.timeouts.connect": "3s"})
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
        for number, (found, expected) in enumerate((
                *((call(a), call(x)) for call in (
                    lambda a: a.sum(), lambda a: a.sum(axis=0), lambda a: a.mean(axis=1),
                    lambda a: a.var(), lambda a: a.var(axis=0), lambda a: a.std(ddof=1),
                    lambda a: a.min(axis=1), lambda a: a.argmax(axis=1), lambda a: a.argmin(axis=0),
                    lambda a: a.argmax(), lambda a: (a > 4).any(), lambda a: a[100:900:3, 50:250],
                    lambda a: a[::-1], lambda a: a[7], lambda a: (a * a).sum(axis=0))),
                (a @ b, x @ y), (a @ b[:, 0], x @ y[:, 0]),
                (da.tensordot(a, a, ((0, 1), (0, 1))), np.tensordot(x, x, 2)),
                (da.exp(a * 0.5) - 1, np.exp(x * np.float32(0.5)) - 1))):
            with self.subTest(number):
                self.assertEqual((found.shape, found.dtype), (np.shape(expected), expected.dtype))
                got = td.numpy(found).compute()
                self.assertIsInstance(got, (np.ndarray, np.generic))
                np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)

    def test_large_partial_results(self):
        """Chunks of products are too large to be sent to this process, so they are added where they
        are."""
        x = RNG.integers(-4, 5, (640, 640)).astype(np.float64)
        a = self.put(x, (640, 160))  # Four products of 640 x 640, 3.1 MiB each.
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
        for server, (_, name) in zip(self.servers, names):  # Dask does not delete these.
            with ts.connect(server.address) as client:
                self.assertIn(name, client)
                client.delete(name)

    def test_memory_goes_with_the_array(self):
        def held():
            self.client.run(tell_own_server)
            return sum(map(used, self.servers))

        seen = []  # Leftovers of other tests are deleted first.

        def rests():
            seen.append(held())
            return len(seen) > 3 and len(set(seen[-4:])) == 1

        self.assertTrue(o.eventually(rests, pause=0.1))
        before = seen[-1]
        x = np.ones((2000, 500), np.float32)
        a = self.put(x, (500, 500))
        self.assertGreaterEqual(held(), before + x.nbytes)
        self.assertEqual((a + 1).sum().compute(), 2 * x.size)
        del a
        self.assertTrue(o.eventually(lambda: held() <= before))

    def test_worker_that_is_killed(self):
        x = RNG.normal(size=(800, 300)).astype(np.float32)
        a = self.put(x, (100, 300))
        victim = self.client.run(os.getpid)
        pid = sorted(victim.values())[0]
        future = self.client.compute((a @ a.T).sum())
        os.kill(pid, signal.SIGKILL)
        # Dask computes the lost chunks again, on a new worker with its server, or on other workers.
        np.testing.assert_allclose(future.result(timeout=120), (x @ x.T).sum(), rtol=1e-2)
        self.client.wait_for_workers(4, timeout=60)
        np.testing.assert_allclose(a.sum().compute(), x.sum(), rtol=1e-3, atol=1e-2)


class Faults(o.Case):
    """A server or a link ends while an array is being transferred."""

    def setUp(self):
        self.servers = [self.serve(*FLAGS) for _ in range(2)]

    def test_a_server_that_dies_and_comes_back_empty(self):
        x = RNG.normal(size=(2048, 2048)).astype(np.float32)
        relay = Relay(self.servers[0].address, hold=2 << 20)
        td.use(self.servers[0].address)
        sent = pickle.dumps(td.Chunk(_servers.own().put(x), relay.where))
        td.use(self.servers[1].address)  # It will fetch the array from the first one.
        chunk = pickle.loads(sent)
        self.assertTrue(o.eventually(relay.silent.is_set))
        self.servers[0].kill()
        relay.address = self.serve(*FLAGS).address.split(":")
        relay.silent.clear()
        with self.assertRaises(ts.SourceRefused):
            chunk.numpy()
        self.assertTrue(o.eventually(lambda: used(self.servers[1]) == 0))
        relay.close()


if __name__ == "__main__":
    python_outsider.main(sys.modules[__name__])
