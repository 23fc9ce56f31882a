#!/usr/bin/env python3
"""Tests service_bench against a server on the CPU: every operation, load and flag in short runs."""

import contextlib
import json
import subprocess

import outsider as o

BENCH = o.program_flag("--bench")
OPERATIONS = ["ping", "dot", "reduce", "matmul", "dots", "chain", "upload", "download"]
SHARED = ["upload_shared", "download_shared"]
SHORT = {"--seconds": "0.05", "--rounds": "2", "--callers": "2", "--transfer-mib": "1"}

def short_run(*flags):
    """Makes a run with fractions of a second for each measurement, unless the flags say
    otherwise."""
    short = (word for pair in SHORT.items() if pair[0] not in flags for word in pair)
    return o.run(BENCH, *short, *flags)


class ServiceBenchTest(o.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.socket = f"unix:{cls.folder}/socket"
        shared = ("--shared-memory", cls.folder / "memory")
        cls.server = cls.serve_class(*shared, "--listen", cls.socket)

    def measure(self, *flags):
        """Returns the JSON of a short run, and its rows by operation, size, callers, load and
        target."""
        path = self.folder / "run.json"
        done = short_run("--target", f"us={self.server.address}", "--json", str(path), *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        document = json.loads(path.read_text())
        rows = {}
        for row in document["rows"]:
            load = (row["load"]["kind"], row["load"]["value"])
            key = (row["operation"], row["size"], row["callers"], load, row["target"])
            self.assertFalse(key in rows, key)
            rows[key] = row
        self.assertEqual(len(done.stdout.splitlines()), 1 + len(rows), done.stdout)
        return document, rows

    def targets(self, rows):
        return {target for *_, target in rows}

    def test_every_operation(self):
        document, rows = self.measure("--operations", ",".join(OPERATIONS))
        self.assertEqual({operation for operation, *_ in rows}, set(OPERATIONS))
        self.assertEqual(self.targets(rows), {"us", "bare gRPC"})
        self.assertEqual(len(rows), 2 * len(OPERATIONS))
        for key, row in rows.items():
            median = row["median"]
            self.assertEqual(len(row["rounds"]), 2, key)
            self.assertGreater(median["per_second"], 0, key)
            tail = [median[f"{q}_us"] for q in ("p50", "p90", "p99", "p999", "max")]
            self.assertEqual(tail, sorted(tail), key)
            self.assertNotIn("refused", median, key)
            if row["target"] == "bare gRPC":
                self.assertEqual(set(row["of_bare"].values()), {1.0}, key)
        self.assertTrue(document["machine"]["cpu"])
        self.assertRegex(document["date"], r"^\d{4}-\d\d-\d\d$")
        self.assertEqual(document["options"]["seed"], 1)
        (us,) = [target for target in document["targets"] if target["name"] == "us"]
        self.assertEqual(us["devices"][0]["name"], "cpu")
        self.assertEqual(self.server.client().names(), [])

    def test_shared_memory(self):
        _, rows = self.measure("--operations", ",".join(SHARED), "--callers", "1,3")
        self.assertEqual({operation for operation, *_ in rows}, set(SHARED))
        self.assertEqual(len(rows), 2 * 2 * len(SHARED))
        for key, row in rows.items():
            self.assertGreater(row["median"]["per_second"], 0, key)
        server = self.serve()
        done = short_run("--target", server.address, "--operations", "upload_shared")
        self.assertEqual(done.returncode, 1, done.stdout)
        said = f"^service_bench: cannot share memory with {server.address}: "
        self.assertRegex(done.stderr, said)

    def test_sizes_are_rows_beside_other_calls(self):
        _, rows = self.measure(
            *("--operations", "dot,matmul,upload", "--elements", "16,4096", "--side", "8,16"),
            *("--transfer-mib", "1,2", "--callers", "1,20", "--beside", "upload:3"))
        sizes = {(operation, size, callers) for operation, size, callers, *_ in rows}
        wanted = {"dot": (16, 4096), "matmul": (8, 16), "upload": (1, 2)}
        self.assertEqual(sizes, {(o, s, c) for o in wanted for s in wanted[o] for c in (1, 20)})
        for key, row in rows.items():
            self.assertGreater(row["median"]["beside_per_second"], 0, key)

    def test_open_loops(self):
        _, rows = self.measure("--rate", "500", "--seconds", "0.4", "--operations", "dot")
        loads = {load for *_, load, _ in rows}
        self.assertEqual(loads, {("rate", 500)})
        at_rate = rows["dot", 4096, 2, ("rate", 500), "us"]
        self.assertGreater(at_rate["median"]["late_us"], 0)
        for measured in at_rate["rounds"]:
            # There are about 200 calls, and the last of them may end late.
            self.assertLess(measured["per_second"] * 0.4, 280)
            self.assertGreater(measured["per_second"] * (0.4 + measured["max_us"] * 1e-6), 120)

        def is_half():
            """Returns whether half the load makes fewer calls in each round. Something else may
            take the machine for a whole round."""
            _, rows = self.measure("--load", "0.5", "--seconds", "0.4", "--operations", "dot")
            closed = rows["dot", 4096, 2, ("closed", 0), "us"]["rounds"]
            half = rows["dot", 4096, 2, ("load", 0.5), "us"]["rounds"]
            return all(part["per_second"] < 0.8 * full["per_second"]
                       for full, part in zip(closed, half))

        self.assertTrue(o.eventually(is_half))

    def test_rest(self):
        _, rows = self.measure("--rest", "0.05,0.1", "--operations", "ping,upload")
        self.assertEqual({load for *_, load, _ in rows}, {("rest", 0.05), ("rest", 0.1)})
        for (_, _, callers, *_), row in rows.items():
            self.assertEqual(callers, 1)
            self.assertEqual(row["rounds"][0]["p50_us"], row["rounds"][0]["max_us"])
            self.assertNotIn("per_second", row["median"])

    def test_a_run_that_is_stopped_keeps_what_it_has_measured(self):
        path = self.folder / "stopped.json"
        flags = ["--target", self.server.address, "--operations", "ping", "--seconds", "0.05"]
        bench = subprocess.Popen([BENCH, *flags, "--rate", "100", "--rest", "3000",
                                  "--json", str(path)], stdout=subprocess.DEVNULL)
        self.addCleanup(bench.wait)
        self.addCleanup(bench.kill)

        def loads():
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                return {row["load"]["kind"] for row in json.loads(path.read_text())["rows"]}

        self.assertEqual(o.eventually(loads), {"rate"})

    def test_unix_sockets_have_a_peer_of_their_own(self):
        _, rows = self.measure("--target", f"unix={self.socket}", "--operations", "ping")
        self.assertEqual(self.targets(rows), {"us", "unix", "bare gRPC", "bare gRPC unix"})
        both = [rows["ping", 0, 2, ("closed", 0), name] for name in ("unix", "bare gRPC unix")]
        ratios = sorted(
            u["per_second"] / b["per_second"] for u, b in zip(*(row["rounds"] for row in both)))
        self.assertAlmostEqual(both[0]["of_bare"]["per_second"], sum(ratios) / 2, delta=1e-3)
        done = short_run("--target", self.socket, "--operations", "ping")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("bare gRPC  ", done.stdout)

    def test_bad_flags(self):
        for flags, said in [
                *(([flag, "0"], f"{flag}: Value 0 not in range") for flag in (
                    "--elements", "--side", "--transfer-mib", "--rate", "--load", "--seconds",
                    "--rounds")),
                (["--operations", "nope"], "nope not in {ping,dot,reduce,matmul,dots,chain,"),
                (["--target", "=x"], '"=x" is not NAME=ADDRESS'),
                (["--target", "a=x", "--target", "a=y"], 'two targets are named "a"'),
                (["--target", "bare gRPC=x"], 'the name "bare gRPC" is taken'),
                (["--callers", "1,0"], "--callers: Value 0 not in range"),
                (["--rest", "-1"], "--rest: Value -1 not in range"),
                (["--beside", "upload:0"], "needs 1 to 4096 callers"),
                (["--beside", "nope:2"], '"nope:2" names no operation'),
                (["--seed", "x"], "--seed"),
                (["--seed", "-1"], "--seed: Value -1 not in range"),
                (["--nope"], "--nope")]:
            done = o.run(BENCH, *flags)
            self.assertGreater(done.returncode, 100, flags)
            self.assertIn(said, done.stderr, flags)
            self.assertEqual(done.stdout, "", flags)

    def test_what_cannot_be_reached(self):
        for flags, said in [
                (["--json", "/nonexistent/x"], "cannot write /nonexistent/x"),
                (["--target", "unix:/nonexistent/x"], "no server answers at unix:/nonexistent/x")]:
            done = o.run(BENCH, *flags)
            self.assertEqual(done.returncode, 1, flags)
            self.assertIn(f"service_bench: {said}", done.stderr, flags)


if __name__ == "__main__":
    o.main()
