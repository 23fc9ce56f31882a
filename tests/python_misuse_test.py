#!/usr/bin/env python3
"""Tests the Python client as people really use it: arrays of every layout and type, invalid
arguments, forks, interrupted transfers, and processes that end without closing their clients.
"""

import asyncio
import fractions
import gc
import itertools
import operator
import os
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from unittest import mock

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from tessera import _sweep
from tessera.wire import _protocol as p

MIB = 1 << 20
# The beginning of every program of this suite. Background jobs ignore Ctrl-C by default.
HEAD = """
import os, signal, sys, time
import numpy as np
import tessera as ts
address = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


class ArraysTest(python_outsider.Case):
    def setUp(self):
        self.a = np.random.default_rng(1).standard_normal((6, 7)).astype("f4")

    def test_every_layout(self):
        a = self.a
        raw = np.frombuffer(b"\0" + a.tobytes() + b"\0\0\0", np.uint8)
        unaligned = raw[1 : 1 + a.nbytes].view("f4").reshape(a.shape)
        self.assertFalse(unaligned.flags.aligned)
        for array in (
            a[::-1, ::-2], np.asfortranarray(a), a.T, a.astype(">f4"), unaligned,
            np.arange(5, dtype=">i8")[::-1], np.broadcast_to(a[0], (5, 7)),
            np.broadcast_to(np.float32(1), (300, 300)), np.array(3.0), np.float16(2),
            np.empty((0, 3), "i4"), np.zeros((1,) * 8), [[1, 2], [3, 4]], range(3), [], 3, 2.5,
        ):
            got = self.t.put(array).numpy()
            want = np.asarray(array)
            self.assertEqual((got.shape, got.dtype), (want.shape, want.dtype.newbyteorder("<")))
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal((self.t.put(a) + unaligned).numpy(), 2 * a)

    def test_types_without_a_counterpart(self):
        for array in (
            np.arange(5, dtype="u2"), np.arange(5, dtype="u8"), self.a.astype("c8"),
            self.a.astype(np.longdouble), np.array(["a"]), np.array([1, None], object),
            np.zeros(3, [("a", "f4"), ("b", "i4")]), np.array(["2020-01-01"], "M8[D]"),
            np.ma.masked_array(self.a, self.a > 0), None, "text", 1 << 70,
        ):
            with self.assertRaisesRegex(ts.Unsupported, "astype|filled|missing values"):
                self.t.put(array)
        converted = self.t.put(np.arange(5, dtype="u1"), dtype="f4")
        np.testing.assert_array_equal(converted.numpy(), range(5))

    def test_objects_that_have_a_type_to_go_to(self):
        """NumPy converts such objects, and its own error says what it cannot convert."""
        third = fractions.Fraction(1, 3)
        for value, dtype in (
            ([None, 1.0], "f64"), ([1, 1 << 70], "f64"), ([[third, 2], [4, 5]], "f32"),
            ([True, None, "text"], bool), (third, "f64"), ([], "i32"), ([third] * MIB, "f64"),
        ):
            array = np.array(value, object)
            with self.subTest(value=str(value)[:40]):
                got = self.t.put(array, dtype=dtype).numpy()
                np.testing.assert_array_equal(got, array.astype(ts.graph._dtypes.dtype_of(dtype)))
        halves = np.array([[third, 2], [3, 4]], object).T
        want = halves.astype("f4")
        np.testing.assert_allclose(self.t.put(halves, dtype="bf16").numpy(), want, rtol=1 / 256)
        with self.assertRaises(TypeError):
            self.t.put([object(), 1], dtype="i32")

    def test_missing_values_among_objects(self):
        class NAType:  # Like pandas.NA: it equals nothing, and NumPy cannot convert it.
            __eq__ = __ne__ = lambda self, other: self
            __bool__ = mock.Mock(side_effect=TypeError)

        class Column:  # Like a column of objects in pandas.
            ndim, dtype = 1, np.dtype(object)
            to_numpy = None
            __array__ = lambda self, *_: np.array([1, NAType(), None, 4], object)

        Column.__module__ = "pandas.core"
        for value in (Column(), np.asarray(Column()), [1, None, np.nan, 4]):
            for dtype in (None, "i32", "uint8"):
                with self.assertRaisesRegex(ts.Unsupported, "missing values.*dtype=.*fillna"):
                    self.t.put(value, dtype=dtype)
            for dtype in ("f32", "bf16", "f64"):
                got = self.t.put(value, dtype=dtype).numpy().astype("f8")
                np.testing.assert_array_equal(got, [1, np.nan, np.nan, 4])
        with self.assertRaisesRegex(ts.Unsupported, "missing values"):
            self.t.put(self.a) + np.array([1.0, None, 2.0])

    def test_what_numpy_says_of_a_conversion(self):
        """NumPy's settings for errors apply to small arrays, and to arrays that are converted
        during the transfer, through one connection and several."""

        async def put(data):
            async with await ts.aio.connect(self.server.address) as t:
                await t.put(data, "converted", dtype="f32")

        def raises(kind, data):
            for work in (
                lambda: self.t.put(data, "converted", dtype="f32"), lambda: asyncio.run(put(data)),
            ):
                self.assertRaises(kind, work)
                self.assertNotIn("converted", self.t)

        with mock.patch.object(self.t._io, "perform") as perform:
            self.assertRaises(ValueError, self.t.put, np.array(["x"]), "x", dtype="f32")
        perform.assert_not_called()  # A small array is converted before anything is sent.
        for size in (9, 3 * MIB, 17 * MIB):
            with self.subTest(size=size):
                large = np.ones(size)
                large[-1] = 1e300
                with np.errstate(over="raise"):
                    raises(FloatingPointError, large)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    raises(RuntimeWarning, large)
                    with np.errstate(over="ignore"):
                        self.assertEqual(self.t.put(large, dtype="f32")[-1].item(), np.inf)

    def test_an_expression_is_what_it_was_when_it_was_written(self):
        x, a = self.t.put(self.a), self.a.copy()
        sums = x + a, x + a[::-1], x @ a.T, np.where(x > 0, a, 0)
        want = self.a + a, self.a + a[::-1], self.a @ a.T, np.where(self.a > 0, a, 0)
        a[:] = 7
        for got, right in zip(sums, want):
            np.testing.assert_allclose(got.numpy(), right, rtol=1e-4, atol=1e-5)

    def test_dlpack_both_ways(self):
        class Foreign:
            """An array of a library that supports only DLPack."""

            def __init__(self, array, device=1):
                self.array, self.device = array, device

            def __dlpack__(self, **_):
                return self.array.__dlpack__()

            def __dlpack_device__(self):
                return (self.device, 0)

        for array in (self.a, self.a[::2], self.a.T):
            x = self.t.put(Foreign(array))
            np.testing.assert_array_equal(x.numpy(), array)
            np.testing.assert_array_equal(np.from_dlpack(x), array)
            np.testing.assert_array_equal(np.from_dlpack(x + 1), array + 1)
        with self.assertRaisesRegex(ts.Unsupported, "host"):
            self.t.put(Foreign(self.a, 2))
        with self.assertRaises(ts.Unsupported):
            x.__dlpack__(dl_device=(2, 0))
        capsule = x.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=True)
        self.assertEqual(type(capsule).__name__, "PyCapsule")
        self.assertRaises(BufferError, x.__dlpack__, copy=False)

    def test_arrays_of_other_libraries(self):
        """Such arrays may be on a device, keep a gradient, or be columns with missing values."""
        bits = np.arange(0x3F80, 0x3F88, dtype="u2")
        a = np.arange(6, dtype="f4")

        class Tensor:  # Like torch's, it gives bf16 only as a view of int16.
            dtype = "torch.bfloat16"
            detach = cpu = contiguous = lambda self: self

            def view(self, dtype):
                return types.SimpleNamespace(numpy=lambda: bits.view("i2"))

        Tensor.__module__ = "torch"
        with mock.patch.dict(sys.modules, torch=mock.Mock()):
            got = self.t.put(Tensor())
        self.assertEqual(got.dtype, ts.bfloat16)
        want = (bits.astype("u4") << 16).view("f4")
        np.testing.assert_array_equal(got.astype("f4").numpy(), want)
        Tensor.dtype, Tensor.numpy = "torch.float32", lambda self: a
        np.testing.assert_array_equal(self.t.put(Tensor()).numpy(), a)

        class OnDevice:  # Like an array of CuPy.
            __dlpack_device__ = lambda self: (2, 0)
            __dlpack__ = __array__ = mock.Mock(side_effect=TypeError)
            get = lambda self: a

        np.testing.assert_array_equal(self.t.put(OnDevice()).numpy(), a)

        class Series:  # Like pandas': its own types, with a value for missing data.
            ndim = 1
            dtype = types.SimpleNamespace(numpy_dtype=np.dtype("i4"))
            missing = np.array([False, False, True])
            isna = lambda self: self.missing
            __array__ = lambda self, *_: np.array([1, 2, None], object)

            def to_numpy(self, dtype, na_value=0):
                return np.where(self.missing, na_value, [1, 2, 3]).astype(dtype)

        Series.__module__ = "pandas.core"
        with self.assertRaisesRegex(ts.Unsupported, "missing values.*dtype="):
            self.t.put(Series())
        np.testing.assert_array_equal(self.t.put(Series(), dtype="f4").numpy(), [1, 2, np.nan])
        Series.missing = np.zeros(3, bool)
        got = self.t.put(Series())
        self.assertEqual(got.dtype, np.int32)
        np.testing.assert_array_equal((got + Series()).numpy(), [2, 4, 6])
        np.testing.assert_array_equal(np.where(got > 1, Series(), 0).numpy(), [0, 2, 3])

    def test_what_is_on_a_server_already_is_not_put(self):
        x = self.t.put(self.a)
        for value in (x, x + 1):
            with self.assertRaisesRegex(TypeError, r"\.save\(name\).*\.copy\(name\)"):
                self.t.put(value, name="again")

    def test_numbers_of_python(self):
        x = self.t.put(np.array([[4, 1], [3, 2]]))
        self.assertEqual([*"abcd"][x.argmin()], "b")
        self.assertEqual(np.arange(4)[x.argmax()], 0)
        self.assertEqual([*range(x[0, 1] + 0)], [0])
        self.assertEqual(x[0, : x[1, 1]].shape, (2,))
        self.assertEqual((x.item(3), x.item(1, 0), x.item(-1), x.item((0, 1))), (2, 3, 2, 1))
        self.assertEqual((complex(x[0, 0]), complex(x[:1, 1] * 0.5)), (4 + 0j, 0.5 + 0j))
        self.assertEqual((round(x[0, 0] / 3), round(x[0, 0] / 3, 1)), (1, 1.3))
        self.assertTrue(3 in x and 5 not in x)
        for call in (lambda: [1][x], lambda: [1][x[0, 0] * 1.0], lambda: float(x), lambda: int(x),
                     lambda: complex(x), lambda: pow(x, 2, 5), lambda: self.t.list(5),
                     lambda: self.t.compute([x, x])):
            with self.assertRaises(TypeError):
                call()
        with self.assertRaises(IndexError):
            x.item(4)
        self.assertEqual(f"{x[0, 0]:.3f} {x.max():8.2e}", "4.000 4.00e+00")
        with self.assertRaises(TypeError):
            f"{x:.3f}"
        comparisons = ("lt", "le", "gt", "ge", "eq", "ne")
        for value, name in itertools.product((2**63, -(2**63) - 1, 10**400), comparisons):
            call = getattr(operator, name)
            for array in (x, x.astype("u1"), x > 2):
                self.assertEqual(bool(call(array, value).all()), call(1, value))
                self.assertEqual(bool(call(value, array).any()), call(value, 1))

    def test_operands_that_are_none(self):
        x = self.t.put(self.a)
        for call in (lambda: np.where(x > 1, "a", "b"), lambda: np.where(x > 1, None, x),
                     lambda: np.outer(x, None), lambda: np.add(x, "a"),
                     lambda: np.dot(x, object())):
            with self.assertRaisesRegex(TypeError, "operands are arrays of this client"):
                call()


class ArgumentsTest(python_outsider.Case):
    def test_names_and_lifetimes(self):
        t, a = self.t, np.ones(3)
        x = t.put(a)
        for call in (
            lambda: t.put(a, 5), lambda: t[5], lambda: 5 in t, lambda: t.delete(None),
            lambda: x.copy(5), lambda: (x + 1).save(b"bytes"), lambda: list(t),
            lambda: t.compute(a), lambda: t.keep(x, 5),
        ):
            self.assertRaises(TypeError, call)
        for name in ("", "é", "a\0b", "a" * 129):
            self.assertRaises(ts.BadName, t.put, a, name)
        for call in (lambda ttl: t.put(a, ttl=ttl), lambda ttl: (x + 1).save(ttl=ttl),
                     lambda ttl: x.copy(ttl=ttl)):
            for ttl in (0, -1, -0.5, "5 parsecs", float("inf"), float("nan"), 1e300):
                self.assertRaises(ValueError, call, ttl)

    def test_calls_of_the_protocol(self):
        for method in ("Nope", "Upload", "Download"):
            self.assertRaisesRegex(ValueError, method, self.t.call, method)
        self.assertRaisesRegex(ValueError, "foo", self.t.call, "GetBuffer", foo=1)

    def test_expressions_of_another_connection(self):
        """The other server may have another array under the same name."""
        x = self.t.put(np.ones(3))
        with ts.connect(self.server.address) as other:
            for call in (other.compute, other.keep):
                with self.assertRaisesRegex(ts.Unsupported, "two connections"):
                    call(x + 1)
        self.assertEqual((self.t.compute(), self.t.keep()), ([], []))

    def test_options(self):
        for options in ({"timeout": "1s"}, {"timeout": -1}, {"connect_timeout": None},
                        {"stall_timeout": 0}, {"timeout": float("nan")}, {"unnamed_ttl": "long"}):
            self.assertRaises(ValueError, ts.connect, self.server.address, **options)
        for target in ("", None, 50051, "http://127.0.0.1:1", "localhost:http", "localhost",
                       "127.0.0.1:1,127.0.0.1:2", "vsock:2:1"):
            self.assertRaisesRegex(ValueError, "host:port", ts.connect, target)
        for target in ("127.0.0.1:65536", "[::1]:99999", "ipv4:127.0.0.1:99999,127.0.0.1:1"):
            self.assertRaisesRegex(ValueError, "at most 65535", ts.connect, target)
        for target, why in (("127.0.0.1:1", "refused"), ("none.invalid:1", "DNS")):
            with self.assertRaisesRegex(ts.Unreachable, why):
                ts.connect(target, connect_timeout=0.1)

    def test_aio_in_another_loop(self):
        async def connect():
            t = await ts.aio.connect(self.server.address)
            return t, await t.put(np.ones(3))

        async def use(x):
            for work in (x.sum().numpy, x.numpy):
                with self.assertRaisesRegex(RuntimeError, "event loop"):
                    await work()

        loop = asyncio.new_event_loop()
        t, x = loop.run_until_complete(connect())
        other = asyncio.new_event_loop()
        other.run_until_complete(use(x))
        loop.run_until_complete(t.close())
        loop.close()
        other.close()


class ProcessesTest(python_outsider.Case):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.FLAGS = (*python_outsider.PATIENT, "--shared-memory", f"{folder.name}/socket",
                     "--import-from", "127.0.0.1:*")
        super().setUpClass()

    def begin(self, *program, **environment):
        # Newer versions of Python and gRPC print remarks about forks.
        said = tempfile.TemporaryFile()
        self.addCleanup(said.close)
        process = subprocess.Popen(
            [sys.executable, *program, self.server.address],
            env={**os.environ, "PYTHONPATH": str(python_outsider.PACKAGE), **environment},
            stdout=subprocess.PIPE, stderr=said, text=True,
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        return process, said

    def run_(self, text, want, **environment):
        self.run_program(("-c", HEAD + text), want, **environment)

    def run_program(self, program, want, **environment):
        process, said = self.begin(*program, **environment)
        out, _ = process.communicate(timeout=o.START_TIMEOUT_S)
        said.seek(0)
        self.assertEqual((out, process.returncode), (want, 0), said.read().decode())

    def unnamed(self):
        return {b.name for b in self.t.call("ListBuffers", prefix="unnamed/").buffers}

    def test_what_is_unnamed_goes_with_its_client(self):
        """close() deletes unnamed buffers even if references to them are left."""
        before = self.unnamed()
        with ts.connect(self.server.address) as t:
            x = t.put(np.ones(3))
            kept = [x, *t.keep(x + 1)]
            self.assertEqual(len(self.unnamed() - before), 2)
        self.assertEqual(self.unnamed() - before, set())
        del x, kept

    def eventually_gone(self, names):
        self.assertTrue(o.eventually(lambda: not self.unnamed() & names))

    def test_unreferenced_buffers_are_deleted_without_another_call(self):
        t = ts.connect(self.server.address)
        self.addCleanup(t.close)
        x, (y,) = t.put(np.ones(3)), t.keep(t.put(np.ones(3)) + 1)
        names = {x.name, y.name}
        del x, y
        self.eventually_gone(names)
        # Unnamed buffers are also deleted if the client itself is dropped.
        other = ts.connect(self.server.address)
        x = other.put(np.ones(3))
        names = {x.name}
        del other, x
        gc.collect()
        self.eventually_gone(names)

    def test_the_background_thread_forgets_a_job_before_it_waits_for_the_next(self):
        class Job:
            def __call__(self):
                raise ts.Error("the background thread ignores this")

        def get():
            alive.append(of_job() is not None)
            return jobs.pop() if jobs else None

        jobs, alive = [Job()], []
        of_job = weakref.ref(jobs[0])
        with mock.patch.object(_sweep, "_jobs", mock.Mock(get=get)):
            _sweep._work()
        self.assertEqual(alive, [True, False])

    def test_unreferenced_buffers_are_deleted_without_their_event_loop(self):
        async def work(dropped):
            t = await ts.aio.connect(self.server.address)
            x = await t.put(np.ones(3))
            names = {x.name}
            if not dropped:
                return t, x, names
            del x
            while self.unnamed() & names:
                await asyncio.sleep(0.01)
            await t.close()

        asyncio.run(asyncio.wait_for(work(True), o.START_TIMEOUT_S))
        t, x, names = asyncio.run(work(False))
        del x
        self.eventually_gone(names)  # The client still exists, but its loop does not.
        t, x, names = asyncio.run(work(False))
        del t, x
        gc.collect()
        self.eventually_gone(names)

    def test_what_is_unnamed_goes_with_its_process(self):
        before = self.unnamed()
        for program in (
            "import asyncio\nasync def work():\n  t = await ts.aio.connect(address)\n"
            "  return t, await t.put(np.ones(5))\nkept = asyncio.run(work())",
            "t = ts.connect(address); x = t.put(np.ones(5)); y = (x + 1).save()",
            "def work():\n  return ts.connect(address).put(np.ones(5))\nx = work()\nsys.exit()",
        ):
            self.run_(program, "")
            self.assertEqual(self.unnamed() - before, set())

    def test_forks(self):
        """A fork does not call the server and does not delete its parent's buffers. The parent
        continues to work, even if it forks in the middle of a call."""
        self.run_(
            "import asyncio, threading\n"
            "t = ts.connect(address); x = t.put(np.ones((600, 600)))\n"
            "loop = asyncio.new_event_loop()\n"
            "u = loop.run_until_complete(ts.aio.connect(address))\n"
            "found = []\n"
            "product = (x @ x).with_(strategy='cpu_naive')\n"
            "thread = threading.Thread(target=lambda: found.append(float(product.numpy()[0, 0])))\n"
            "thread.start(); time.sleep(0.1)\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "  for call in (\n"
            "    lambda: ts.connect(address), lambda: x.numpy(), lambda: x.sum().item(),\n"
            "    lambda: t.put(np.ones(9 << 20)), lambda: t.info(),\n"
            "    lambda: asyncio.run(ts.aio.connect(address)),\n"
            "    lambda: loop.run_until_complete(u.info()),\n"
            "  ):\n"
            "    try: call()\n"
            "    except RuntimeError as error: print('spawn' in str(error), end=' ', flush=True)\n"
            "  del x, product\n"
            "  t.close()\n"
            "  print(t._core.own, t._core.take_dead(), flush=True)\n"
            "  os._exit(0)\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
            "thread.join()\n"
            "print(found, float((x + 1).sum()))\n"
            "loop.run_until_complete(u.close())\n",
            "True " * 7 + "False []\n[600.0] 720000.0\n",
            GRPC_ENABLE_FORK_SUPPORT="0",
        )

    def test_pools_of_processes(self):
        """Pools may be forks of a process that has not connected yet, or processes that are not
        forks."""
        program = self.folder / "pool.py"
        for kind in ("fork", "spawn", "forkserver"):
            connect = "    t = ts.connect(address)\n"
            begin = f"    pool = multiprocessing.get_context('{kind}').Pool(2)\n"
            program.write_text(
                HEAD + "import multiprocessing\n"
                "def total(n):\n"
                "    with ts.connect(address) as t: return float(t.put(np.ones(n)).sum())\n"
                "if __name__ == '__main__':\n"
                + (begin + connect if kind == "fork" else connect + begin)
                + "    with pool:\n"
                "        print(pool.map(total, [1, 2, 3]), float(t.put(np.ones(4)).sum()))\n"
            )
            self.run_program((program,), "[1.0, 2.0, 3.0] 4.0\n")

    def test_interrupted_transfers(self):
        """Ctrl-C ends a transfer immediately and leaves nothing behind, and the client continues to
        work."""
        for shared in ("True", "False"):
            for way in ("t.put(data, 'half', progress=interrupt)", "x.numpy(progress=interrupt)"):
                self.run_(
                    f"""
