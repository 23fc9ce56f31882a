#!/usr/bin/env python3
"""Tests files in and out of the Python client. They are compared with files that NumPy writes and
reads, and with a small writer and reader of safetensors that share no code with the client."""

import asyncio
import json
import os
import pathlib
import struct
import tempfile
import tracemalloc

import numpy as np

import files_of_arrays
import python_outsider
import tessera as ts
from files_of_arrays import RAW, TYPES, archive, npy, read_safetensors, safetensors, tensors

MIB = 1 << 20


class FilesTest(python_outsider.Case):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=type(self).folder))
        self.addCleanup(self.clear)

    def clear(self):
        for name in self.names():
            self.t.delete(name)

    def names(self):
        return [one.name for one in self.t.list() if not one.name.startswith("unnamed/")]

    def file(self, name, data):
        path = self.folder / name
        path.write_bytes(data)
        return path

    def same(self, array, want):
        """Compares the bytes, because the client reads |V2 as bf16, which NumPy lacks."""
        raw = self.t._run(self.t._core.fetch(array._source, array._view, None, None))
        self.assertEqual((raw.shape, raw.tobytes()), (want.shape, want.tobytes()))
        self.assertEqual(raw.dtype, ts.bfloat16 if want.dtype == "V2" else want.dtype)

    # --- loading

    def test_npy(self):
        arrays = [RAW.view(t).reshape(2, 3, -1) for t in TYPES]
        arrays += [np.array(3.5), np.zeros((0, 4), "<f4"), np.arange(3 * MIB, dtype="<i4")]
        for array in arrays:
            for order in "CF":
                path = self.file("some file.npy", npy(np.asarray(array, order=order)))
                self.same(self.t.load(path), array)
        big = RAW.view("<i4").astype(">i4")
        self.same(self.t.load(self.file("x.npy", npy(big)), "y"), big.astype("<i4"))
        self.same(self.t.load(path, prefix="a/"), arrays[-1])
        self.same(self.t.load(str(path), prefix="b/", name="c", dtype="f8"),
                  arrays[-1].astype("f8"))
        with self.assertRaises(ts.BadName):
            self.t.load(path, "c d")
        self.assertEqual(self.names(), ["a/some_file", "b/c", "y"])

    def test_npz(self):
        arrays = {"a": RAW.view("<f4").reshape(3, 4), "b/c": np.asfortranarray(RAW.reshape(6, 8)),
                  "bf16": RAW.view("|V2"), "none": np.zeros((0, 3)), "number": np.float32(3)}
        for save in (np.savez, np.savez_compressed):
            path = self.folder / "many.npz"
            save(path, **arrays)
            found = self.t.load(path)
            self.assertEqual(list(found), list(arrays))
            for key, array in arrays.items():
                self.same(found[key], np.asarray(array))
            found = self.t.load(path, only=["b/c"], name="n", replace=True)
            self.assertEqual((list(found), self.names()), (["b/c"], ["n/b/c"]))

    def test_safetensors(self):
        arrays = {t[1:]: RAW.view(t).reshape(2, -1) for t in TYPES}
        arrays |= {"empty": np.zeros((0, 4), "<f4"), "number": np.array(7, "<i8")}
        path = self.file("m.safetensors", tensors(arrays))
        found = self.t.load(path)
        self.assertEqual(set(found), set(arrays))
        for key, array in arrays.items():
            self.same(found[key], array)
        # Bytes need not be aligned, and the header may end in spaces.
        header = {"a": {"dtype": "F64", "shape": [1], "data_offsets": [1, 9]},
                  "b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
        data = safetensors(json.dumps(header).encode() + b"   ", b"\5" + struct.pack("<d", 2.5))
        found = self.t.load(self.file("odd.safetensors", data))
        self.assertEqual((found["a"].item(), found["b"].item()), (2.5, 5))

    def test_other_bytes_than_0_and_1_are_true(self):
        truths = np.arange(300).astype("u1").view(bool)
        for name, data in (("x.npy", npy(truths)), ("x.npz", archive([("x.npy", npy(truths))])),
                           ("x.safetensors", tensors({"x": truths}))):
            found = self.t.load(self.file(name, data))
            self.same(found if name == "x.npy" else found["x"], truths.view("u1") != 0)

    def test_types_that_the_server_lacks(self):
        wide = np.arange(5, dtype="<u2")
        path = self.file("m.safetensors", tensors({"x": RAW, "wide": wide}))
        with self.assertRaisesRegex(ts.Unsupported, "m.safetensors: wide: .*uint16"):
            self.t.load(path, prefix="")
        self.assertEqual(self.names(), [])
        for t in ("<u2", "<u4", "<u8", "<i2"):
            other = self.file("w.safetensors", tensors({"wide": wide.astype(t)}))
            self.same(self.t.load(other, dtype="i4")["wide"], wide.astype("<i4"))
        header = {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                  "f8": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [1, 2]}}
        path = self.file("f8.safetensors", safetensors(header, b"ab"))
        with self.assertRaisesRegex(ts.Unsupported, "'f8' has the type F8_E4M3"):
            self.t.load(path)
        self.assertEqual(self.t.load(path, only=["x"])["x"].item(), ord("a"))

    def test_a_folder(self):
        for number in (1, 2):
            self.file(f"part-{number}.safetensors", tensors({"w.0": RAW * number, "b": RAW[:2]}))
        self.file("x.npy", npy(RAW))
        self.file("README.md", b"ignored")
        (self.folder / "more").mkdir()
        keys = [f"part-{number}/{key}" for number in (1, 2) for key in ("w.0", "b")] + ["x"]
        found = self.t.load(self.folder, prefix="model/", ttl="1h", device="cpu")
        self.assertEqual(list(found), keys)
        self.assertEqual(self.names(), sorted("model/" + key for key in keys))
        self.same(self.t["model/part-2/w.0"], RAW * 2)
        ttl = found["x"]._source.buffer.expire_time.seconds
        self.assertGreater(ttl, found["x"]._source.buffer.create_time.seconds + 3000)
        with self.assertRaises(ts.BufferExists):
            self.t.load(self.folder, prefix="model/")
        self.assertEqual(len(self.names()), 5)
        self.t.load(self.folder, prefix="model/", replace=True)
        with self.assertRaisesRegex(ts.BadFile, "prefix, not a name"):
            self.t.load(self.folder, "x")
        with self.assertRaisesRegex(ts.BadFile, "must contain files of arrays"):
            self.t.load(self.folder / "more")

    def test_a_failure_leaves_nothing(self):
        """A wrong file is found before the first upload; a failed upload undoes the others."""
        self.file("a.safetensors", tensors({"x": RAW, "y": RAW}))
        self.t.put(RAW[:5], "a/y")
        with self.assertRaises(ts.BufferExists):
            self.t.load(self.folder, prefix="")
        self.assertEqual(self.names(), ["a/y"])
        self.same(self.t["a/y"], RAW[:5])
        self.file("b.npy", npy(RAW)[:-1])
        with self.calls() as calls, self.assertRaisesRegex(ts.BadFile, "b.npy.*truncated"):
            self.t.load(self.folder, prefix="", replace=True)
        self.assertEqual(calls, [])
        self.file("c.safetensors", tensors({"n m": RAW, "n_m": RAW}))
        with self.assertRaisesRegex(ts.BadFile, "two arrays .* the name c/n_m"):
            self.t.load(self.folder / "c.safetensors", prefix="")
        with self.assertRaises(FileNotFoundError):
            self.t.load(self.folder / "d.npy")
        with self.assertRaisesRegex(ts.BadFile, "no array 'z'"):
            self.t.load(self.folder / "a.safetensors", only=["z"])
        os.mkfifo(self.folder / "fifo.npy")
        with self.assertRaisesRegex(ts.BadFile, "not a regular file"):
            self.t.load(self.folder / "fifo.npy")

    def test_what_the_server_would_refuse_replaces_nothing(self):
        one = self.t.put(RAW, "f/a")
        empty = {"dtype": "U8", "data_offsets": [48, 48]}
        first = {"dtype": "U8", "shape": [48], "data_offsets": [0, 48]}
        for error, header in ((ts.BadName, {"a": first, "n" * 127: {**empty, "shape": [0]}}),
                              (ts.BadFile, {"a": first, "b": {**empty, "shape": [0] * 9}}),
                              (ts.BadFile, {"a": first, "b": {**empty, "shape": [0, 1 << 62, 2]}})):
            path = self.file("f.safetensors", safetensors(header, RAW[::-1].tobytes()))
            with self.assertRaises(error):
                self.t.load(path, prefix="", replace=True)
            self.assertEqual(self.names(), ["f/a"])
            self.same(one, RAW)

    def test_hostile_files(self):
        for kind, files in files_of_arrays.hostile().items():
            for number, data in enumerate(files):
                with self.subTest(f"{kind} {number}"):
                    path = self.file(f"bad{kind}", data)
                    with self.assertRaises(ts.BadFile) as caught:
                        self.t.load(path, prefix="")
                    self.assertIn(str(path), str(caught.exception))
                    self.assertLess(len(str(caught.exception)), 500)
                    raw = "loaded: '[dsx]|pop expected|not iterable|subscriptable|indices must"
                    self.assertNotRegex(str(caught.exception), raw)
        # A byte of a member that is not compressed has changed.
        data = archive([("a.npy", npy(RAW))]).replace(RAW.tobytes(), bytes(48))
        with self.assertRaisesRegex(ts.BadFile, "CRC-32"):
            self.t.load(self.file("bad.npz", data), prefix="")
        self.assertEqual(self.names(), [])
        path = self.folder / "giant.safetensors"  # A header of 4 GiB, all of which the file
                                                  # contains.
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", 1 << 32))
            file.truncate((1 << 32) + 8)
        with self.assertRaisesRegex(ts.BadFile, "at most"):
            self.t.load(path)

    def test_one_array_at_a_time(self):
        arrays = {name: np.random.default_rng(1).integers(0, 9, 2 * MIB) for name in "abc"}
        np.savez_compressed(self.folder / "packed.npz", **arrays)
        np.savez(self.folder / "plain.npz", **arrays)
        self.file("m.safetensors", tensors(arrays))
        size = arrays["a"].nbytes
        for path, most in (("packed.npz", 1.5), ("plain.npz", 0.6), ("m.safetensors", 0.6)):
            tracemalloc.start()
            try:
                found = self.t.load(self.folder / path)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            self.assertLess(peak, most * size, path)
            np.testing.assert_array_equal(found["c"].numpy(), arrays["c"])
        for kind in (".npz", ".safetensors"):
            tracemalloc.start()
            try:
                self.t.save(self.folder / f"out{kind}", found)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            self.assertLess(peak, 1.5 * size, kind)

    def test_columns(self):
        try:
            from pyarrow import array, feather, float32, int64, list_, parquet, table
        except ImportError:
            self.skipTest("pyarrow is not installed")
        columns = table({
            "x": array([1.5, 2.5, None], float32()), "n": array([1, 2, 3], int64()),
            "v": array([[1, 2], [3, 4], [5, 6]], list_(int64(), 2)), "s": array(["a", "b", "c"]),
        })
        parquet.write_table(columns, self.folder / "t.parquet")
        feather.write_feather(columns, self.folder / "t.feather")
        for path in (self.folder / "t.parquet", self.folder / "t.feather"):
            found = self.t.load(path, only=["n", "v"], prefix="", replace=True)
            self.same(found["n"], np.array([1, 2, 3]))
            self.same(found["v"], np.array([[1, 2], [3, 4], [5, 6]]))
            self.assertEqual(self.names(), ["t/n", "t/v"])
            x = self.t.load(path, only=["x"], dtype="f4")["x"].numpy()
            np.testing.assert_array_equal(x, np.array([1.5, 2.5, np.nan], "f4"))
            for column in ("x", "s"):
                with self.assertRaisesRegex(ts.Unsupported, "missing|object"):
                    self.t.load(path, only=[column])
            path.write_bytes(path.read_bytes()[:-20])
            with self.assertRaises(ts.BadFile):
                self.t.load(path, only=["n"])

    # --- saving

    def test_what_is_saved_is_what_others_read(self):
        arrays = {t: RAW.view(t).reshape(2, -1) for t in TYPES}
        arrays |= {"empty": np.zeros((0, 4), "<f4"), "number": np.array(7, "<i8"),
                   "large": np.arange(3 * MIB, dtype="<i4")}
        kept = {key: self.t.put(array.view(ts.bfloat16) if key == "|V2" else array)
                for key, array in arrays.items()}
        for key, array in arrays.items():
            self.t.save(self.folder / "one.npy", kept[key])
            self.assertEqual((self.folder / "one.npy").read_bytes(), npy(array), key)
        self.t.save(self.folder / "all.npz", kept)
        self.t.save(self.folder / "all.safetensors", kept)
        with np.load(self.folder / "all.npz") as found:
            for read in (found, read_safetensors(self.folder / "all.safetensors")):
                self.assertEqual(list(read), list(arrays))
                for key, array in arrays.items():
                    self.assertEqual(read[key].tobytes(), array.tobytes())
                    self.assertEqual((read[key].shape, read[key].dtype), (array.shape, array.dtype))
        again = self.t.load(self.folder / "all.safetensors")
        for key, array in arrays.items():
            self.same(again[key], array)
        self.t.save(self.folder / "sum.npz", {"sum": kept["large"] + 1, "row": kept["large"][::2]})
        with np.load(self.folder / "sum.npz") as found:
            np.testing.assert_array_equal(found["sum"], arrays["large"] + 1)
            np.testing.assert_array_equal(found["row"], arrays["large"][::2])

    def test_a_file_is_replaced_at_the_end(self):
        path, link = self.folder / "x.npz", self.folder / "link.npz"
        path.write_bytes(b"before")
        path.chmod(0o660)
        link.symlink_to(path)
        x = self.t.put(RAW)
        gone = self.t.put(RAW, "gone")
        self.t.delete("gone")
        for name in ("x.npz", "x.safetensors", "new.npz"):
            with self.assertRaises(ts.BufferNotFound):
                self.t.save(self.folder / name, {"x": x, "gone": gone})
        self.assertEqual(path.read_bytes(), b"before")
        self.assertEqual({one.name for one in self.folder.iterdir()}, {"x.npz", "link.npz"})
        self.t.save(link, {"x": x})
        self.assertTrue(link.is_symlink())
        self.assertEqual(path.stat().st_mode & 0o777, 0o660)
        with np.load(path) as found:
            np.testing.assert_array_equal(found["x"], RAW)
        for name, what, error in (("x.bin", x, ValueError), ("x.npy", {"x": x}, TypeError),
                                  ("x.npz", x, TypeError), ("x.npz", {1: x}, TypeError),
                                  ("x.safetensors", {"__metadata__": x}, ValueError),
                                  ("x.npz", {"": x}, ValueError), ("x.npz", {"a\0": x}, ValueError),
                                  ("x.npz", {"a" * 70_000: x}, ValueError),
                                  ("no/x.npy", x, FileNotFoundError)):
            with self.assertRaises(error):
                self.t.save(self.folder / name, what)
        for name, what, text in (("x.npy", RAW, "x.npy: a ndarray, not"),
                                 ("x.npz", {"x": x, "here": RAW}, "'here' is a ndarray, not"),
                                 ("x.safetensors", {"here": 1.5}, "'here' is a float, not")):
            with self.assertRaisesRegex(TypeError, text):
                self.t.save(self.folder / name, what)
        os.mkfifo(self.folder / "fifo.npy")
        with self.assertRaisesRegex(ValueError, "not a regular file"):
            self.t.save(self.folder / "fifo.npy", x)
        self.assertTrue((self.folder / "fifo.npy").is_fifo())

    def test_asyncio(self):
        path = self.file("a.safetensors", tensors({"x": RAW, "y": RAW * 2}))

        async def work():
            async with await ts.aio.connect(self.server.address) as t:
                found = await t.load(path, prefix="")
                await t.save(self.folder / "b.npz", {"sum": found["x"] + found["y"]})
                await found["x"].delete()
                with self.assertRaises(ts.BufferExists):
                    await t.load(path, prefix="")

        asyncio.run(work())
        self.assertEqual(self.names(), ["a/y"])
        with np.load(self.folder / "b.npz") as found:
            np.testing.assert_array_equal(found["sum"], RAW * 3)


if __name__ == "__main__":
    python_outsider.main(__name__)
