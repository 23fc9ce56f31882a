#!/usr/bin/env python3
"""Runs the real `tessera` command against a real server on loopback. Every value is checked with
NumPy."""

import io
import json
import os
import pathlib
import queue
import select
import signal
import struct
import subprocess
import sys
import tempfile
import zipfile

import grpc
import numpy as np

import files_of_arrays
import outsider as o
from files_of_arrays import RAW, TYPES, archive, npy, read_safetensors, safetensors, tensors
from outsider import eventually
from relay import Relay
from terminal import Terminal

EMPTY = np.zeros((0, 4), "<f4")


class CliCase(o.Case):
    """A server, a folder, and methods that run the command."""

    FLAGS, DEVICE = ("--memory-limit", "2Gi"), None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.root = cls.folder
        cls.idle = queue.SimpleQueue()  # Servers that no case is using.

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.root))
        try:
            self.server = self.idle.get_nowait()
        except queue.Empty:
            self.server = o.Server(self.root, *self.FLAGS, device=self.DEVICE)
            self.addClassCleanup(self.server.kill)
        self.addCleanup(self.give_back)

    def give_back(self):
        if names := self.names():
            self.cli("rm", *names)
        self.idle.put(self.server)

    def run_cli(self, *arguments, server=None, **more):
        command = [o.Program.cli, "--server", server or self.server.address]
        return o.run(*command, *arguments, cwd=self.folder, **more)

    def start_cli(self, *arguments, server=None, **more):
        command = [o.Program.cli, "--server", server or self.server.address, *map(str, arguments)]
        process = subprocess.Popen(command, cwd=self.folder, **more)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def cli(self, *arguments, **more):
        process = self.run_cli(*arguments, **more)
        self.assertEqual(process.returncode, 0, process.stderr)
        return process.stdout

    def json(self, *arguments, **more):
        return json.loads(self.cli("--json", *arguments, **more))

    def names(self):
        return [buffer["name"] for buffer in self.json("ls")["buffers"]]

    def fails(self, code, reason, hint, *arguments):
        """Checks the exit code, two lines on stderr, and the same error in JSON."""
        process = self.run_cli(*arguments)
        self.assertEqual(process.returncode, code, process.stdout + process.stderr)
        lines = process.stderr.splitlines()
        self.assertEqual(len(lines), 2, process.stderr)
        self.assertTrue(lines[0].startswith("tessera: "), lines[0])
        self.assertTrue(lines[0].endswith(": " + reason), lines[0])
        self.assertIn(hint, lines[1])
        self.assertEqual(process.stdout, "")
        process = self.run_cli("--json", *arguments)
        self.assertEqual(process.returncode, code)
        error = json.loads(process.stdout)["error"]
        self.assertEqual(error["reason"] or error["code"], reason)
        return error

    def all_fail(self, code, *calls):
        """Checks each call, given as the reason, a part of the hint, and the arguments."""
        for reason, hint, *arguments in calls:
            with self.subTest(arguments):
                self.fails(code, reason, hint, *arguments)

    def save(self, name, array, **how):
        np.save(self.folder / f"{name}.npy", array, **how)
        return f"{name}.npy"

    def put(self, name, array, **more):
        self.cli("put", self.save("upload", array), "--name", name, "--replace", **more)

    def get(self, name):
        self.cli("get", name, "-o", "download.npy")
        return np.load(self.folder / "download.npy")

    def load(self, name):
        return np.load(self.folder / name)

    def on_terminal(self, *arguments, server=None, watch=None, **more):
        """Returns what the command writes on a terminal. watch is given the terminal before it is
        read."""
        server = server or self.server.address
        terminal = Terminal(o.Program.cli, "--server", server, *arguments, cwd=self.folder, **more)
        self.addCleanup(terminal.close)
        if watch is not None:
            watch(terminal.mine)
        self.assertEqual(terminal.wait(), 0, terminal.text)
        return terminal.text.decode()

    def relay(self, **how):
        relay = Relay(self.server.address, **how)
        self.addCleanup(relay.close)
        self.addCleanup(relay.silent.clear)
        return relay

    def bench(self, *arguments):
        """Returns the report, after the checks that apply to every report."""
        report = self.json("bench", *arguments)
        self.assertEqual(list(report), ["operation", "title", "device", "repeat", "unit", "work",
                                        "ceiling", "reference", "agree", "strategies", "skipped",
                                        "traffic"])
        self.assertEqual(report["device"], o.Program.device)
        self.assertIs(report["agree"], True)
        self.assertIn(report["reference"], [row["name"] for row in report["strategies"]])
        ceiling = report["ceiling"]
        for row in report["strategies"]:
            self.assertEqual(list(row), ["name", "calls", "median_us", "min_us", "max_us", "rate",
                                         "share", "roundoff", "difference", "agrees"])
            self.assertLessEqual(row["calls"], report["repeat"])
            times = [row[f"{which}_us"] for which in ("min", "median", "max")]
            self.assertEqual(times, sorted(times))
            self.assertAlmostEqual(row["rate"] * row["median_us"] * 1e-6, report["work"],
                                   delta=1e-6 * report["work"])
            share = ceiling and row["rate"] / ceiling["rate"]
            self.assertAlmostEqual(row["share"], share)
            self.assertIs(row["agrees"], True)
        self.assertEqual(self.json("ls", "tessera-cli/")["buffers"], [])
        return report

    def runs_here(self, operation, dtype):
        backend = o.Program.device.split(":")[0]
        return [row["name"] for row in self.json("strategies", operation)["strategies"]
                if row["backend"] == backend and row["available"] and dtype in row["dtypes"]]