def interrupt(done, total):
    if total == data.nbytes and 0.25 < done / total < 0.5:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
t = ts.connect(address, shared_memory={shared})
data = np.ones(24 << 20, 'f4')
x = t.put(data)
try: {way}
except KeyboardInterrupt: print('interrupted')
print(float(x[:5].sum()))
for _ in range(100):
    drafts = [b for b in t.call('ListBuffers', prefix='half').buffers]
    if not drafts: break
    time.sleep(0.1)
print(len(drafts), (t.put(data[:5]) + 1).numpy())
""",
                    "interrupted\n5.0\n0 [2. 2. 2. 2. 2.]\n",
                )

    def test_interrupts_that_leave_a_lock_taken(self):
        """Ctrl-C comes between two lines of threading.Condition, with which gRPC guards its
        channels."""
        self.run_(
            """
import faulthandler, threading
faulthandler.dump_traceback_later(50, exit=True)
t = ts.connect(address, shared_memory=False)
x = t.put(np.ones(9))
leave, left, main = threading.Condition.__exit__, None, threading.get_ident()
def interrupted(condition, *of):
    global left
    if left is not None and threading.get_ident() == main:
        left -= 1
        if left < 0:
            left = None
            raise KeyboardInterrupt
    return leave(condition, *of)
threading.Condition.__exit__ = interrupted
found = 0
for work in (lambda: t.put(np.ones(5)), lambda: x[:5].numpy(), lambda: x.sum().item()):
    for left in range(6):
        try: work()
        except KeyboardInterrupt: found += 1
        left = None
        assert t.put(np.arange(5)).numpy().tolist() == [0, 1, 2, 3, 4] and x.sum().item() == 9
