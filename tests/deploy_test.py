#!/usr/bin/env python3
"""Checks that the files of deploy/ agree with each other and with the programs: names, ports,
flags, versions and selectors. tests/by_hand tests them with the programs that read them."""

import json
import os
import pathlib
import re
import shutil
import tempfile
import unittest

import numpy as np
import yaml

import outsider as o

ROOT = o.ROOT
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "tessera"
SNAPSHOT_SECONDS = 300  # How long the last snapshot may take.


def help_of(program):
    return o.run(program, "--help").stdout


def variables():
    """Returns the environment variables of the server and of the command line."""
    text = help_of(o.Program.path) + help_of(o.Program.cli)
    return set(re.findall(r"Env:(TESSERA_\w+)", text))


def version():
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(tessera VERSION ([\d.]+)", text)[1]


class ComposeTest(unittest.TestCase):
    def setUp(self):
        self.document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
        self.services = self.document["services"]

    def test_docker_compose_1_29_knows_all_of_it(self):
        self.assertEqual({key for key in self.document if not key.startswith("x-")},
                         {"services", "volumes"})

    def test_services(self):
        for name, service in self.services.items():
            with self.subTest(name):
                self.assertTrue(service["profiles"])  # Nothing starts by default.
                self.assertTrue(service["read_only"])
                self.assertEqual(service["cap_drop"], ["ALL"])
                for port in service.get("ports", []):
                    self.assertTrue(port.startswith("127.0.0.1:"), port)
                self.assertLessEqual(set(service.get("environment", {})), variables())
                for volume in service.get("volumes", []):
                    path = volume.split(":")[0]
                    self.assertTrue(path.startswith("${") or (DEPLOY / path).is_file()
                                    or path in self.document["volumes"], path)

    def test_builds(self):
        for name, service in self.services.items():
            for key, build in service.items():
                if key != "build":
                    continue
                text = (DEPLOY / build["context"] / build["dockerfile"]).read_text()
                for argument in build.get("args", {}):
                    self.assertRegex(text, rf"(?m)^ARG {argument}=", name)

    def test_the_server_stops_in_time(self):
        text = (DEPLOY / "Dockerfile").read_text()
        delay = float(re.search(r"TESSERA_DRAIN_DELAY=(\d+)s", text)[1])
        for name in ("tessera-gpu", "tessera-cpu"):
            service = self.services[name]
            grace = float(service["stop_grace_period"].rstrip("s"))
            self.assertGreater(grace, delay + 30 + SNAPSHOT_SECONDS)
            # The data folder is on the volume, which belongs to the image's user.
            (volume,) = service["volumes"]
            folder = volume.split(":")[1]
            self.assertIn(f"-{folder}/", service["environment"]["TESSERA_DATA_DIR"])
            self.assertRegex(text, rf"install -d -o 65532 -g 65532 {folder}\n")


class PinsTest(unittest.TestCase):
    """Everything that does not come from the distribution is named with the same version
    everywhere."""

    def test_images(self):
        images = {service["image"] for service in
                  yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()}
        for path in DEPLOY.rglob("Dockerfile"):
            text = path.read_text()
            names = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
            for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
                images.add(names[image[2:-1]] if image.startswith("${") else image)
        others = {image for image in images if not image.startswith("tessera")}
        self.assertGreaterEqual(len(others), 5)
        for image in others:
            self.assertRegex(image, r":v?\d+\.\d+", image)

    def test_downloads(self):
        files = [ROOT / "dev", *DEPLOY.rglob("Dockerfile"), *ROOT.glob(".ci/*"),
                 *DEPLOY.rglob("*.sh"), *ROOT.glob("tests/tools/*.sh")]
        text = "\n".join(path.read_text() for path in files)
        found = re.findall(r"https?://\S+\.(?:tar\.gz|tgz|zip|deb)\b|npm install .*(?:\\\n)?.*",
                           text)
        self.assertEqual(len(found), 2, found)  # ghz and buf.
        for download in found:
            self.assertRegex(download, r"/v\d+\.\d+\.\d+/|@\$buf_version")
        self.assertRegex(text, r"buf_version=\d+\.\d+\.\d+\n")

    def test_the_image_is_built_with_listed_packages(self):
        common = (DEPLOY / "tools" / "common.sh").read_text()
        listed = set(re.search(r"readonly packages=\((.*?)\)", common, re.DOTALL)[1].split())
        text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
        packages = r" +([a-z][a-z0-9+ -]+)"
        (installed,) = re.findall("apt-get install -y --no-install-recommends" + packages, text)
        (built_with,) = re.findall("BUILD_DEPENDENCY_OF" + packages, text)
        self.assertLessEqual(set(installed.split()), listed)
        self.assertEqual(set(built_with.split()), set(installed.split()))


class KubernetesTest(unittest.TestCase):
    def setUp(self):
        text = (DEPLOY / "kubernetes.yaml").read_text()
        self.objects = [found for found in yaml.safe_load_all(text) if found]

    def kind(self, kind):
        return [found for found in self.objects if found["kind"] == kind]

    def test_selectors(self):
        (stateful,) = self.kind("StatefulSet")
        labels = stateful["spec"]["template"]["metadata"]["labels"]
        selectors = [stateful["spec"]["selector"]["matchLabels"]]
        selectors += [service["spec"]["selector"] for service in self.kind("Service")]
        selectors += [b["spec"]["selector"]["matchLabels"]
                      for b in self.kind("PodDisruptionBudget")]
        selectors += [p["spec"]["podSelector"]["matchLabels"] for p in self.kind("NetworkPolicy")]
        self.assertEqual(len(selectors), 5)
        for selector in selectors:
            self.assertTrue(selector.items() <= labels.items(), selector)
        services = {service["metadata"]["name"] for service in self.kind("Service")}
        self.assertIn(stateful["spec"]["serviceName"], services)
        accounts = {account["metadata"]["name"] for account in self.kind("ServiceAccount")}
        self.assertIn(stateful["spec"]["template"]["spec"]["serviceAccountName"], accounts)

    def test_the_container(self):
        (stateful,) = self.kind("StatefulSet")
        pod = stateful["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        self.assertLessEqual(set(environment), variables())
        port, metrics = container["ports"]
        self.assertEqual(environment["TESSERA_LISTEN"], f"[::]:{port['containerPort']}")
        self.assertEqual(environment["TESSERA_METRICS_LISTEN"], f"[::]:{metrics['containerPort']}")
        targets = [[p["targetPort"] for p in s["spec"]["ports"]] for s in self.kind("Service")]
        # Prometheus scrapes every instance once.
        self.assertEqual(targets, [[port["name"], metrics["name"]], [port["name"]]])
        (policy,) = self.kind("NetworkPolicy")
        open_ports = {p["port"] for rule in policy["spec"]["ingress"] for p in rule["ports"]}
        self.assertEqual(open_ports, {port["name"], metrics["name"]})
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            self.assertEqual(container[probe]["grpc"]["port"], port["containerPort"])
        drain = sum(
            int(environment[f"TESSERA_DRAIN_{part}"].rstrip("s")) for part in ("DELAY", "TIMEOUT"))
        self.assertGreater(pod["terminationGracePeriodSeconds"], drain + SNAPSHOT_SECONDS)
        self.assertEqual(container["securityContext"]["capabilities"], {"drop": ["ALL"]})
        self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"])
        user = re.search(r"^USER (\d+):", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[1]
        self.assertEqual(pod["securityContext"]["runAsUser"], int(user))


class ChartTest(unittest.TestCase):
    def test_versions(self):
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual((chart["version"], chart["appVersion"]), (version(), version()))

    def test_values_and_templates_agree(self):
        """Each value that a template reads exists, each existing value is read, and each has a
        schema."""
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        schema = json.loads((CHART / "values.schema.json").read_text())
        used = set()
        for path in CHART.rglob("templates/**/*"):
            if path.is_file():
                used |= set(re.findall(r"\.Values\.(\w+(?:\.\w+)*)", path.read_text()))
        for name in used:
            found = values
            for part in name.split("."):
                self.assertIn(part, found, name)
                found = found[part]

        def leaves(table, prefix=""):
            for key, value in table.items():
                if isinstance(value, dict) and value:
                    yield from leaves(value, f"{prefix}{key}.")
                else:
                    yield prefix + key

        for leaf in leaves(values):
            self.assertTrue(any(leaf == u or leaf.startswith(u + ".") for u in used), leaf)
            found = schema
            for part in leaf.split("."):
                if "properties" not in found:  # A table with any keys.
                    break
                self.assertIn(part, found["properties"], leaf)
                found = found["properties"][part]


    def test_variables(self):
        """The chart sets variables that the server knows, and `env` may set none of them."""
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        helpers = (CHART / "templates" / "_helpers.tpl").read_text()
        taken = dict(re.findall(r'"(TESSERA_\w+)" "([\w.]+)"', helpers))
        template = (CHART / "templates" / "statefulset.yaml").read_text()
        used = set(re.findall(r"- \{name: (TESSERA_\w+),", template))
        self.assertIn("TESSERA_DATA_DIR", used)
        self.assertLessEqual(used, set(taken))
        self.assertLessEqual(set(taken), variables())
        for name in taken.values():
            found = values
            for part in name.split("."):
                found = found[part]

    def test_no_replicas_share_a_data_folder(self):
        """A replica has its own volume, or there is only one replica."""
        template = (CHART / "templates" / "statefulset.yaml").read_text()
        folder = re.search(r"TESSERA_DATA_DIR, value: (\S+)\}", template)[1]
        (mount,) = re.findall(r"name: data, mountPath: (\S+)\}", template)
        self.assertTrue(folder.startswith(mount + "/"))
        own, claims = template.split("  volumeClaimTemplates:\n")
        self.assertTrue(own.endswith(
            "{{- if and .Values.data.size (not .Values.data.existingClaim) }}\n"))
        self.assertIn("accessModes: [ReadWriteOnce]", claims)
        refused = "and .Values.data.existingClaim (gt (int .Values.replicas) 1) }}\n{{- fail "
        self.assertIn(refused, template)


class ServiceTest(unittest.TestCase):
    """The systemd service."""

    def test_its_options_are_valid(self):
        text = (DEPLOY / "systemd" / "server.toml").read_text()
        proposed = re.sub(r"(?m)^# (\S+ = )", r"\1", text)  # Includes commented lines.
        proposed = re.sub(r"(?m)^listen.*\n", "", proposed, count=1)
        for content in (text, proposed):
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(content + '\nmax-ttl = "soon"\n')
                file.flush()
                # The server has understood all other lines.
                said = o.run(o.Program.path, "--config", file.name).stderr
                self.assertIn("'soon' is not a time", said)

    def test_signals_and_users_reach_it(self):
        unit = (DEPLOY / "systemd" / "tessera-server.service").read_text()
        # systemd treats an exit on SIGHUP as intended.
        self.assertIn("\nExecReload=/bin/kill -HUP $MAINPID\n", unit)
        self.assertIn("\nRestart=always\n", unit)
        # --socket-group and the uid: lines of --tokens need real users and groups.
        self.assertNotRegex(unit, r"(?m)^PrivateUsers=(?!no)")
        filters = re.findall(r"(?m)^SystemCallFilter=(\S+)$", unit)
        self.assertGreater(filters.index("@chown"), filters.index("~@privileged"))

    def test_it_is_waited_for(self):
        unit = (DEPLOY / "systemd" / "tessera-server.service").read_text()
        self.assertIn("Type=notify", unit)
        drain = re.search(r"--drain-timeout TIME=(\d+)s", help_of(o.Program.path))
        self.assertGreater(int(re.search(r"TimeoutStopSec=(\d+)s", unit)[1]),
                           int(drain[1]) + SNAPSHOT_SECONDS)

    def test_it_may_write_to_its_data_folder(self):
        unit = (DEPLOY / "systemd" / "tessera-server.service").read_text()
        options = (DEPLOY / "systemd" / "server.toml").read_text()
        folder = re.search(r'(?m)^data-dir = "/var/lib/(\w+)"$', options)[1]
        self.assertIn(f"\nStateDirectory={folder}\n", unit)


class PackTest(unittest.TestCase):
    def test_packages_and_bundles_are_for_the_devices_asked_for(self):
        """A stand-in makes nvcc appear installed."""
        script = """set -e; root=$PWD
            source "$1/common.sh"; source "$1/build.sh"; step() { printf '%s\\n' "$@"; }
            choose_devices package ${2:-}; configure release; cat build/release/devices.txt"""
        with tempfile.TemporaryDirectory() as folder:
            nvcc = pathlib.Path(folder) / "nvcc"
            nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
            nvcc.chmod(0o755)
            (pathlib.Path(folder) / "CMakeLists.txt").touch()
            (pathlib.Path(folder) / "build/release").mkdir(parents=True)

            path = f"{folder}:{os.environ['PATH']}"
            configured = lambda *arguments: o.run(
                "bash", "-c", script, "-", DEPLOY / "tools", *arguments, cwd=folder,
                env=o.environment(PATH=path))

            self.assertIn("-DTESSERA_CUDA=ON", configured().stdout)
            alone = configured("cpu").stdout
            self.assertIn("-DTESSERA_CUDA=OFF", alone)
            self.assertIn("\nCPU only\n", alone)
            self.assertIn('package takes cpu or nothing, not "gpu"', configured("gpu").stderr)


class ReadmeTest(unittest.TestCase):
    def test_flags_exist(self):
        """The table in deploy/README.md has the flags of the server, and `dev` has the flags of its
        own commands."""
        flags = set(re.findall(r"^\| (`--.*?) \|", (DEPLOY / "README.md").read_text(),
                               re.MULTILINE))
        names = {name for cell in flags for name in re.findall(r"--[\w-]+", cell)}
        self.assertGreater(len(names), 10)
        known = set(re.findall(r"--[\w-]+", help_of(o.Program.path)))
        self.assertEqual(names - known, set())

    @unittest.skipUnless(shutil.which("jq"), "needs jq")
    def test_every_name_is_saved_and_restored(self):
        text = (DEPLOY / "README.md").read_text().split("## Backups")[1].split("\n## ")[0]
        scripts = re.findall("```sh\n(.*?)```", text, re.DOTALL)
        self.assertEqual(len(scripts), 2)
        names = ["-", "-x", "--", "--replace", "./c", "/a", "__metadata__", "a/../b", "a//b",
                 "x" * 128, "y.npy", "y.npy/z"]
        with tempfile.TemporaryDirectory() as folder, o.Server(folder) as server:
            client = server.client()
            path = f"{pathlib.Path(o.Program.cli).parent}:{os.environ['PATH']}"
            for number, name in enumerate(names):
                client.put(name, np.full(number, number, "<i4"))
            client.create("draft", np.zeros(9))
            for script in scripts:
                ended = o.run("sh", "-c", script, cwd=folder,
                              env=o.environment(TESSERA_SERVER=server.address, PATH=path))
                self.assertEqual(ended.returncode, 0, ended.stderr)
                kept = {name: client.download(name) for name in client.names() if name != "draft"}
                for name in client.names():
                    client.call("DeleteBuffer", name=name)
            self.assertEqual(kept, {name: np.full(number, number, "<i4").tobytes()
                                    for number, name in enumerate(names)})


if __name__ == "__main__":
    o.main()
