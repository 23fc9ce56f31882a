#!/usr/bin/env python3
"""Tests the memory that a process needs for transfers of 256 MiB with the Python client, in
addition to the arrays themselves."""

import contextlib
import pathlib

import numpy as np

import python_outsider

MIB = 1 << 20


class MemoryTest(python_outsider.Case):
    FLAGS = ("--no-warm-up",)
    # gRPC holds bytes that it has received and the server has not read, which are some tens of MiB
    # per connection.
    SIZE = 256 * MIB
    UP, DOWN = SIZE // 2, SIZE * 7 // 8

    @contextlib.contextmanager
    def at_most(self, bound):
        """Checks that resident memory always grows by less than this number of bytes."""

        def peak():
            status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
            return int(status.split("VmHWM:")[1].split()[0]) * 1024

        # Resets the peak, so that the memory of other tests does not count.
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = peak()
        yield
        self.assertLess(peak() - before, bound)

    def setUp(self):
        self.big = np.ones((8192, self.SIZE // 4 // 8192), "f4")

    def test_arrays_as_they_travel(self):
        with self.at_most(self.UP):
            x = self.t.put(self.big)
        with self.at_most(self.SIZE + self.DOWN):
            got = x.numpy()
        self.assertEqual(float(got[-1, -1]), 1)

    def test_arrays_that_are_converted(self):
        """Such arrays are converted piece by piece."""
        swapped = self.big.astype(">f4")
        for array, dtype in ((self.big.T, None), (swapped, None), (self.big, "bf16")):
            with self.subTest(dtype or array.dtype), self.at_most(self.UP):
                x = self.t.put(array, dtype=dtype)
            self.assertEqual((x.shape, x.nbytes), (array.shape, self.SIZE // (2 if dtype else 1)))

    def test_views_that_are_put_in_order_here(self):
        """The range that such a view spans is downloaded first, unchanged."""
        x = self.t.put(self.big)
        out = np.full(self.big.T.shape, 2, "f4")  # Zeros would be allocated later.
        with self.at_most(self.SIZE + self.DOWN):
            x.T.numpy(out=out)
        self.assertEqual(float(out[-1, -1]), 1)
        half = self.t.put(self.big, dtype="bf16")
        with self.at_most(self.SIZE // 2 + self.SIZE + self.DOWN // 2):
            self.assertEqual(float(half.numpy()[-1, -1]), 1)


if __name__ == "__main__":
    python_outsider.main("__main__")