print(found > 6)
""",
            "True\n",
        )

    def test_what_an_interrupted_call_has_made_is_deleted(self):
        x = self.t.put(np.ones(9))
        before = self.unnamed()
        perform = self.t._io.perform

        def interrupted(command):
            answer = perform(command)
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return answer

        for work in (
            lambda: (x + 1).save(), lambda: self.t.keep(x + 1, x.sum()), lambda: x[::2].copy(),
            lambda: self.t.put(np.ones(3)), lambda: self.t.import_from(self.server.address, x.name),
        ):
            self.t._io.perform = interrupted
            try:
                self.assertRaises(KeyboardInterrupt, work)
            finally:
                del self.t._io.perform
            self.assertGreater(len(self.unnamed()), 0)
            self.assertTrue(o.eventually(lambda: self.unnamed() == before))

    def test_a_put_that_is_interrupted_while_its_buffer_is_made(self):
        """The buffer is deleted as soon as the server has made it. The name can be put again
        immediately, and close() waits for the deletion."""
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, handler)

        for size, name, again in itertools.product((MIB, 9), ("made", None), (True, False)):
            data = np.ones(size)
            with self.subTest(size=size, name=name, again=again), \
                    ts.connect(self.server.address) as t:
                made, waited_for, perform = [], threading.Event(), t._io.perform

                def slow(call, made=made, waited_for=waited_for):
                    def called(*args):
                        answer = call(*args)
                        if hasattr(answer, "buffer") and not made:
                            made.append(answer.buffer)
                            os.kill(os.getpid(), signal.SIGINT)
                            waited_for.wait(10)
                        return answer

                    return called

                def watched(command, perform=perform, waited_for=waited_for):
                    if isinstance(command, ts._core.Pause):
                        waited_for.set()
                    return perform(command)

                t._io.call, t._io._upload = slow(t._io.call), slow(t._io._upload)
                t._io.perform = watched
                self.assertRaises(KeyboardInterrupt, t.put, data, name)
                if again:
                    kept = t.put(data, name)
                    waited_for.set()
                    # Only the second buffer exists.
                    self.assertTrue(o.eventually(lambda: len(self.like(made[0])) == 1))
                    self.assertNotEqual(self.like(made[0]), [made[0].version])
                    if name:
                        kept.delete()
            self.assertEqual(self.like(made[0]), [])

    def like(self, buffer):
        """Returns the versions of the buffers whose names differ at most in their last digit."""
        found = self.t.call("ListBuffers", prefix=buffer.name[:-1]).buffers
        return [one.version for one in found]

    def test_a_client_that_is_closed_in_the_middle_of_a_put(self):
        for name in ("closed", None):
            t = ts.connect(self.server.address, shared_memory=False)
            with self.assertRaisesRegex(ts.Error, "closed"):
                t.put(np.ones(3 * MIB), name, progress=lambda *_: t.close())
            self.assertEqual(self.like(p.Buffer(name=name or t._core._prefix)), [])

    def test_a_client_that_is_closed_while_the_server_seals(self):
        """Either the array exists and put() returns, or it does not exist and put() reports
        that."""
        for name in ("sealed", None):
            t = ts.connect(self.server.address)
            call = t._io.call

            def closing(method, *rest, t=t, call=call):
                answer = call(method, *rest)
                if method == "SealBuffer":
                    closer = threading.Thread(target=t.close)
                    closer.start()
                    closer.join()
                return answer

            t._io.call = closing
            with self.assertRaisesRegex(ts.Error, "closed"):
                t.put(np.ones(MIB), name)
            self.assertEqual(self.like(p.Buffer(name=name or t._core._prefix)), [])

    def test_drafts_that_are_sealed_while_others_are_deleted(self):
        """From the first deletion on, put() keeps none of the drafts."""
        core = ts._core.Core(ts.wire._connect.Options("127.0.0.1:1"))
        core._drafts.update({("a", 1), ("b", 2)})
        self.assertEqual(next(core.close()).method, "DeleteBuffer")
        self.assertEqual(core._drafts, set())

    def test_a_put_that_never_begins(self):
        """If no thread can be started, or Ctrl-C comes before that, close() deletes the rest."""
        before = self.unnamed()
        for owner, name, error in ((threading.Thread, "start", RuntimeError),
                                   (ts._blocking.Blocking, "_create", KeyboardInterrupt)):
            with self.subTest(name), ts.connect(self.server.address) as t:
                kept = t.put(np.ones(3))
                with mock.patch.object(owner, name, side_effect=error):
                    self.assertRaises(error, t.put, np.ones(MIB))
                if error is RuntimeError:
                    self.assertEqual(t._core._creating, set())
            self.assertEqual(self.unnamed() - before, set())
        del kept

    def test_an_end_that_starts_no_threads(self):
        """From Python 3.12 on, a process that ends after Ctrl-C can start no threads."""
        t = ts.connect(self.server.address)
        t._io.interrupted(KeyboardInterrupt())
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("at the end")):
            t.close()

    def test_many_threads_that_delete_what_is_dead(self):
        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-6)
        core = ts._core.Core(ts.wire._connect.Options("127.0.0.1:1"))
        taken = []
        for _ in range(30):
            core.dead.extend(("x", i) for i in range(200))
            o.in_threads(8, lambda _: taken.extend(core.take_dead()))
        self.assertEqual(len(taken), 30 * 200)

    def test_an_interrupted_call(self):
        process, _ = self.begin(
            "-c",
            HEAD + "t = ts.connect(address); x = t.put(np.ones((1100, 1100), 'f4'))\n"
            "try:\n"
            "  print('under way', flush=True)\n"
            "  while True: (x @ x).with_(strategy='cpu_naive').numpy()\n"
            "except KeyboardInterrupt: print(float(x[0, 0]))\n"
        )
        self.assertEqual(process.stdout.readline(), "under way\n")
        busy = self.server.cpu_seconds() + 0.1
        self.assertTrue(o.eventually(lambda: self.server.cpu_seconds() > busy))
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.communicate(timeout=o.START_TIMEOUT_S)[0], "1.0\n")
        self.assertEqual(process.returncode, 0)


if __name__ == "__main__":
    python_outsider.main("__main__")
