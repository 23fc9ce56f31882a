#!/usr/bin/env python3
"""Starts deploy/compose.yaml as an operator does, with the profiles cpu, tls, monitoring and load.
Checks calls through both ports, scrapes, alerts and the dashboard's queries, the load kit, a server
that is killed, and the shutdown. Needs a container engine with its own networks, the images of the
file (without Grafana's image, Grafana is left out), docker-compose 1.29 or Compose v2, and the
file's ports. CI does not run it.

usage: compose.py                       with the existing images
       compose.py stand-ins [FLAG...]   first makes images of the same names, of packages of Debian
                                        or Ubuntu on ubuntu:24.04 and of ghz_stand_in.py, for a
                                        host that cannot pull any; FLAGs go to docker build

To start an engine with its own network, and commands in that network:
    unshare -n sh -c 'ip link set lo up
        exec dockerd --data-root D/data --exec-root D/run -H unix://D/socket -p D/pid'
    DOCKER_HOST=unix://D/socket nsenter -t "$(cat D/pid)" -n tests/by_hand/compose.py
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from authority import Authority  # noqa: E402

ROOT = TESTS.parent
FILE = ROOT / "deploy" / "compose.yaml"
PROFILES = ("cpu", "tls", "monitoring", "load")
TIMEOUT_S = 300
COMPOSE = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]

APT = ("RUN apt-get update && DEBIAN_FRONTEND=noninteractive"
       " apt-get install -y --no-install-recommends {} "
       "&& rm -rf /var/lib/apt/lists/*\n")
STAND_INS = {"nginx:1.28": "FROM ubuntu:24.04\n" + APT.format("nginx"),
             "prom/prometheus:v2.55.1": ("FROM ubuntu:24.04\n" + APT.format("prometheus")
                                         + 'USER nobody\nENTRYPOINT ["prometheus"]\n'
                                         'CMD ["--config.file=/etc/prometheus/prometheus.yml",'
                                         ' "--storage.tsdb.path=/prometheus"]\n'),
             "tessera:load": (
                 "FROM tessera:load\nUSER root\n"
                 + APT.format("python3-grpcio python3-numpy libprotobuf-dev protobuf-compiler"
                              " protobuf-compiler-grpc")
                 + "COPY tests /opt/tessera/tests\nUSER 65532:65532\n")}
GHZ = '#!/bin/sh\nexec python3 /opt/tessera/tests/ghz_stand_in.py "$@"\n'


def run(*command, **options):
    options = {"check": True, "capture_output": True, "text": True, "timeout": 1200, **options}
    try:
        return subprocess.run([*map(str, command)], **options)
    except subprocess.CalledProcessError as failure:
        raise AssertionError(f"{failure.cmd}: exit code {failure.returncode}\n{failure.stdout}"
                             f"{failure.stderr}") from None


def make_stand_ins(flags):
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(f"git archive HEAD | tar -xC {folder}", shell=True, cwd=ROOT, check=True)
        ghz = pathlib.Path(folder) / "deploy" / "loadtest" / "ghz"
        ghz.write_text(GHZ)
        run("docker", "build", *flags, "-f", "deploy/loadtest/Dockerfile", "-t", "tessera:load",
            "--build-arg",
            "GHZ=deploy/loadtest/ghz", ".", cwd=folder, env=environment)
        (pathlib.Path(folder) / ".dockerignore").unlink()
        for image, text in STAND_INS.items():
            run("docker", "build", *flags, "-f", "-", "-t", image, ".", cwd=folder, env=environment,
                input=text)
            print(f"made {image}", flush=True)


def has_image(name):
    return run("docker", "image", "inspect", name, check=False).returncode == 0


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def prometheus(path, **query):
    text = get(f"http://127.0.0.1:9090/api/v1/{path}?{urllib.parse.urlencode(query)}")
    return json.loads(text)["data"]


class ComposeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        authority = Authority(cls.folder, "ca")
        cls.tls = cls.folder / "tls"
        cls.tls.mkdir()
        for name in ("server", "client"):
            for path, kind in zip(authority.issue(name), ("crt", "key")):
                shutil.copy(path, cls.tls / f"{name}.{kind}")
        shutil.copy(authority.cert, cls.tls / "ca.crt")
        cls.folder.chmod(0o755)
        for path in cls.tls.iterdir():
            path.chmod(0o644)
        cls.environment = {**os.environ, "TESSERA_TLS_DIR": str(cls.tls)}
        cls.addClassCleanup(cls.compose, "down", "--volumes", "--timeout", "45")
        services = ["tessera-cpu", "tls", "prometheus"]
        if has_image("grafana/grafana:11.3.0"):
            services.append("grafana")
        cls.compose("up", "-d", "--no-build", *services)
        cls.wait(lambda: cls.state("{{.State.Health.Status}}") == "healthy", "healthy")

    @classmethod
    def compose(cls, *arguments, **options):
        profiles = [word for profile in PROFILES for word in ("--profile", profile)]
        return run(*COMPOSE, "-p", "tesserabyhand", "-f", FILE, *profiles, *arguments,
                   env=cls.environment, **options)

    @classmethod
    def container(cls, service="tessera-cpu"):
        return cls.compose("ps", "-q", service).stdout.strip()

    @classmethod
    def state(cls, template, service="tessera-cpu"):
        return run("docker", "inspect", "-f", template, cls.container(service)).stdout.strip()

    @staticmethod
    def wait(condition, what, seconds=TIMEOUT_S):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except (OSError, AssertionError):
                pass
            time.sleep(0.5)
        raise AssertionError(f"not {what} after {seconds} s")

    def tessera(self, *arguments, server="127.0.0.1:50051", **options):
        tls = []
        if server.endswith("2"):
            tls = [f"TESSERA_CLIENT_TLS_{kind}=/tls/{file}" for kind, file in (
                ("CA", "ca.crt"), ("CERT", "client.crt"), ("KEY", "client.key"))]
        return run("docker", "run", "--rm", "--network", "host", "-v", f"{self.tls}:/tls:ro",
                   *(word for variable in tls for word in ("-e", variable)), "--entrypoint",
                   "tessera", "tessera:cpu",
                   "--server", server, *arguments, **options)

    def test_1_calls(self):
        for server, name in (("127.0.0.1:50051", "plain"), ("127.0.0.1:50052", "by-tls")):
            self.tessera("put", "--name", name, "--random", "ones", "--shape", "1000",
                         server=server)
            self.assertEqual(self.tessera("dot", name, name, server=server).stdout.strip(), "1000")
        refused = run("openssl", "s_client", "-connect", "127.0.0.1:50052", "-alpn", "h2", input="",
                      check=False)
        self.assertIn("Acceptable client certificate CA names", refused.stdout)
        self.assertIn("ready", get("http://127.0.0.1:9464/healthz"))
        self.assertIn("</html>", get("http://127.0.0.1:9464/"))
        # Nothing is published beyond loopback.
        ports = json.loads(self.state("{{json .HostConfig.PortBindings}}"))
        self.assertEqual({binding["HostIp"] for bindings in ports.values() for binding in bindings},
                         {"127.0.0.1"})

    def test_2_load(self):
        report = self.compose("run", "--rm", "load", "--cases", "dot-latency upload-latency",
                              "--seconds", "20").stdout
        for case in ("dot-latency", "upload-latency"):
            self.assertRegex(report, rf"(?m)^.*{case}.*$")
        print(report[report.find("==> dot-latency"):])

    def test_3_prometheus(self):
        self.wait(lambda: [t["health"] for t in prometheus("targets")["activeTargets"]] == ["up"],
                  "scraped")
        groups = prometheus("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        wanted = re.findall(r"- alert: (\w+)",
                            (FILE.parent / "helm/tessera/files/rules.yaml").read_text())
        self.assertEqual([rule["name"] for rule in rules], wanted)
        self.wait(lambda: {rule["health"] for group in prometheus("rules")["groups"]
                           for rule in group["rules"]} == {"ok"},
                  "evaluated")
        # All of the dashboard's queries return data, except those about GPUs and those about events
        # that have not happened.
        self.tessera("info", "none", check=False)
        self.tessera("dot", "plain", "plain", "--timing")
        time.sleep(10)  # A new counter has no rate yet.
        self.tessera("info", "none", check=False)
        time.sleep(10)
        empty = []
        board = json.loads((FILE.parent / "helm/tessera/files/dashboard.json").read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                query = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "5m")
                if not prometheus("query", query=query)["result"]:
                    empty.append(panel["title"])
        self.assertEqual([title for title in empty if not title.startswith("GPU")], ["Slow calls"])

    @unittest.skipUnless(has_image("grafana/grafana:11.3.0"), "the image of Grafana is missing")
    def test_4_grafana(self):
        self.wait(lambda: "ok" in get("http://127.0.0.1:3000/api/health"), "healthy")
        board = json.loads(get("http://127.0.0.1:3000/api/dashboards/uid/tessera"))["dashboard"]
        self.assertGreater(len(board["panels"]), 8)
        self.assertIn("tessera_ready",
                      get("http://127.0.0.1:3000/api/datasources/proxy/uid/prometheus/api/v1/"
                                           "query?query=tessera_ready"))

    def test_5_a_server_that_dies_is_started_again(self):
        self.tessera("snapshot")
        before = self.state("{{.State.Pid}}")
        os.kill(int(before), 9)
        self.wait(lambda: self.state("{{.State.Pid}}") not in (before, "0") and
                  self.state("{{.State.Health.Status}}") == "healthy", "healthy again")
        self.assertEqual(self.tessera("dot", "plain", "plain").stdout.strip(), "1000")

    def test_6_a_stop(self):
        self.compose("stop", "tessera-cpu")
        print(*run("docker", "logs", "--tail", "2", self.container()).stderr.splitlines(), sep="\n")
        self.assertEqual(self.state("{{.State.ExitCode}}"), "0")
        self.wait(lambda: any(a["labels"]["alertname"] == "TesseraDown" and a["state"] == "firing"
                              for a in prometheus("alerts")["alerts"]), "TesseraDown firing")


if __name__ == "__main__":
    if sys.argv[1:2] == ["stand-ins"]:
        make_stand_ins(sys.argv[2:])
    else:
        unittest.main()
