#!/usr/bin/env python3
"""Tests deploy/loadtest against a running server. Every call of its configurations is made
unchanged, and run.sh runs from end to end, with a stand-in for ghz (tests/ghz_stand_in.py)."""

import hashlib
import json
import os
import pathlib
import re
import sys
from unittest import mock

import grpc

import ghz_stand_in
import outsider

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOADTEST = ROOT / "deploy" / "loadtest"
sys.path.insert(0, str(LOADTEST))

import plan  # noqa: E402

# The keys of ghz 0.121 that the configurations use.
GHZ_KEYS = set(
    "proto import-paths call insecure concurrency connections async rps duration duration-stop "
    "timeout data metadata format load-schedule load-start load-end load-step load-step-duration"
    .split())
# All calls must succeed again when they are repeated, except these, which can be made only once or
# need a second server or a data folder.
ONCE = {"CreateBuffer", "SealBuffer", "DeleteBuffer", "ImportBuffer", "Snapshot"}

CLI = outsider.Program.cli


class ReplayTest(outsider.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = cls.serve_class()

    def run_sh(self, *flags, **environment):
        command = (LOADTEST / "run.sh", "--target", self.server.address, "--cli", CLI, *flags)
        environment["GHZ"] = str(ROOT / "tests/ghz_stand_in.py")
        return outsider.run(*command, timeout=300, env=outsider.environment(**environment))

    def test_run(self):
        """Runs a case of each pattern without objectives, and then a case that misses its
        objective."""
        slo = self.folder / "slo.toml"
        text = (LOADTEST / "slo.toml").read_text()
        slo.write_text(re.sub(r"objective = .*", "objective = {}", text))
        out = self.folder / "out"
        flags = ["--seconds", "1", "--slo", str(slo)]
        cases = "dot-saturation upload-streams dot-step mixed"
        run = self.run_sh(*flags, "--cases", cases, "--out", str(out))
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        summary = json.loads((out / "summary.json").read_text())
        self.assertEqual({name.split(".")[0] for name in summary}, set(cases.split()), run.stdout)
        self.assertEqual(len([name for name in summary if name.startswith("mixed.")]), 6)
        self.assertTrue((out / "dot-step.svg").is_file())
        for name, figures in summary.items():
            self.assertGreater(figures["calls"], 0, name)
            self.assertEqual(figures["failed"], 0, name)

        again = ["--cases", "dot-saturation", "--out", str(self.folder / "again")]
        strict = self.folder / "strict.toml"
        strict.write_text(text.replace("rate = 1000,", "rate = 1e9,", 1))
        run = self.run_sh("--seconds", "1", "--slo", str(strict), *again)
        self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
        self.assertIn("dot-saturation: rate is ", run.stderr)

        # Even if every call fails, ghz exits with 0.
        nobody = ["--target", "127.0.0.1:1"]
        run = self.run_sh(*flags, *again, *nobody, "--cli", "true")
        self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
        self.assertRegex(run.stderr, r"dot-saturation: \d+ of \d+ calls failed")

    def test_a_server_that_asks_for_tokens(self):
        """ghz gets the token, and the report does not contain it."""
        token = "a-token-of-no-use"
        digest = hashlib.sha256(token.encode()).hexdigest()
        tokens = self.folder / "tokens"
        tokens.write_text(f"{digest} write one\n")
        tokens.chmod(0o600)
        server = self.serve("--tokens", tokens)
        slo = self.folder / "token.toml"
        slo.write_text('[pattern.p]\nconcurrency = 1\nmetadata = { secret = "of-its-own" }\n'
                       '[case.c]\ncall = "dot"\npattern = "p"\n')
        (self.folder / "token").write_text(token + "\n")
        out = self.folder / "report"
        flags = ["--seconds", "1", "--slo", slo, "--out", out]
        from_file = {"TESSERA_TOKEN_FILE": str(self.folder / "token")}
        run = self.run_sh(*flags, "--target", server.address, **from_file)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertGreater(json.loads((out / "summary.json").read_text())["c"]["calls"], 0)
        left = "".join(path.read_text() for path in out.iterdir())
        self.assertNotIn(token, left + run.stdout + run.stderr)
        self.assertNotIn("of-its-own", left)
        self.assertIn(f"Server {server.address}, version ", (out / "report.md").read_text())

        run = self.run_sh(*flags, "--target", "192.0.2.1:50051", TESSERA_TOKEN=token)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("unencrypted", run.stderr)

    def test_bad_flags(self):
        for flags, wanted in [(["--cases", "dott"], "there is no case 'dott'"),
                              (["--seconds", "soon"], "takes whole seconds"),
                              (["--compare", str(self.folder / "nothing")], "no summary.json"),
                              (["--slo", str(self.folder / "no.toml")], "no.toml")]:
            run = self.run_sh(*flags, "--out", str(self.folder / "bad"))
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(wanted, run.stderr)

    def test_configurations(self):
        """ghz knows the keys, the protocol knows the messages, and the server responds to the
        calls."""
        for name, array in (("load/x", "4096"), ("load/y", "4096"), ("load/matrix", "512x512")):
            put = outsider.run(CLI, "--server", self.server.address, "put", "--random", "normal",
                               "--shape", array, "--name", name, "--replace")
            self.assertEqual(put.returncode, 0, put.stderr)
        slo = plan.read(LOADTEST / "slo.toml")
        called, patterns = set(), set()
        with grpc.insecure_channel(self.server.address) as channel:
            for name, case in slo["case"].items():
                patterns.add(case["pattern"])
                self.assertTrue(case["objective"], name)
                for call in plan.calls_of(case):
                    with self.subTest(case=name, call=call):
                        config = plan.configuration(slo, case, call, 10)
                        self.assertLessEqual(set(config), GHZ_KEYS)
                        self.assertTrue(pathlib.Path(config["proto"]).is_file())
                        method = ghz_stand_in.Method(config)
                        called.add(method.method.name)
                        for number in range(2):
                            method.call(channel, method.messages("7", number), 60)
        self.assertEqual(patterns, set(slo["pattern"]))
        self.assertEqual({f"{call}.json" for case in slo["case"].values()
                          for call in plan.calls_of(case)},
                         {path.name for path in (LOADTEST / "calls").iterdir()})
        self.assertEqual(called, set(outsider.methods(outsider.buffers, outsider.compute)) - ONCE)

    def test_tls_and_steps(self):
        slo = plan.read(LOADTEST / "slo.toml")
        tls = dict(TESSERA_CLIENT_TLS_CA="\ufeff/ca \n", TESSERA_CLIENT_TLS_SERVER_NAME="tessera")
        with mock.patch.dict(os.environ, TESSERA_TOKEN="secret\n", **tls):
            self.assertEqual(plan.tls_keys(), {"cacert": "/ca", "cname": "tessera"})
            self.assertEqual(plan.metadata(), {"authorization": "Bearer secret"})
        config = plan.configuration(slo, slo["case"]["dot-step"], "dot", 30)
        self.assertEqual(config["load-step-duration"], "6000ms")
        self.assertEqual(config["duration"], "30s")


if __name__ == "__main__":
    outsider.main()