class CliTest(CliCase):
    # --- Buffers -------------------------------------------------------------------------------

    def test_round_trips_are_the_same_bytes(self):
        raw = np.random.default_rng(0).integers(0, 256, 24 * 10, dtype=np.uint8)
        arrays = [np.asarray(raw.view(descr).reshape(2, 3, -1), order=order)
                  for descr in ("<f4", "<f8", "<f2", "|V2", "<i4", "<i8", "|u1", "|i1")
                  for order in ("C", "F")]
        arrays += [np.float32(3.5), EMPTY, np.arange(3_000_001, dtype="<i4")]
        for array in map(np.asarray, arrays):
            file = self.save("in", array)
            self.cli("put", file, "--name", "x", "--replace", "--streams", 3)
            back = self.get("x")
            self.assertEqual((back.dtype, back.shape), (array.dtype, array.shape))
            self.assertEqual(back.tobytes(), array.tobytes("C"))
            if array.flags.c_contiguous:
                self.assertEqual((self.folder / "download.npy").read_bytes(),
                                 (self.folder / file).read_bytes())

    def test_put_names_ttl_and_random(self):
        out = self.cli("put", self.save("some numbers", np.zeros((2, 3), "<f4")), "--ttl", "10m")
        self.assertEqual(out, "some_numbers: f32 [2, 3], 24 B on cpu\n")
        buffer = self.json("info", "some_numbers")["buffer"]
        self.assertIsNotNone(buffer["expire_time"])
        self.cli("put", "--random", "normal", "--shape", "1000x100", "--dtype", "f32", "--seed", 7,
                 "--name", "r")
        r = self.get("r")
        self.assertEqual((r.shape, r.dtype), ((1000, 100), np.float32))
        self.assertLess(abs(r.mean()), 0.02)
        self.assertLess(abs(r.std() - 1), 0.02)

    def file(self, name, data):
        (self.folder / name).write_bytes(data)
        return name

    def test_files_of_named_arrays(self):
        arrays = {t[1:]: RAW.view(t).reshape(2, -1) for t in TYPES}
        arrays |= {"empty": np.zeros((0, 4), "<f4"), "layer.0/w": np.arange(300_000.0),
                   "number": np.array(7, "<i8")}
        np.savez(self.folder / "n.npz", F=np.asfortranarray(np.arange(6.0).reshape(2, 3)), **arrays)
        self.file("s.safetensors", tensors(arrays))
        for file, name in (("n.npz", "n"), ("s.safetensors", "s")):
            answer = self.json("put", file, "--ttl", "10m", "--device", o.Program.device)
            names = {one["name"] for one in answer["buffers"]}
            self.assertEqual(names - {"n/F"}, {f"{name}/{key}" for key in arrays})
            self.assertTrue(all(one["expire_time"] for one in answer["buffers"]))
            for key, array in arrays.items():
                back = self.get(f"{name}/{key}")
                self.assertEqual((back.dtype, back.shape), (array.dtype, array.shape))
                self.assertEqual(back.tobytes(), array.tobytes())
        np.testing.assert_array_equal(self.get("n/F"), np.arange(6.0).reshape(2, 3))

        self.cli("get", "--prefix", "s/", "-o", "all.npz")
        self.cli("get", *(f"s/{key}" for key in arrays), "-o", "some.npz")
        out = self.cli("get", "--prefix", "s/", "-o", "all.safetensors")
        self.assertIn("all.safetensors: 2.3 MiB\n", out)
        with self.load("all.npz") as one, self.load("some.npz") as two:
            self.assertIsNone(one.zip.testzip())  # The CRC-32 of every member.
            for key, array in arrays.items():
                for read, name in ((one, key), (two, f"s/{key}"),
                                   (read_safetensors(self.folder / "all.safetensors"), key)):
                    self.assertEqual((read[name].dtype, read[name].shape),
                                     (array.dtype, array.shape))
                    self.assertEqual(read[name].tobytes(), array.tobytes())
        self.cli("put", "n.npz", "--name", "__metadata__", "--prefix", "y/", "--replace")
        self.cli("put", self.file("one.npy", npy(RAW)), "--name", "z/__metadata__")
        self.all_fail(2, ("BAD_OPTION", "--help", "get", "--prefix", "z/", "-o",
                          "no.safetensors"))
        self.assertFalse((self.folder / "no.safetensors").exists())
        self.cli("put", "all.npz", "--name", "again", "--prefix", "x/")
        np.testing.assert_array_equal(self.get("x/again/layer.0/w"), arrays["layer.0/w"])

    def test_what_the_server_would_refuse_replaces_nothing(self):
        self.put("f/a", RAW)
        self.put("f", RAW)
        name, big, rank = "n" * 127, 1 << 62, np.zeros((1,) * 9, "u1")
        shape = lambda *extents: safetensors({
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "U8", "shape": extents, "data_offsets": [1, 1]}}, b"a")
        empty = npy(np.zeros((0, 1), "<f8")).replace(b"(0, 1), }" + b" " * 18,
                                                     f"(0, {big}), }}".encode())
        for reason, file, data, *more in (
                ("BAD_NAME", "f.safetensors", tensors({"a": RAW * 2, name: RAW})),
                ("BAD_NAME", "f.npz", archive([("a.npy", npy(RAW)), (f"{name}.npy", npy(RAW))])),
                ("BAD_NAME", "f.npz", archive([("a.npy", npy(RAW)), ("bcd.npy", npy(RAW))]),
                 "--prefix", "p" * 124),
                ("BAD_SHAPE", "f.safetensors", tensors({"a": RAW * 2, "b": rank})),
                ("BAD_FILE", "f.safetensors", shape(0, 1 << 63)),
                ("BAD_SHAPE", "f.safetensors", shape(0, big, big)),
                ("BAD_SHAPE", "f.npz", archive([("a.npy", npy(RAW)), ("b.npy", empty)])),
                ("BAD_SHAPE", "f.npy", empty)):
            self.fails(4, reason, "", "put", self.file(file, data), "--replace", *more)
            self.assertEqual(self.names(), ["f", "f/a"])
            np.testing.assert_array_equal(self.get("f/a"), RAW)

    def test_a_refusal_in_the_middle_of_replaced_arrays(self):
        """What is stored already stays, because deleting it would not bring back what it
        replaced."""
        with o.Server(self.root, "--memory-limit", "1Mi") as small:
            for number, size in ((1, 48), (2, 2 << 20)):
                arrays = {"a": RAW * number, "b": np.full(size, number, "u1")}
                self.file("f.safetensors", tensors(arrays))
                ended = self.run_cli("put", "f.safetensors", "--replace", server=small.address)
            self.assertEqual(ended.returncode, 6, ended.stderr)
            self.assertIn("; stored before that: 1 array: ", ended.stderr)
            for name, want in (("f/a", RAW * 2), ("f/b", np.full(48, 1))):
                self.cli("get", name, "-o", "back.npy", server=small.address)
                np.testing.assert_array_equal(self.load("back.npy"), want)

    def test_a_folder_of_files(self):
        (self.folder / "model" / "more").mkdir(parents=True)
        for number in (1, 2):
            self.file(f"model/part {number}.safetensors", tensors({"w.0": RAW * number, "b": RAW}))
        self.file("model/x.npy", npy(RAW))
        self.file("model/README.md", b"ignored")
        out = self.cli("put", "model", "--prefix", "v1/")
        want = ["v1/part_1/b", "v1/part_1/w.0", "v1/part_2/b", "v1/part_2/w.0", "v1/x"]
        self.assertEqual(sorted(line.split(":")[0] for line in out.splitlines()), want)
        np.testing.assert_array_equal(self.get("v1/part_2/w.0"), RAW * 2)
        self.all_fail(9, ("BUFFER_EXISTS", "--replace", "put", "model", "--prefix", "v1/"))
        self.cli("put", "model", "--prefix", "v1/", "--replace")
        self.assertEqual(self.names(), want)
        self.all_fail(2, ("BAD_OPTION", "--help", "put", "model", "--name", "x"),
                      ("BAD_OPTION", "--help", "get", "v1/x", "v1/part_1/b", "-o", "x.npy"),
                      ("BAD_OPTION", "--help", "get", "-o", "x.npz"),
                      ("BAD_OPTION", "--help", "get", "v1/x", "v1/x", "-o", "x.npz"),
                      ("BAD_OPTION", "--help", "get", "--prefix", "none/", "-o", "x.npz"))
        self.all_fail(4, ("BAD_FILE", "savez", "put", "model/more"))
        # A failed upload undoes the uploads before it, and a wrong file is found before any upload.
        self.cli("rm", *want[:3], *want[4:])
        self.all_fail(9, ("BUFFER_EXISTS", "--replace", "put", "model", "--prefix", "v1/"))
        self.assertEqual(self.names(), [want[3]])
        self.file("model/y.npy", npy(RAW)[:-1])
        self.all_fail(4, ("BAD_NPY", "numpy.save", "put", "model", "--replace"))
        self.assertEqual(self.names(), [want[3]])
        self.file("before.npz", b"before")
        self.all_fail(3, ("BUFFER_NOT_FOUND", "ls", "get", want[3], "gone", "-o", "before.npz"))
        self.assertEqual((self.folder / "before.npz").read_bytes(), b"before")
        self.assertEqual(self.parts(), [])

    def test_hostile_files(self):
        f8 = {"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}
        bad = [(kind, data) for kind, files in files_of_arrays.hostile().items() for data in files]
        bad += [(".safetensors", safetensors(f8, b"a")),
                (".safetensors", tensors({"x": RAW.view("<u2")})),
                (".npz", archive([("a.npy", npy(RAW))], zipfile.ZIP_DEFLATED))]
        for number, (kind, data) in enumerate(bad):
            with self.subTest(f"{kind} {number}"):
                process = self.run_cli("--json", "put", self.file(f"bad{kind}", data))
                self.assertEqual(process.returncode, 4, process.stderr)
                self.assertIn(json.loads(process.stdout)["error"]["reason"],
                              ("BAD_FILE", "BAD_NPY", "BAD_DTYPE", "BAD_SHAPE"))
        os.mkfifo(self.folder / "pipe.npy")
        self.all_fail(4, ("BAD_NPY", "numpy.save", "put", "pipe.npy"))
        self.assertEqual(self.names(), [])

    def test_ls_info_rm(self):
        for name in ("b", "a/1", "a/2"):
            self.put(name, np.zeros((100, 256)))
        lines = self.cli("ls").splitlines()
        self.assertEqual([line.split()[0] for line in lines], ["NAME", "a/1", "a/2", "b"])
        self.assertIn("f64    [100, 256]  200 KiB  cpu", lines[1])
        self.assertEqual([b["name"] for b in self.json("ls", "a/")["buffers"]], ["a/1", "a/2"])
        self.assertIn("shape    [100, 256]\n", self.cli("info", "b"))
        self.cli("rm", "a/1", "b")
        self.assertEqual(self.names(), ["a/2"])
        error = self.fails(3, "BUFFER_NOT_FOUND", "tessera ls", "rm", "nothing", "a/2")
        self.assertEqual(error["metadata"]["name"], "nothing")
        self.assertEqual(self.names(), [])  # The other name was deleted.

    def test_server_info_strategies_health_version(self):
        info = self.json("info")
        self.assertEqual(info["devices"][0]["name"], "cpu")
        self.assertEqual(info["devices"][0]["buffer_limit_bytes"], 2 << 30)
        self.assertEqual(info["devices"][0]["waiting"], 0)
        self.assertIn("tessera-server", self.cli("info"))
        rows = self.json("strategies", "dot")["strategies"]
        self.assertEqual({row["operation"] for row in rows}, {"dot"})
        for row in rows:
            self.assertEqual(row["available"], not row["needs"], row)
            if row["backend"] == "cuda" and o.Program.device == "cpu":
                self.assertEqual(row["needs"], "a CUDA device")
        self.assertIn("cpu_serial", self.cli("strategies"))
        self.assertEqual(self.cli("health"), "serving\n")
        self.assertRegex(self.cli("--version"), r"^\d+\.\d+\.\d+\n$")

    # --- Operations ----------------------------------------------------------------------------

    def test_scalars(self):
        x = np.random.default_rng(1).standard_normal((30, 40)).astype("<f4")
        self.put("x", x)
        exact = x.astype(np.float64)
        # By default, short chains are added in the type of the operands.
        self.assertAlmostEqual(float(self.cli("dot", "x", "x")), np.sum(exact * exact), delta=1e-4)
        for op, value in (("sum", exact.sum()), ("mean", exact.mean()), ("min", x.min()),
                          ("max", x.max()), ("norm_l1", np.abs(exact).sum()),
                          ("norm_l2", np.linalg.norm(exact)), ("sum_squares", (exact**2).sum()),
                          ("variance", exact.var()), ("all", 1), ("any", 1)):
            self.assertAlmostEqual(float(self.cli("reduce", op, "x")), value, delta=1e-5, msg=op)
        self.assertEqual(int(self.cli("reduce", "argmin", "x")), x.argmin())
        rows = self.json("reduce", "all", "x", "--axes", "1")
        self.assertEqual((rows["dtype"], rows["data"]), ("i32", [1] * 30))
        answer = self.json("reduce", "argmax", "x", "--strategy", "cpu_serial", "--timing")
        self.assertEqual((answer["index"], answer["value"]), (x.argmax(), x.max()))
        self.assertEqual(answer["stats"]["strategy"], "cpu_serial")
        self.assertGreater(answer["stats"]["kernel_us"], 0)
        self.assertGreater(answer["traffic"]["sent_bytes"], 0)

    def test_windows_matmul_add_and_where_results_go(self):
        random = np.random.default_rng(2)
        a, b = (random.standard_normal(s).astype("<f4") for s in ((50, 20), (30, 20)))
        self.put("a", a)
        b_file = self.save("b", b)
        product = a.astype(np.float64) @ b.T
        self.cli("matmul", "a", f"file:{b_file}", "--transpose-b", "-o", "c.npy")
        np.testing.assert_allclose(self.load("c.npy"), product, rtol=1e-4, atol=1e-5)
        out = self.cli("matmul", f"file:{b_file}", "a", "--transpose-b", "--out", "c", "--ttl",
                       "5m")
        self.assertEqual(out, "c: f32 [30, 50], 5.9 KiB on cpu\n")
        ints = "file:" + self.save("ints", np.array([1, 2, 3], "<i4"))
        self.assertEqual(self.cli("window-sum", ints, "--radius", 1), "[3 6 5]\n")
        self.cli("add", "c", "c", "--out", "c", "--replace")
        np.testing.assert_allclose(self.get("c"), 2 * product.T, rtol=1e-4, atol=1e-5)
        answer = self.json("reduce", "argmin", "c", "--axes", "-1", "--keep-dims")
        self.assertEqual((answer["dtype"], answer["shape"]), ("i64", [30, 1]))
        self.assertEqual(np.ravel(answer["data"]).tolist(), product.T.argmin(1).tolist())

    def test_large_results_go_to_a_file(self):
        """Large results go to a file even if buffers expire soon."""
        i = np.arange(1500.0)
        add = ("add", "x@0:1500x1500:1x0", "x@0:1500x1500:0x1")
        self.put("x", i)
        self.fails(4, "RESULT_TOO_LARGE", "--out NAME", *add)
        brief = self.serve("--max-ttl", "30s").address
        self.cli("put", "upload.npy", "--name", "x", "--ttl", "30s", server=brief)
        for server in (self.server.address, brief):
            self.cli(*add, "-o", "sums.npy", server=server)
            np.testing.assert_array_equal(self.load("sums.npy"), i[:, None] + i)
        self.assertEqual(self.names(), ["x"])

    def test_printed_arrays(self):
        self.put("x", np.array([[1, -2.5], [float("nan"), float("inf")]]))
        self.put("zero", np.zeros((2, 2)))
        self.assertEqual(self.cli("add", "x", "zero"), "[[  1. -2.5]\n [ nan  inf]]\n")
        self.assertEqual(self.json("add", "x", "zero")["data"], [[1.0, -2.5], ["NaN", "Infinity"]])
        self.assertEqual(self.json("add", "x[..., ::-1]", "zero")["data"][0], [-2.5, 1])
        self.assertEqual(self.json("add", "x@1:1x2:0x-1", "zero[:1]")["data"], [[-2.5, 1]])
        self.put("long", np.arange(2000.0))
        self.assertEqual(self.cli("add", "long", "zero@0:2000:0"),
                         "[   0.    1.    2. ... 1997. 1998. 1999.]\n")

    def test_an_array_without_elements_is_printed_briefly(self):
        """However large its other extents are."""
        for shape in ((0,), (3, 0), (100_000, 0, 2), (1 << 40, 0)):
            self.put("x", np.zeros(shape, np.float32))
            for command in (("map", "a * 2", "x"), ("scan", "sum", "x"), ("sort", "x")):
                with self.subTest((shape, *command)):
                    text = "[]\n[]\n" if command[0] == "sort" else "[]\n"
                    self.assertEqual(self.cli(*command, timeout=20), text)
                    answer = self.json(*command, timeout=20)
                    answer = answer.get("values", answer)
                    self.assertEqual((answer["shape"], answer["data"]), (list(shape), []))

    def test_cp(self):
        x = (100 * np.random.default_rng(4).standard_normal((30, 40))).astype("<f4")
        self.put("x", x)
        self.assertEqual(self.cli("cp", "x", "y"),
                         f"y: f32 [30, 40], 4.7 KiB on {o.Program.device}\n")
        np.testing.assert_array_equal(self.get("y"), x)
        buffer = self.json("cp", "x[::-2, 5:7]", "y", "--replace")["buffer"]
        self.assertEqual((buffer["name"], buffer["shape"]), ("y", [15, 2]))
        np.testing.assert_array_equal(self.get("y"), x[::-2, 5:7])
        self.cli("cp", "x@0:40x30:1x40", "y", "--replace", "--ttl", "10m")
        np.testing.assert_array_equal(self.get("y"), x.T)
        self.assertIsNotNone(self.json("info", "y")["buffer"]["expire_time"])
        for dtype, name in (("f8", "f64"), ("f2", "f16"), ("i4", "i32"), ("i8", "i64")):
            self.cli("cp", "x", "y", "--replace", "--dtype", name, "--device", o.Program.device)
            np.testing.assert_array_equal(self.get("y"), x.astype(dtype))
        # A link outlives its source and has the same size.
        self.assertIn("4.7 KiB", self.cli("cp", "x", "same", "--link", "--ttl", "10m"))
        self.cli("rm", "x")
        np.testing.assert_array_equal(self.get("same"), x)

    def test_import(self):
        other = self.serve("--import-from", "127.0.0.1:*")
        self.put("x", np.zeros((3, 4)))
        said = self.cli("import", self.server.address, "x", "y", server=other.address)
        self.assertIn("y: f64 [3, 4], 96 B", said)
        self.fails(1, "SOURCE_NOT_ALLOWED", "--import-from", "import", other.address, "y")

    def program(self, *steps):
        path = self.folder / "program.json"
        path.write_text(json.dumps({"steps": steps}))
        return path

    def test_run(self):
        x = np.arange(24, dtype=np.float32).reshape(4, 6)
        self.put("x", x)
        y = self.save("y", x.T)
        path = self.program(
            {"matmul": {"a": "x", "b": f"file:{y}", "result": "scratch"}},
            {"reduce": {"op": "argmax", "x": "step:0", "axes": [1]}},
            {"add": {"a": "step:0@5:3:1", "b": {"buffer": "x", "view": {"shape": ["3"]}},
                     "result": "sum"}},
            {"dot": {"a": "x[0]", "b": "x[1]"}},
            {"matmul": {"a": "x", "b": "x", "transpose_b": True, "out_dtype": "f32"}},
            {"topk": {"x": "x", "k": 4, "values": "scratch", "indices": "scratch"}},
            {"map": {"operands": ["step:5", "step:5.indices"], "expression": "a + b"}},
            {"top_k": {"x": "x[0]", "k": 2, "smallest": True, "indices": "i"}},
            {"window-sum": {"x": "step:5.indices@0:4:1", "radius": 1}},
            {"scan": {"op": "sum", "x": "x", "axis": 0, "exclusive": True, "reverse": True}},
            {"sort": {"x": "x[0]", "descending": True}},
            {"take": {"x": "x", "indices": "step:5.indices@0:3:1", "mode": "clip"}},
            {"map": {"operands": ["x"], "expression": "a > 5", "result": "scratch"}},
            {"select": {"x": "x", "mask": "step:12", "values": {"none": True}}},
            {"histogram": {"x": "step:11", "even": {"count": 2, "low": -9, "high": 9}}},
            {"map": {"operands": ["x[0, :3]"], "expression": "f64(a)", "result": "scratch"}},
            {"histogram": {"x": "x", "edges": "step:15"}},
            {"sort": {"x": "x[0]", "values": "scratch", "indices": {"none": True}}},
            {"search_sorted": {"x": "step:17", "keys": "x[1]"}},
            {"sum_by_label": {"x": "x[0]", "labels": "step:18", "length": 99, "mode": "wrap"}},
            {"linalg": {"function": "solve", "x": "x[:2, :2]", "b": "x[:2, 2:4]"}})
        answer = self.json("run", path)
        steps = answer["steps"]
        product = x @ x.T
        self.assertTrue(steps[0]["scratch"])
        self.assertEqual(steps[1]["data"], product.argmax(1).tolist())
        self.assertEqual(steps[2]["buffer"]["name"], "sum")
        self.assertTrue(np.array_equal(self.get("sum"), product.ravel()[5:8] + x.ravel()[:3]))
        self.assertEqual(steps[3]["value"], float(x[0] @ x[1]))
        self.assertEqual(steps[4]["data"], product.tolist())
        self.assertTrue(steps[5]["values"]["scratch"] and steps[5]["indices"]["scratch"])
        self.assertEqual(steps[6]["data"], (x[:, :1:-1] + [5, 4, 3, 2]).tolist())
        self.assertEqual(steps[7]["values"]["data"], [0, 1])
        self.assertEqual(self.get("i").tolist(), [0, 1])
        self.assertEqual((steps[8]["dtype"], steps[8]["data"]), ("i64", [9, 12, 9, 5]))
        self.assertEqual(steps[9]["data"], (x[::-1].cumsum(0)[::-1] - x).tolist())
        self.assertEqual(steps[10]["values"]["data"], np.sort(x[0])[::-1].tolist())
        self.assertEqual(steps[11]["data"], x.ravel()[[5, 4, 3]].tolist())
        self.assertEqual(steps[13]["indices"]["data"], np.flatnonzero(x > 5).tolist())
        self.assertEqual(steps[14]["data"],
                         np.histogram(x.ravel()[[5, 4, 3]], 2, (-9, 9))[0].tolist())
        self.assertEqual(len(steps[16]["data"]), 2)
        places = np.searchsorted(np.sort(x[0]), x[1])
        self.assertEqual(steps[18]["data"], places.tolist())
        self.assertEqual(steps[19]["data"], np.bincount(places, x[0], 99).tolist())
        np.testing.assert_allclose(np.reshape(steps[20]["data"], (2, 2)),
                                   np.linalg.solve(x[:2, :2], x[:2, 2:4]), 1e-4, 1e-4)
        self.assertTrue(all(step["stats"]["strategy"] for step in steps))
        self.assertGreater(answer["wall_us"], 0)
        self.cli("rm", "sum", "i")
        lines = self.cli("run", path).splitlines()
        self.assertEqual(lines[0], "0: in scratch memory")
        self.assertEqual(lines[3], f"3: {int(x[0] @ x[1])}")
        self.assertIn("in scratch memory", lines[lines.index("5: in scratch memory") + 1])

    def test_errors_of_programs(self):
        self.put("x", np.ones(3, np.float32))
        path = self.program({"dot": {"a": "x", "b": "x"}}, {"dot": {"a": "x", "b": "nothing"}})
        process = self.run_cli("run", path)
        self.assertEqual(process.returncode, 3)
        self.assertEqual(process.stdout.splitlines(), ["0: 3", "1: BUFFER_NOT_FOUND"])
        self.assertIn("step: 1", process.stderr)
        steps = json.loads(self.run_cli("--json", "run", path).stdout)["steps"]
        self.assertEqual(steps[1]["error"]["reason"], "BUFFER_NOT_FOUND")
        for text, says in (
                ("", ""), ("[]", ""), ('{"steps": 3}', ""), ('{"steps": [3]}', ""),
                ('{"steps": [{"dot": 3}]}', ""), ('{"steps": [{"dot": {"a": "x", "c": "x"}}]}', ""),
                ('{"steps": [{"guess": {}}]}', ""),
                ('{"steps": [{"reduce": {"op": "guess", "x": "x"}}]}', ""), ("{" * 100000, ""),
                ('{"steps": [{"dot": 1e400}]}', "number overflow parsing '1e400'"),
                ('{"steps": [{"matmul": {"a": "x", "b": "x", "transpose_b": "yes"}}]}',
                 '"transpose_b" must be true or false'),
                ('{"steps": [{"topk": {"x": "x", "k": 1, "values": {"scratch": "no"}}}]}',
                 '"scratch" must be true or false'),
                ('{"stats": "t", "steps": []}', '"stats" must be true or false'),
                ('{"steps": [{"dot": {"a": "x", "b": "x", "a": "y"}}]}', '"a" twice'),
                ('{"steps": [{"matmul": {"transpose_b": true, "transposeB": false}}]}',
                 '"transposeB" twice'),
                ('{"steps": [], "steps": []}', '"steps" twice'),
                ('{"steps": ' + "[" * 100000 + "]" * 100000 + "}", "nested too deeply"),
                ('{"steps": [}', "line 1, column 12"), ("{}", 'no list called "steps"')):
            path.write_text(text)
            error = self.fails(4, "BAD_PROGRAM", 'a program is JSON', "run", path)
            self.assertIn(says, error["message"])
            self.assertNotIn("exception", error["message"])
        self.all_fail(4, *(("BAD_PROGRAM", "a program is JSON", "run", wrong)
                           for wrong in (self.folder, "missing.json")))
        error = self.fails(4, "BAD_PROGRAM", "a program is JSON", "run", "/dev/zero")
        self.assertIn("larger than 64 MiB", error["message"])
        path = self.program({"reduce": {"op": "sum", "x": "step:x"}})
        self.fails(4, "BAD_OPERAND", "", "run", path)

    def test_large_files_of_json(self):
        """In quadratic time, these would take longer than a command may take."""
        count = 400_000
        step, keys = '{"dot": {}}', ", ".join(f'"k{i}": 0' for i in range(count))
        tensor = '{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'
        path = self.folder / "program.json"
        path.write_text(f'{{"steps": [{", ".join([step] * count)}]}}')
        self.fails(4, "TOO_MANY_STEPS", "", "run", path)
        path.write_text(f'{{"steps": [], {keys}}}')
        self.fails(4, "BAD_PROGRAM", "", "run", path)
        header = ", ".join(f'"{i}": {tensor}' for i in range(count // 2))
        path = self.file("many.safetensors", safetensors(f'{{{header}, "x": 1}}'.encode(), b""))
        self.fails(4, "BAD_FILE", "", "put", path)

    # NumPy has no such function. A stable sort orders as TopK does, and NaN follows all numbers.
    def topk(self, x, k, smallest=False, axis=-1):
        order = np.argsort(x if smallest else -x, axis, kind="stable")
        indices = np.take(order, np.arange(k), axis)
        return np.take_along_axis(x, indices, axis), indices

    def test_arrays_that_operations_make(self):
        x = np.random.default_rng(8).integers(-9, 9, (30, 40)).astype("<f4")
        rows, mask, order = np.array([[3, -1], [0, 29]]), x > 7, np.argsort(x, kind="stable")
        sums = x[::-1].cumsum(0)[::-1] - x
        # The codes are whole numbers from 0 to 4, so they can also serve as labels.
        codes = np.abs(x[0]).astype("<i4") % 5
        by_code, clipped = np.zeros((5, 40), "<f4"), np.zeros((9, 2), "<i8")
        np.add.at(by_code, codes[:30], x)
        np.add.at(clipped, np.clip(rows[:, 0], 0, 8), rows)
        some = dict(x=x, codes=codes, y=np.full(40, 2, "<f4"), rows=rows, mask=mask,
                    order=order[:, :3], far=np.array([0, 30]), edges=np.array([-5, 0, 0.5, 9]),
                    line=np.arange(-9, 9, 3, "<f4"), zeros=np.zeros((2, 2)))
        for name, array in some.items():
            self.put(name, array)
        # What the commands print as JSON: an array, or values and indices.
        for command, *want in (
                ("scan sum x", x.cumsum(1)),
                ("scan sum x --axis 0 --exclusive --reverse", sums),
                ("scan any x --axis=-2 --with y --expression a>b",
                 np.logical_or.accumulate(x > 2).astype("<i4")),
                ("take x rows --axis 0", x[rows]), ("take x rows[0]", x.take(rows[0])),
                ("take x order --axis 1 --along", np.take_along_axis(x, order[:, :3], 1)),
                ("topk x --k 5", *self.topk(x, 5)),
                ("topk x --k 5 --axis=-2 --smallest", *self.topk(x, 5, axis=0, smallest=True)),
                ("sort x", np.sort(x), order),
                ("sort x --axis 0 --descending --only values", np.sort(x, 0)[::-1], None),
                ("sort x --expression abs(a) --only values", np.sort(abs(x)), None),
                ("select x mask", x[mask], np.flatnonzero(mask)),
                ("select x[0] mask[0] --only indices", None, np.flatnonzero(mask[0])),
                ("histogram x --bins 7 --range -3,8", np.histogram(x, 7, (-3, 8))[0]),
                ("histogram rows --bins 5", np.array([1, 0, 0, 1, 0])),
                ("search-sorted line x", np.searchsorted(some["line"], x)),
                ("search-sorted line x --right", np.searchsorted(some["line"], x, "right")),
                ("sum-by-label rows rows[:,0] --length 9 --mode clip", clipped),
                ("sum-by-label x codes[:30] --length 5", by_code)):
            answer = self.json(*command.split())
            found = [answer] if len(want) == 1 else [answer.get(n) for n in ("values", "indices")]
            for got, array in zip(found, want):
                with self.subTest(command):
                    if array is None:
                        self.assertIsNone(got)
                        continue
                    dtype = {"<f4": "f32", "<i4": "i32", "<i8": "i64"}[array.dtype.str]
                    self.assertEqual((got["dtype"], got["shape"]), (dtype, list(array.shape)))
                    self.assertEqual(got["data"], array.tolist())
        # What the commands print.
        for command, said in (
                ("topk x[0,:5] --k 2", "{}\n{}".format(*self.topk(x[0, :5], 2))),
                ("scan max x[0,:4]", np.maximum.accumulate(x[0, :4])),
                ("sort x[0,:4] --only values", np.sort(x[0, :4]))):
            self.assertEqual(self.cli(*command.split()), f"{said}\n")
        # What the commands store.
        count, (largest, places) = mask.sum(), self.topk(x, 7)
        for command, said, name, want in (
                ("scan sum x --axis 0 --exclusive --reverse --out s", "s: f32 [30, 40], 4.7 KiB",
                 "s", sums),
                ("take x rows --axis=-1 --mode clip --out t", "t: f32 [30, 2, 2], 480 B", "t",
                 x.take(rows, 1, mode="clip")),
                ("sort x --only indices --indices-out i", "i: i64 [30, 40], 9.4 KiB", "i", order),
                ("select x mask --only values --out v", f"v: f32 [{count}], {4 * count} B", "v",
                 x[mask]),
                ("topk x --k 7 --out w", "w: f32 [30, 7], 840 B", "w", largest),
                ("topk x --k 7 --indices-out p", "p: i64 [30, 7], 1.6 KiB", "p", places),
                ("histogram x edges --out h", "h: i64 [3], 24 B", "h",
                 np.histogram(x, some["edges"])[0])):
            with self.subTest(command):
                self.assertIn(f"{said} on {o.Program.device}\n", self.cli(*command.split()))
                np.testing.assert_array_equal(self.get(name), want)
        answer = self.json("topk", "x", "--k", 7, "--out", "w", "--indices-out", "p", "--replace",
                           "--ttl", "5m", "--timing")
        self.assertEqual(answer["indices"]["buffer"]["name"], "p")
        self.assertIsNotNone(answer["values"]["buffer"]["expire_time"])
        self.assertGreater(answer["stats"]["kernel_us"], 0)
        self.fails(9, "BUFFER_EXISTS", "--replace", "topk", "x", "--k", 7, "--out", "w")
        info = "tessera info"
        self.all_fail(4, *((reason, hint, *command.split()) for reason, hint, command in (
            ("BAD_K", "1 to 4096", "topk x --k=0"), ("BAD_K", "1 to 4096", f"topk x --k={1 << 40}"),
            ("BAD_AXES", info, "topk x --k 1 --axis 2"), ("BAD_AXES", info, "scan sum x --axis 2"),
            ("BAD_AXES", info, "sort x --axis 2"), ("BAD_AXES", info, "take x rows --axis 2"),
            ("BAD_INDEX", "--mode", "take x far --axis 0"), ("BAD_DTYPE", info, "take x x"),
            ("BAD_DTYPE", info, "select x x"), ("BAD_SHAPE", info, "select x[0] mask"),
            ("BAD_DTYPE", info, "histogram x x"), ("BAD_SHAPE", info, "search-sorted x y"),
            ("BAD_SHAPE", info, "sum-by-label x rows --length 3"),
            ("BAD_SHAPE", info, "linalg solve x x"), ("BAD_OPERAND", "NAME", "linalg qr x x"),
            ("BAD_MATRIX", "linalg svd", "linalg inverse zeros"),
            ("BAD_BINS", "--bins", "histogram rows"),
            ("BAD_BINS", "--range", "histogram x --bins 3 --range 1,1"),
            ("BAD_EXPRESSION", "--help", "scan sum x --expression a+"),
            ("BAD_EXPRESSION", "--help", "sort x --expression a+"))))
        for command in (
                "topk x --k 1 --replace", "topk x --k 1 --ttl 5m", "topk x --k 1 -o -",
                "topk x --k 1 -o one.npy --indices-output one.npy",
                *(f"sort x --only indices {flags}" for flags in ("--out y", "-o -", "--replace"))):
            self.fails(2, "BAD_OPTION", "--help", *command.split())

    def test_large_results_of_topk_go_to_files(self):
        x = np.random.default_rng(9).permutation(600_000).reshape(600, 1000)
        self.put("x", x)
        self.fails(4, "RESULT_TOO_LARGE", "--out NAME", "topk", "x", "--k", 900)
        self.cli("topk", "x", "--k", 900, "-o", "v.npy", "--indices-output", "i.npy")
        for name, want in zip("vi", self.topk(x, 900)):
            np.testing.assert_array_equal(self.load(f"{name}.npy"), want)
        self.assertEqual(self.names(), ["x"])

    def test_demo_classifies_by_one_program(self):
        demo = o.ROOT / "client" / "demo" / "demo.py"
        process = o.run(sys.executable, demo, "--cli", o.Program.cli, "--server",
                        self.server.address, timeout=300)
        self.assertEqual(process.returncode, 0, process.stdout[-2000:] + process.stderr)
        self.assertIn("PASSED: the same accuracy as NumPy", process.stdout)
        kinds = ("standardised-f32", "standardised-f64", "test", "train")
        self.assertEqual(sorted(self.names()), [f"digits/{kind}" for kind in kinds],
                         "intermediate results have no name")

    def neighbours(self, vectors, queries, k):
        """Returns squared distances and indices of the nearest vectors, computed by the
        definition."""
        x, q = (a.astype("f8" if a.dtype.kind == "f" else a.dtype) for a in (vectors, queries))
        return self.topk(((q[:, None] - x) ** 2).sum(axis=2), k, smallest=True)

    def test_search(self):
        random = np.random.default_rng(11)
        for dtype, tolerance in (("f4", 1e-4), ("f8", 1e-12), ("f2", 1e-3), ("i4", 0)):
            with self.subTest(dtype=dtype):
                vectors = (3 * random.standard_normal((500, 24))).astype(dtype)
                queries = (3 * random.standard_normal((7, 24))).astype(dtype)
                queries[2] = vectors[123]
                self.put("vectors", vectors)
                self.put("queries", queries)
                values, indices = self.neighbours(vectors, queries, 6)
                answer = self.json("search", "vectors", "--queries", "file:upload.npy", "--k", 6)
                self.assertEqual(answer["indices"]["data"], indices.tolist())
                self.assertEqual(answer["indices"]["dtype"], "i64")
                found = np.array(answer["distances"]["data"])
                np.testing.assert_allclose(found, values, rtol=tolerance, atol=500 * tolerance)
                self.assertGreaterEqual(found.min(), 0)
                self.assertEqual(found[2, 0], 0)
                # In floating point, distances of 0 are computed again from differences.
                self.assertEqual(answer["calls"], 1 if dtype == "i4" else 2)
                products = queries.astype("f8") @ vectors.T.astype("f8")
                values, indices = self.topk(products, 6)
                answer = self.json("search", "vectors", "--queries", "queries", "--k", 6,
                                   "--metric", "dot")
                self.assertEqual(answer["indices"]["data"], indices.tolist())
                np.testing.assert_allclose(answer["products"]["data"], values, rtol=1e-5, atol=1e-4)
        # Searches windows of both arrays, with printed and saved results. The last arrays are i4.
        values, indices = self.neighbours(vectors[100:300:2, ::2], queries[::-2, 12:], 3)
        words = ("search", "vectors[100:300:2, ::2]", "--queries", "queries[::-2, 12:]", "--k", 3)
        self.assertEqual(self.cli(*words), f"{indices}\n{values}\n")
        self.cli(*words, "-o", "i.npy", "--distances-output", "d.npy")
        np.testing.assert_array_equal(self.load("i.npy"), indices)
        np.testing.assert_array_equal(self.load("d.npy"), values)

    def test_a_search_of_many_queries_takes_several_calls(self):
        random = np.random.default_rng(12)
        n, q = 300_000, 70
        vectors = random.integers(-8_000, 8_000, (n, 4)).astype("<i4")
        queries = random.integers(-8_000, 8_000, (q, 4)).astype("<i4")
        self.put("vectors", vectors)
        self.put("queries", queries)
        answer = self.json("search", "vectors", "--queries", "queries", "--k", 2)
        # Each query has n products, and n sums of products and norms. One call computes the norms.
        scratch = min(2 << 30, self.json("info")["devices"][0]["scratch_limit_bytes"] // 2)
        block = scratch // (16 * n)
        self.assertEqual(answer["calls"], -(-q // block) + 1)
        for i in (0, block - 1, block, q - 1):
            values, indices = self.neighbours(vectors, queries[i:i + 1], 2)
            self.assertEqual(answer["indices"]["data"][i], indices[0].tolist())
            self.assertEqual(answer["distances"]["data"][i], values[0].tolist())
        self.assertEqual(len(answer["indices"]["data"]), q)
        self.assertEqual(self.names(), ["queries", "vectors"])

    def little_scratch(self, limit, **arrays):
        """Returns the address of a server that has the arrays and this limit on scratch
        memory."""
        server = self.serve("--scratch-limit", limit)
        for name, array in arrays.items():
            self.put(name, array, server=server.address)
        return server.address

    def test_a_search_of_one_query_among_many_vectors_takes_several_calls(self):
        random = np.random.default_rng(14)
        n, parts = 131_073, 3  # Each part takes half of 1 MiB.
        vectors = random.integers(-8, 8, (n, 3)).astype("<f4")
        vectors[-1] = vectors[70_000] = vectors[5]
        queries = np.array([vectors[5], [50, 50, 50]], "<f4")

        def check(result, want, calls, queries, *words):
            server = self.little_scratch("1Mi", vectors=vectors, queries=queries)
            answer = self.json("search", "vectors", "--queries", "queries", *words, server=server)
            found = [answer[name]["data"] for name in (result, "indices")]
            self.assertEqual(found, [part[: len(queries)].tolist() for part in want])
            self.assertEqual(answer["calls"], calls)

        want = self.neighbours(vectors, queries, 4096)
        self.assertIn(n - 1, want[1][0])
        for count in (1, 2):
            # With several queries, norms are computed only once. The first query has more than k
            # neighbours at distance 0, so its distances are computed again from differences.
            calls = count * parts + (count > 1) + parts
            check("distances", want, calls, queries[:count], "--k", 4096)
        # There are two parts, and their scores are the products.
        vectors = np.resize(vectors, (n + 65_535, 3))
        want = self.topk(queries.astype("f8") @ vectors.T.astype("f8"), 3)
        check("products", want, 2 * 2, queries, "--k", 3, "--metric", "dot")
        # 16-bit vectors are not converted to f32.
        vectors = random.integers(-8, 8, (20_000, 16)).astype("<f2")
        queries = random.integers(-8, 8, (1, 16)).astype("<f2")
        check("distances", self.neighbours(vectors, queries, 5), 1, queries, "--k", 5)

    def test_a_search_far_from_the_origin(self):
        """Vectors find themselves and their neighbours, wherever the vectors are, because the
        search computes differences."""
        cloud = np.random.default_rng(16).standard_normal((1000, 32))
        near, sign = 0.01 * cloud + 100, np.where(np.arange(1000) % 2, 1, -1)[:, None]
        outlier = near.copy()
        outlier[999] = -1e9
        lost = near.copy()
        lost[999, 3], lost[998, 4] = np.nan, np.inf
        for case, vectors in (("far", near.astype("f4")),
                              ("two clouds", (sign * near).astype("f4")),
                              ("an outlier", outlier.astype("f4")),
                              ("no numbers", lost.astype("f4")),
                              ("squares that vanish", (1e-25 * cloud).astype("f4")),
                              ("squares too large", (1e25 * cloud).astype("f4")),
                              ("f64", 1e9 * near), ("f16", (3 * cloud + 1000).astype("f2")),
                              ("i32", (1e8 * cloud + 1.9e9).clip(0, 2**31 - 1).astype("i4")),
                              ("duplicates", np.repeat(near[:20], 50, 0).astype("f4"))):
            with self.subTest(case):
                queries = vectors[:60:3]
                self.put("vectors", vectors)
                with np.errstate(all="ignore"):
                    values, indices = self.neighbours(vectors.astype("f8"), queries, 5)
                for k in (1, 5):
                    answer = self.json("search", "vectors", "--queries", "vectors[:60:3]", "--k", k)
                    self.assertEqual(answer["indices"]["data"], indices[:, :k].tolist())
                if abs(values).max() < 1e30 and values.max() > 1e-30:
                    np.testing.assert_allclose(answer["distances"]["data"], values, rtol=1e-3)

    def test_a_vector_with_nan_comes_last(self):
        self.put("vectors", np.array([[1, 0], [0.9, 0.1], [np.nan, 0]], "<f4"))
        self.put("queries", np.array([[1, 0]], "<f4"))
        for metric in ("l2", "dot"):
            for k in (1, 2, 3):
                answer = self.json("search", "vectors", "--queries", "queries", "--k", k,
                                   "--metric", metric)
                self.assertEqual(answer["indices"]["data"], [[0, 1, 2][:k]])

    def test_a_search_reads_its_arrays_as_they_were(self):
        """Replacing an array between two calls of a search is an error, and the search does not
        read the new array."""
        random = np.random.default_rng(15)
        arrays = {"vectors": random.integers(-8, 8, (70_000, 3)).astype("<f4"),
                  "queries": random.integers(-8, 8, (2, 3)).astype("<f4")}
        server = self.little_scratch("1Mi", **arrays)
        far = grpc.insecure_channel(server)
        self.addCleanup(far.close)
        for name in arrays:
            programs = []

            def forward(method, request, name=name, programs=programs):
                """Forwards to the server, which gets another array under the same name before the
                third program."""
                if method.endswith("/Execute"):
                    programs.append(method)
                    if len(programs) == 3:
                        self.put(name, arrays[name], server=server)
                return far.unary_unary(method)(request, timeout=20)

            with o.answering(forward) as near:
                words = ("search", "vectors", "--queries", "queries", "--k", 2)
                error = json.loads(self.run_cli("--json", *words, server=near).stdout)["error"]
            self.assertEqual(error["reason"], "VERSION_MISMATCH", error)

    def test_errors_of_search(self):
        self.put("x", np.zeros((10, 3), "<f4"))
        self.put("line", np.zeros(3, "<f4"))
        self.put("wide", np.zeros((2, 4), "<f4"))
        self.put("double", np.zeros((2, 3)))
        self.put("none", EMPTY[:, :3])
        types = "f32, f64, f16, bf16 or i32"
        error = self.fails(4, "BAD_DTYPE", "tessera info", "search", "x", "--queries", "double",
                           "--k", 1)
        self.assertIn(f"f32 and queries are f64: both must have the same type, one of {types}",
                      error["message"])
        for name, own, wide in (("i64", "<i8", "f64"), ("u8", "u1", "i32"), ("bool", "?", "i32")):
            self.put(name, np.ones((2, 3), own))
            for words in ((name, "--queries", "x"), ("x", "--queries", name)):
                error = self.fails(4, "BAD_DTYPE", "tessera info", "search", *words, "--k", 1)
                self.assertIn(f"a search takes {types}, and {name} is {name}", error["message"])
            self.assertIn(f"'tessera cp NAME COPY --dtype {wide}'", error["message"])
        self.fails(3, "BUFFER_NOT_FOUND", "tessera ls", "search", "x", "--queries", "q", "--k", 1)
        self.all_fail(4, *(
            (reason, hint, "search", vectors, "--queries", queries, "--k", k)
            for reason, hint, vectors, queries, k in (
                ("BAD_SHAPE", "tessera info", "x", "line", 1),
                ("BAD_SHAPE", "tessera info", "x", "wide", 1), ("BAD_K", "1 to 4096", "x", "x", 0),
                ("BAD_K", "1 to 4096", "x", "x", 11), ("BAD_K", "1 to 4096", "none", "x", 1))))
        answer = self.json("search", "x", "--queries", "none", "--k", 2)
        self.assertEqual(answer["distances"]["shape"], [0, 2])
        self.fails(2, "BAD_OPTION", "--help", "search", "x", "--queries", "x", "--k", 1, "-o", "-")

    def test_map(self):
        x, y = np.arange(12.0).reshape(3, 4) - 5, np.array([1, 0, -2, 3], "<i4")
        self.put("x", x)
        self.put("y", y)
        self.cli("map", "(a - b) * 2 + abs(c)", "x", "y", "x[:, 0:1]", "-o", "z.npy")
        np.testing.assert_array_equal(self.load("z.npy"), (x - y) * 2 + abs(x[:, 0:1]))
        out = self.cli("map", "f32(a // 3 ** 2)", "x", "--out", "z")
        self.assertEqual(out, f"z: f32 [3, 4], 48 B on {o.Program.device}\n")
        answer = self.json("map", "where(a == 0 or not a < 2, -a, 0.5)", "y", "--timing")
        self.assertEqual((answer["dtype"], answer["data"]), ("f64", [0.5, 0, 0.5, -3]))
        self.assertGreater(answer["stats"]["kernel_us"], 0)
        self.all_fail(4, ("BAD_EXPRESSION", "--help", "map", "a +", "x"),
                      ("BAD_EXPRESSION", "--help", "reduce", "sum", "x", "--expression", "a +"))

    def test_expressions_of_reduce_and_matmul(self):
        x, y = np.arange(12.0).reshape(3, 4) - 5, np.array([1.0, 0, -2, 3])
        self.put("x", x)
        self.put("y", y)
        self.assertEqual(self.cli("reduce", "sum", "x", "--expression", "a > b", "--with", "y"),
                         f"{(x > y).sum()}\n")
        answer = self.json("reduce", "max", "x", "--axes", "1", "--expression", "a * b + c",
                           "--with", "y", "x[:, 0:1]")
        self.assertEqual(answer["data"], (x * y + x[:, 0:1]).max(1).tolist())
        self.cli("matmul", "x", "x", "--transpose-b", "--expression", "f32(maximum(a + b, 0))",
                 "--with", "x[:, 0]", "-o", "z.npy")
        want = np.maximum(x @ x.T + x[:, 0], 0).astype("<f4")
        np.testing.assert_array_equal(self.load("z.npy"), want)
        self.assertEqual(self.run_cli("reduce", "sum", "x", "--with", "y").returncode, 2)
        path = self.program(
            {"reduce": {"op": "mean", "x": "x", "axes": [0], "result": "scratch"}},
            {"reduce": {"op": "sum", "x": "x", "expression": "(a - b) ** 2", "with": ["step:0"]}},
            {"map": {"operands": ["x", "step:0"], "expression": "a * b"}})
        steps = self.json("run", path)["steps"]
        self.assertAlmostEqual(steps[1]["value"], ((x - x.mean(0)) ** 2).sum())
        np.testing.assert_allclose(steps[2]["data"], x * x.mean(0))

    def test_types_of_a_byte(self):
        mask = np.array([[True, False, True], [False, False, True]])
        self.put("mask", mask)
        self.assertEqual(self.cli("reduce", "sum", "mask"), "3\n")
        self.assertEqual(self.json("map", "not a", "mask")["data"], (~mask).tolist())
        self.assertEqual(self.cli("map", "a", "mask[0]"), "[ true false  true]\n")
        for dtype, name in (("?", "bool"), ("u1", "u8"), ("i1", "i8")):
            x = (np.arange(240) - (name == "i8") * 120).astype(dtype)
            self.put("x", x)
            self.assertEqual(self.json("info", "x")["buffer"]["dtype"], name)
            self.cli("cp", "x", "wide", "--dtype", "f32", "--replace")
            self.cli("cp", "wide", "back", "--dtype", name, "--replace")
            self.assertEqual(self.get("back").dtype, x.dtype)
            np.testing.assert_array_equal(self.get("back"), x)
        self.cli("put", "--random", "normal", "--shape", 5000, "--dtype", "i8", "--name", "random")
        self.assertGreater(len(np.unique(self.get("random"))), 120)
        error = self.fails(4, "BAD_DTYPE", "tessera info", "topk", "x", "--k", "2")
        self.assertIn("cast them first", error["message"])

    # --- Comparing strategies ------------------------------------------------------------------

    def test_chart_of_bench(self):
        self.put("x", np.ones(100_000))
        command = ("bench", "dot", "x", "x", "--repeat", 3)
        lines = self.cli(*command).splitlines()
        self.assertEqual(lines[:2], [f"dot of x and x, f64 [100000] on {o.Program.device}",
                                     "median device time of 3 interleaved calls"])
        self.assertRegex(lines[2], r"^ceiling: \d+\.\d GB/s, read by the server's dot of two ")
        for line, name in zip(lines[5:], self.runs_here("dot", "f64")):
            self.assertRegex(line, rf"^{name} +\d+\.\d +\d+\.\d\d +\d+ %( +#+)?$")
            self.assertLessEqual(len(line), 80)
        self.assertEqual(lines[-1], "All results agree within the strategies' error bounds.")
        # On a terminal, bars consist of blocks if it can display them, and lines fill its width.
        for locale, filled in (("C.UTF-8", "█"), ("C", "#")):
            rows = self.on_terminal(*command, columns=50, LC_ALL=locale).splitlines()[5:]
            rows = rows[:rows.index("")]
            self.assertTrue(any(row.endswith(filled) and len(row) == 50 for row in rows), rows)

    # --- Failures ------------------------------------------------------------------------------

    def test_usage(self):
        for line in (
                "", "dot x", "reduce magic x", "put x.npy --ttl soon", "--timeout -3 ls", "put",
                "put --random normal --name x", "add a b --out c -o d.npy", "add a b --replace",
                "reduce sum x --axes a", "reduce sum x --out y", "cp x", "cp x y --dtype f8",
                "window-sum x", "bench", "topk x", "topk x --k all", "search x --k 3",
                "topk x --k 1 --out y -o y.npy", "scan mean x", "scan x",
                "take x", "take x i --mode raise", "select x", "histogram x --range 3",
                "histogram x e --bins 3", "search-sorted x",
                "sum-by-label x i", "sum-by-label x --length 3", "linalg x", "linalg magic x",
                "search x --queries q --k 3 --metric cosine",
                "bench order x", "sort x --only both", "bench dot x", "bench reduce magic x",
                "bench dot x x --repeat 0"):
            self.assertEqual(self.run_cli(*line.split()).returncode, 2, line)
        for says, *arguments in (
                ("'tessera nope' is not a command; the commands are put, get,", "nope", "x"),
                ("'tessera bench nope' is not a command; the commands are dot, reduce,",
                 "bench", "nope"),
                (r"'tessera \x1b[31m' is not a command", "\x1b[31m"),
                ("'-a' is not an option; after --, it is an argument", "map", "-a", "x"),
                ("'--nope' is not an option", "--nope"), ("A subcommand is required",)):
            process = self.run_cli(*arguments)
            self.assertEqual(process.returncode, 2, arguments)
            self.assertTrue(process.stderr.startswith(says), process.stderr)
        self.assertNotIn("complete,", self.run_cli("nope").stderr)
        self.assertIn("List the strategies", self.cli("--help"))
        for command in ("put", "search", "bench", "bench topk"):
            self.assertIn("Exit codes:", self.cli(*command.split(), "--help"))

    def test_output_that_cannot_be_written_is_an_error(self):
        self.put("x", np.ones(3, "<f4"))
        for line in ("--help", "--version", "put --help", "bench topk --help", "completion bash",
                     "complete ls", "token", "ls", "--json ls", "info", "info x", "strategies",
                     "dot x x", "add x x", "add x x -o -", "get x -o -", "cp x y",
                     "top --once", "bench dot x x --repeat 1", "health", "--json dot x nothing"):
            with self.subTest(line), open("/dev/full", "wb") as full:
                process = self.start_cli(*line.split(), stdout=full, stderr=subprocess.PIPE)
                errors = process.communicate(timeout=60)[1].decode()
                self.assertGreater(process.returncode, 0, errors)
                self.assertIn("tessera: ", errors)

    def test_values_that_are_no_numbers_or_too_large(self):
        self.put("x", np.zeros(3, "<f4"))
        forms = "is not a duration above 0 such as 90 (seconds), 500ms, 10m or 1h30m"
        far = 10**20
        for says, *arguments in (
                (f"--timeout: 'nan' {forms}, or inf", "--timeout", "nan", "ls"),
                (f"--interval: 'inf' {forms}\n", "top", "--once", "--interval", "inf"),
                (f"--ttl: 'nan' {forms}\n", "put", "upload.npy", "--ttl", "nan"),
                (f"--ttl: '1e300' {forms}\n", "cp", "x", "y", "--ttl", "1e300"),
                (f"--radius: '-{far}' does not fit", "window-sum", "x", f"--radius=-{far}"),
                (f"--radius: '{far}' does not fit", "bench", "window-sum", "x", "--radius", far),
                (f"--k: '{2**63}' does not fit", "topk", "x", "--k", 2**63),
                (f"--version: '{2**64}' does not fit", "rm", "x", "--version", 2**64),
                ("--seed: '-1' is not a whole number of 0 or more", "put", "--random", "ones",
                 "--shape", 3, "--name", "y", "--seed", -1),
                (f"--block-size: Value -{2**64 - 1} not in range", "dot", "x", "x",
                 f"--block-size=-{2**64 - 1}"),
                (f"--seed: '{far}' does not fit", "put", "--random", "ones", "--shape", 3, "--name",
                 "y", "--seed", far)):
            process = self.run_cli(*arguments)
            self.assertEqual(process.returncode, 2, (arguments, process.stderr))
            self.assertTrue(process.stderr.startswith(says), process.stderr)
        self.cli("--timeout", "inf", "window-sum", "x", "--radius", 2**63 - 1)

    def test_addresses_that_are_none_are_refused_at_once(self):
        host, port = self.server.address.split(":")
        wrong = f"{host}:{int(port) + 65536}"
        for address, says in (
                ("http://127.0.0.1:1", "'http://127.0.0.1:1' is not a server address"),
                (f"{self.server.address},{wrong}", "has a port above 65535")):
            process = self.run_cli("--timeout", "inf", "ls", server=address)
            self.assertEqual(process.returncode, 2, process.stderr)
            self.assertIn(says, process.stderr)

    def test_blanks_and_marks_at_the_ends_of_variables_and_files(self):
        token = self.folder / "token"
        token.write_bytes(b"\xef\xbb\xbf a-token \r\n")
        for variables in (dict(TESSERA_SERVER=f"\ufeff {self.server.address}\n"),
                          dict(TESSERA_SERVER=self.server.address,
                               TESSERA_TOKEN="\ufeffa-token \r\n"),
                          dict(TESSERA_SERVER=self.server.address,
                               TESSERA_TOKEN_FILE=f"{token}\n")):
            process = o.run(o.Program.cli, "health", env=o.environment(**variables))
            self.assertEqual((process.stdout, process.stderr), ("serving\n", ""), variables)

    def test_only_the_error_is_printed(self):
        """gRPC does not log unusable credentials or failing connections."""
        empty, garbage = self.folder / "empty", self.folder / "garbage"
        empty.touch()
        garbage.write_text("no certificate\n")
        for reason, *words in (("BAD_CREDENTIALS", "--token-file", empty),
                               ("BAD_CREDENTIALS", "--tls-ca", empty),
                               ("BAD_CREDENTIALS", "--tls-ca", garbage),
                               ("UNREACHABLE",)):
            process = self.unreached(*words, "ls", server="127.0.0.1:1")
            self.assertEqual(len(process.stderr.splitlines()), 2, process.stderr)
            self.assertIn(reason, process.stderr)

    def test_health_of_a_process_on_a_free_port(self):
        # `health --process` reads only the command line and the environment, so any program with
        # --listen in its arguments will do.
        command = ["/bin/sh", "-c", "read line", "sh", "--listen", "127.0.0.1:0,unix:/nowhere"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            asked = self.run_cli("health", "--process", process.pid)
            process.communicate()
        self.assertEqual(asked.returncode, 2, asked.stderr)
        self.assertIn("chose a free port", asked.stderr)
        self.assertIn("--server", asked.stderr)

    def test_advice_leads_somewhere(self):
        """If the client itself refuses a request, the advice does not mention the server's log."""
        self.put("x", np.zeros(3, "<f4"))
        self.fails(4, "BAD_EXPRESSION", "operand 0 is a, 1 is b", "map", "a + b", "x")
        process = self.run_cli("ls", server="gpu.example.org:50051",
                               env=o.environment(TESSERA_TOKEN="t"))
        self.assertIn("BAD_CREDENTIALS\n  --tls-ca, ", process.stderr)
        self.assertNotIn("tls_ca", process.stderr)
        self.assertNotIn("log", process.stderr)

    def test_errors_of_operations(self):
        self.put("x", np.zeros(3, "<f4"))
        self.put("y", np.zeros(4, "<f4"))
        ints = "file:" + self.save("ints", np.zeros((3, 3), "<i4"))
        large = "file:" + self.save("large", np.zeros(1 << 20))
        put = ("put", "upload.npy", "--name")
        (self.folder / "text.npy").write_text("hello")
        self.all_fail(3,
                      ("FILE_NOT_FOUND", "path", "put", "nothing.npy"),
                      ("BUFFER_NOT_FOUND", "tessera ls", "dot", "x", "nothing"),
                      ("BUFFER_NOT_FOUND", "tessera ls", "get", "nothing", "-o", "x.npy"))
        self.all_fail(
            4,
            ("BAD_SHAPE", "tessera info", "dot", "x", "y"),
            ("BAD_VIEW", "tessera info", "dot", "x[5]", "y"),
            ("BAD_OPERAND", "NAME[", "dot", "x[", "y"),
            ("UNKNOWN_STRATEGY", "cpu_serial", "dot", "x", "x", "--strategy", "magic"),
            ("BAD_RADIUS", "--radius", "window-sum", "x", "--radius=-1"),
            ("BAD_LAUNCH", "without the option", "dot", "x", "x", "--strategy", "cpu_serial",
             "--block-size", 32),
            ("BAD_OPERAND", "", "cp", ints, "z"),
            ("BAD_LINK", "", "cp", "x[1]", "z", "--link"),
            ("BAD_NAME", "128 characters", *put, "a b"),
            ("BAD_DEVICE", "info", *put, "z", "--device", "tpu"),
            ("OPERAND_TOO_LARGE", "put", "dot", large, "x"),
            ("BAD_NPY", "numpy.save", "put", "text.npy"),
            ("BAD_DTYPE", "numpy.save", "put", self.save("complex", np.zeros(3, "c8"))),
            ("BAD_SHAPE", "numpy.save", "put", self.save("deep", np.zeros((1,) * 9))))
        self.assertIn("complex.npy: ", self.run_cli("put", self.folder / "complex.npy").stderr)
        self.all_fail(9, ("BUFFER_EXISTS", "--replace", "cp", "x", "y"),
                      ("BUFFER_EXISTS", "--replace", *put, "x"))
        self.fails(5, "STRATEGY_UNSUPPORTED", "strategies", "matmul", ints, ints, "--strategy",
                   "cpu_library")
        self.fails(5, "FILE_ERROR", "path", "get", "x", "-o", "no/such/folder/x.npy")
        self.fails(6, "QUOTA_EXCEEDED", "4 GiB requested", "put", "--random", "zeros", "--shape",
                   1 << 30, "--name", "z")

    def unreached(self, *words, server):
        """Returns a process that cannot reach the server, and has tried to before its timeout."""
        def tried():
            process = self.run_cli("--timeout", "0.5", *words, server=server)
            return process.returncode != 8 and process

        return eventually(tried)

    def test_unreachable_server(self):
        address = "127.0.0.1:1"
        process = self.unreached("health", server=address)
        self.assertEqual(process.returncode, 7)
        self.assertIn(f"is tessera-server running at {address}", process.stderr)
        self.assertIn("the connection was refused", process.stderr)
        process = self.unreached("ls", server="no-such-name.invalid:1")
        self.assertIn("the name does not resolve", process.stderr)

    def test_an_interrupted_upload_leaves_nothing(self):
        for streams in (1, 4):
            relay = self.relay(request_hold=o.MI)
            process = self.start_cli("put", "--random", "zeros", "--shape", 1 << 24, "--streams",
                                     streams, "--name", "x", server=relay.where,
                                     stderr=subprocess.DEVNULL)
            self.assertTrue(relay.silent.wait(60))
            process.send_signal(signal.SIGINT)
            relay.silent.clear()
            self.assertEqual(process.wait(30), 8)
            self.assertTrue(eventually(lambda: not self.names()))

    def test_no_control_character_reaches_the_terminal(self):
        header = b"{'descr': '\x1b[31m\xc2\x9b\x07', 'fortran_order': False, 'shape': (1,), }\n"
        evil = "evil\x1b]0;title\x07\n.npy"
        (self.folder / evil).write_bytes(
            b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header)
        self.put("x", np.zeros(3))
        for arguments in (("put", evil), ("put", "no\x1b[31m.npy"), ("info", "x\x1b[31m"),
                          ("dot", "x", "x", "--strategy", "\x1b[31m"),
                          ("ls", "\x1b[31m"), ("get", "x", "-o", "ok\x1b[31m.npy"),
                          ("--json", "get", "y\x9b", "-o", "y.npy")):
            ended = self.run_cli(*arguments)  # The output is still UTF-8.
            for text in (ended.stdout, ended.stderr):
                controls = [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]
                self.assertEqual(controls, [], text)
        self.assertIn("\\x1b[31m", self.run_cli("info", "x\x1b[31m").stderr)

    def test_the_list_of_the_documentation(self):
        text = (o.ROOT / "docs" / "cli.md").read_text()
        block = text.split("```console\n")[1].split("```")[0]
        lines = [line[2:] for line in block.splitlines() if not line.endswith("&")]
        self.assertGreater(len(lines), 20)
        (self.folder / "client").symlink_to(o.ROOT / "client")
        path = f"{pathlib.Path(o.Program.cli).parent}:{os.environ['PATH']}"
        ended = o.run("bash", "-ec", "\n".join(lines), cwd=self.folder, timeout=600,
                      env=o.environment(TESSERA_SERVER=self.server.address, PATH=path))
        self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
        self.assertIn("v1/a/digits", self.names())

    # --- Where arrays go -----------------------------------------------------------------------

    def parts(self):
        return [path.name for path in self.folder.iterdir() if path.name.endswith(".part")]

    def test_arrays_go_to_pipes_and_standard_output(self):
        x = np.arange(300_000, dtype="<f4")
        self.put("x", x)
        # A redirection appends if the shell opens the file in that mode.
        with open(self.folder / "out", "wb") as out:
            out.write(b"before")
            out.flush()
            self.assertEqual(self.start_cli("get", "x", "-o", "-", stdout=out).wait(60), 0)
        written = (self.folder / "out").read_bytes()
        self.assertEqual(written[:6], b"before")
        np.testing.assert_array_equal(np.load(io.BytesIO(written[6:])), x)
        for path in ("-", "/dev/stdout", "/dev/fd/1"):
            process = self.start_cli("add", "x[:5]", "x[:5]", "-o", path, stdout=subprocess.PIPE)
            array = np.load(io.BytesIO(process.communicate()[0].split(b"/dev/fd/1:")[0]))
            self.assertEqual(process.returncode, 0)
            np.testing.assert_array_equal(array, 2 * x[:5])
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        with open(self.folder / "copy.npy", "wb") as copy:
            reader = subprocess.Popen(["cat", str(fifo)], stdout=copy)
            try:
                self.cli("get", "x", "-o", fifo)
                self.assertEqual(reader.wait(30), 0)
            finally:
                reader.kill()
        np.testing.assert_array_equal(self.load("copy.npy"), x)
        self.assertTrue(fifo.is_fifo())
        self.assertEqual(self.parts(), [])
        self.assertEqual(self.run_cli("--json", "get", "x", "-o", "-").returncode, 2)

    def test_readers_that_stop(self):
        self.cli("put", "--random", "zeros", "--shape", "10000000", "--name", "x")

        def get(timeout):
            process = self.start_cli("--timeout", timeout, "get", "x", "-o", "-",
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            process.stdout.read(100)
            return process

        # The reader closes the pipe early, so the process ends like any writer to a closed pipe.
        process = get("60s")
        process.stdout.close()
        self.assertEqual(process.wait(30), -signal.SIGPIPE)
        process.stderr.close()
        # A reader that stalls occupies nothing on the server for longer than --timeout.
        downloads = lambda: self.server.client().budget("downloads").used
        self.assertTrue(eventually(lambda: not downloads()))
        process = get("5s")
        self.assertTrue(eventually(lambda: not downloads()))
        self.assertIsNone(process.poll())
        _, errors = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 8, errors)
        self.assertIn(b"STALLED", errors)

    def test_the_part_of_a_file_is_no_way_in(self):
        self.put("x", np.arange(3.0))
        victim = self.folder / "victim"
        victim.write_text("precious")

        # The process makes the links before it becomes the client, so the links contain the right
        # process id. An attacker could only guess this id.
        lay_links = ('for name in "out.npy.$$.part" out.npy.part .out.npy.part; do '
                     'ln -s victim "$name" || exit; done; exec "$@"')
        get = (o.Program.cli, "-s", self.server.address, "get", "x", "-o", "out.npy")
        ended = o.run("sh", "-c", lay_links, "sh", *get, cwd=self.folder, umask=0o027)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertTrue((self.folder / "out.npy.part").is_symlink())
        self.assertEqual(victim.read_text(), "precious")
        out = self.folder / "out.npy"
        self.assertFalse(out.is_symlink())
        np.testing.assert_array_equal(np.load(out), np.arange(3.0))
        self.assertEqual(out.stat().st_mode & 0o777, 0o640)  # The umask applies.

    def test_an_interrupted_download_leaves_no_file(self):
        self.cli("put", "--random", "zeros", "--shape", 1 << 24, "--name", "x")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            relay = self.relay(hold=o.MI)
            process = self.start_cli("get", "x", "-o", "large.npy", server=relay.where,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.assertTrue(relay.silent.wait(60))
            self.assertTrue(eventually(self.parts))
            process.send_signal(number)
            self.assertEqual(process.wait(30), 8)  # The connection is still silent.
            self.assertEqual(self.parts(), [])
            self.assertFalse((self.folder / "large.npy").exists())

    def test_a_limit_on_the_size_of_files_leaves_no_file(self):
        self.put("x", np.zeros(4096))
        for file in ("out.npy", "out.npz", "out.safetensors"):
            ended = o.run("prlimit", "--fsize=8192", o.Program.cli, "-s", self.server.address,
                          "get", "x", "-o", file, cwd=self.folder)
            self.assertEqual(ended.returncode, 5, ended.stderr)
            self.assertIn("FILE_ERROR", ended.stderr)
            self.assertEqual(self.parts(), [])
            self.assertFalse((self.folder / file).exists())

    def test_progress_is_for_terminals(self):
        put = ("put", "--random", "zeros", "--shape", 1 << 25, "--name", "x", "--replace")
        relay = self.relay()

        def piece(terminal):
            """Lets a piece of the upload pass. Returns whether the command has written
            something."""
            passed = sum(relay.requests)
            relay.silent.clear()
            self.assertTrue(eventually(lambda: sum(relay.requests) > passed, pause=0))
            relay.silent.set()
            return select.select([terminal], [], [], 0)[0]

        def pieces(terminal):
            self.assertTrue(eventually(lambda: piece(terminal), pause=0.1))
            relay.silent.clear()

        shown = self.on_terminal(*put, server=relay.where, watch=pieces)
        self.assertRegex(shown, r"x +\d+% \[#*\.*\] .* of 128 MiB, .*/s")
        self.assertNotIn("[#", self.run_cli(*put).stderr)


class BenchTest(CliCase):
    """Compares strategies where memory is too small to measure how fast it can be read."""

    FLAGS = ("--memory-limit", "200Mi")

    def test_bench_of_every_operation(self):
        random = np.random.default_rng(7)
        n, side = 100_000, 60
        for dtype, size, wide in (("f32", 4, 4), ("bf16", 2, 2), ("i32", 4, 8)):
            for name, shape in (("x", n), ("y", n), ("m", (side, side))):
                self.put(name, 9 * random.standard_normal(shape))
                self.cli("cp", name, name, "--replace", "--dtype", dtype)
            self.put("rows", random.integers(-side, side, 7))
            self.put("all", np.ones((side, side), bool))
            self.put("labels", random.integers(-5, 5, side))
            self.put("ordered", np.arange(n) // 9)
            self.cli("cp", "ordered", "ordered", "--replace", "--dtype", dtype)
            for operation, arguments, unit, work in (
                    ("dot", ("dot", "x", "y"), "B/s", 2 * n * size),
                    ("dot", ("dot", "x", "x"), "B/s", n * size),
                    ("reduce", ("reduce", "argmin", "x[::-1]"), "B/s", n * size),
                    ("reduce_axes", ("reduce", "sum", "m", "--axes", "0"), "B/s",
                     side * side * size + side * wide),
                    ("matmul", ("matmul", "m", "m", "--transpose-b"),
                     "OP/s" if dtype == "i32" else "FLOP/s", 2 * side**3),
                    ("add", ("add", "x", "y"), "B/s", 3 * n * size),
                    ("window_sum", ("window-sum", "x", "--radius", "8"), "B/s",
                     n * size + n * wide),
                    ("map", ("map", "f64(a) * b + exp(c - c)", "m", "m[0]", "m"), "B/s",
                     side * side * (size + 8) + side * size),
                    ("top_k", ("topk", "m", "--k", 9, "--smallest", "--axis", 0), "B/s",
                     side * side * size + 9 * side * (size + 8)),
                    ("scan", ("scan", "sum", "m", "--axis", 0, "--reverse"), "B/s",
                     side * side * (size + wide)),
                    ("sort", ("sort", "m", "--axis", 0), "B/s", side * side * (2 * size + 8)),
                    ("take", ("take", "m", "rows", "--axis", 0), "B/s",
                     7 * (8 + 2 * side * size)),
                    ("select", ("select", "m", "all"), "B/s", side * side * (1 + 2 * size + 8)),
                    ("histogram", ("histogram", "x", "--bins", 3, "--range", "-9,9"), "B/s",
                     n * size + 3 * 8),
                    ("search_sorted", ("search-sorted", "ordered", "y"), "B/s",
                     n * (2 * size + 8)),
                    ("sum_by_label", ("sum-by-label", "m", "labels", "--length", 5), "B/s",
                     side * (8 + side * size) + 5 * side * wide),
                    *([("linalg", ("linalg", "qr", "m"), "B/s", 3 * side * side * size)]
                      if dtype == "f32" else [])):
                with self.subTest(dtype=dtype, operation=operation):
                    report = self.bench(*arguments, "--repeat", 3)
                    self.assertEqual(report["operation"], operation)
                    self.assertEqual((report["unit"], report["work"]), (unit, work))
                    # A strategy may refuse a problem of a type that it takes. The other strategies
                    # are listed in order.
                    skipped = [row["name"] for row in report["skipped"]]
                    self.assertEqual([row["name"] for row in report["strategies"]],
                                     [name for name in self.runs_here(operation, dtype)
                                      if o.Program.device == "cpu" or name not in skipped])
                    self.assertEqual({row["calls"] for row in report["strategies"]}, {3})
                    for skipped in report["skipped"]:
                        self.assertIn("needs ", skipped["reason"])

    def test_bench_of_chosen_strategies(self):
        self.put("i", np.ones((50, 50), "<i4"))
        mine = self.runs_here("matmul", "i32")[:2]
        # OpenBLAS supports neither integers nor other devices.
        chosen = [mine[1], "cpu_library", mine[0]]
        report = self.bench("matmul", "i", "i", "--strategy", ",".join(chosen))
        self.assertEqual([row["name"] for row in report["strategies"]], mine[::-1])
        self.assertEqual([row["calls"] for row in report["strategies"]], [20, 20])
        self.assertEqual([row["name"] for row in report["skipped"]], ["cpu_library"])
        if o.Program.device == "cpu":
            self.assertIsNone(report["ceiling"])
            # The vendor's rate is the ceiling, whether or not it was chosen.
            self.put("m", np.ones((50, 50)))
            for strategies in ("cpu_naive", "cpu_naive,cpu_library"):
                report = self.bench("matmul", "m", "m", "--strategy", strategies)
                self.assertIn("cpu_library", report["ceiling"]["source"])
                self.assertEqual(",".join(row["name"] for row in report["strategies"]), strategies)

    def test_bench_of_almost_nothing(self):
        self.put("none", EMPTY)
        self.bench("matmul", "none", "none", "--transpose-b", "--repeat", 1)
        for shape in ((), (0,)):
            self.put("x", np.full(shape, 2.5, "<f4"))
            for arguments in (("dot", "x", "x"), ("reduce", "product", "x"), ("add", "x", "x")):
                self.bench(*arguments, "--repeat", 1)

    def test_errors_of_bench(self):
        self.put("x", np.zeros(3, "<f4"))
        self.put("none", EMPTY)
        ints = "file:" + self.save("ints", np.zeros((3, 3), "<i4"))
        dot = ("bench", "dot", "x", "x", "--strategy")
        self.fails(5, "STRATEGY_UNSUPPORTED", "it needs", "bench", "matmul", ints, ints,
                   "--strategy", "cpu_library")
        self.fails(2, "BAD_OPTION", "--help", *dot, ",")
        self.all_fail(4, ("UNKNOWN_STRATEGY", "cpu_serial", *dot, "cpu_serial,magic"),
                      ("EMPTY_INPUT", "tessera info", "bench", "reduce", "max", "none"))
        if o.Program.device == "cpu":
            self.fails(4, "BAD_LAUNCH", "without the option", *dot, "cpu_serial", "--block-size",
                       64)


class ShardsTest(CliCase):
    """Buffers that are divided among devices."""

    FLAGS, DEVICE = (), "cpu:0,cpu:1,cpu:2"

    def test_placement(self):
        put = ("put", "--random", "normal", "--shape", "250x200", "--name")
        self.assertIn("on cpu:0,cpu:1,cpu:2", self.cli(*put, "x", "--placement", "all"))
        self.cli(*put, "alone")
        self.cli("cp", "x", "y", "--placement", "cpu:2,cpu:1")
        self.cli("cp", "x", "z", "--device", "cpu:1")
        self.cli("cp", "x", "same")
        self.cli("add", "x", "same", "--out", "sum", "--placement", "cpu:1,cpu:0")
        places = {b["name"]: [s["device"] for s in b["shards"]] or b["device"]
                  for b in self.json("ls")["buffers"]}
        self.assertEqual(places, {"x": ["cpu:0", "cpu:1", "cpu:2"], "y": ["cpu:2", "cpu:1"],
                                  "z": "cpu:1", "same": ["cpu:0", "cpu:1", "cpu:2"],
                                  "alone": "cpu:0", "sum": ["cpu:1", "cpu:0"]})
        self.assertRegex(self.cli("ls"), r"y .* cpu:2,cpu:1 ")
        self.assertIn("cpu:2,cpu:1", self.cli("info", "y"))
        shards = self.json("info", "y")["buffer"]["shards"]
        self.assertEqual([s["bytes"] for s in shards], [[0, 102400], [102400, 200000]])
        alone, shared = (self.json("dot", name, name) for name in ("alone", "x"))
        self.assertEqual(alone["value"], shared["value"])
        self.assertEqual((alone["stats"]["devices"], shared["stats"]["devices"]), (1, 3))
        timed = self.run_cli("dot", "x", "x", "--timing")
        self.assertIn("on cpu:0 and 2 more", timed.stderr)
        self.fails(4, "BAD_PLACEMENT", "info", *put, "w", "--placement", "cpu:0,cpu:0")
        for wrong in ((*put, "w", "--placement", "all", "--device", "cpu:0"),
                      ("add", "x", "x", "--placement", "all")):
            self.assertEqual(self.run_cli(*wrong).returncode, 2, wrong)


class DraftsTest(CliCase):
    def test_a_draft_is_seen_and_dropped_and_in_no_way(self):
        """If a client is killed during an upload with several streams, a draft remains."""
        x = np.arange(1000.0)
        self.put("x", x)
        live = self.json("info", "x")["buffer"]["version"]
        stub = self.server.client()
        first, second = (stub.create("x", x, replace=True).version for _ in range(2))
        self.assertEqual([d["version"] for d in self.json("info", "x")["drafts"]], [first, second])
        self.assertIn(f"draft    version {first}, writing, ", self.cli("info", "x"))
        np.testing.assert_array_equal(self.get("x"), x)
        self.cli("rm", "x", "--version", first)
        self.assertEqual([d["version"] for d in self.json("info", "x")["drafts"]], [second])
        self.assertEqual(self.json("info", "x")["buffer"]["version"], live)
        self.fails(5, "VERSION_MISMATCH", "tessera info", "rm", "x", "--version", first)
        for streams in (1, 4):
            self.cli("put", self.save("in", x + streams), "--name", "x", "--replace",
                     "--streams", streams)
            np.testing.assert_array_equal(self.get("x"), x + streams)
        self.assertRegex(self.json("info", "x")["buffer"]["crc32c"], "^[0-9a-f]{8}$")
        self.assertGreater(self.json("info", "x")["buffer"]["version"], second)
        self.cli("rm", "x")
        self.assertEqual(self.names(), [])

    def test_a_draft_of_a_new_name_is_left_out(self):
        self.put("p/x", RAW)
        self.server.client().create("p/y", RAW)
        ended = self.run_cli("get", "--prefix", "p/", "-o", "all.npz")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertEqual(ended.stderr, "p/y is left out, because its upload has not ended\n")
        with self.load("all.npz") as found:
            self.assertEqual(list(found), ["x"])
        ended = self.run_cli("get", "--prefix", "p/y", "-o", "all.npz")
        self.assertEqual(ended.returncode, 2, ended.stderr)
        self.assertIn("no complete buffers with the prefix 'p/y': BAD_OPTION", ended.stderr)


if __name__ == "__main__":
    o.main(jobs=4)
