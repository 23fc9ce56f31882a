#!/usr/bin/env python3
"""Tests the bill of materials of the bundle and the image: an SPDX 2.3 document in JSON, checked
field by field, against the package database and against the libraries that the programs load."""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest
import urllib.parse

import outsider as o

SCRIPT = o.ROOT / "deploy" / "sbom.sh"
PROGRAMS = (o.Program.path, o.Program.cli)

# The types of relationships of SPDX 2.3 that deploy/sbom.sh may use.
RELATIONS = {
    "DESCRIBES", "CONTAINS", "DEPENDS_ON", "STATIC_LINK", "BUILD_DEPENDENCY_OF", "BUILD_TOOL_OF"}


def run(*command, text=None, epoch="1700000000"):
    return subprocess.run(
        list(map(str, command)), input=text, capture_output=True, text=True, check=True, cwd=o.ROOT,
        timeout=300, env={**os.environ, "SOURCE_DATE_EPOCH": epoch}).stdout


def document(rows, **more):
    return json.loads(run(SCRIPT, "document", "thing", "1.2.3", text=rows, **more))


def installed():
    """Returns {(name, architecture): version} from the package database."""
    listed = run("dpkg-query", "-W", "-f",
                 "${db:Status-Status} ${Package} ${Architecture} ${Version}\n")
    rows = [line.split() for line in listed.splitlines() if line.startswith("installed ")]
    return {(name, architecture): version for _, name, architecture, version in rows}


class SbomTest(unittest.TestCase):
    def check(self, spdx):
        """Checks what the specification requires of a document. Returns the packages by name."""
        self.assertEqual(spdx["spdxVersion"], "SPDX-2.3")
        self.assertEqual(spdx["dataLicense"], "CC0-1.0")
        self.assertEqual(spdx["SPDXID"], "SPDXRef-DOCUMENT")
        self.assertTrue(spdx["name"])
        namespace = urllib.parse.urlparse(spdx["documentNamespace"])
        self.assertTrue(namespace.scheme and namespace.netloc and not namespace.fragment)
        created = spdx["creationInfo"]["created"]
        self.assertRegex(created, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertTrue(spdx["creationInfo"]["creators"])
        for creator in spdx["creationInfo"]["creators"]:
            self.assertRegex(creator, r"^(Tool|Person|Organization): \S")
        self.assertLessEqual(
            set(spdx),
            {"spdxVersion", "dataLicense", "SPDXID", "name", "documentNamespace", "creationInfo",
             "packages", "relationships"})
        ids = [package["SPDXID"] for package in spdx["packages"]]
        self.assertEqual(len(ids), len(set(ids)))
        for package in spdx["packages"]:
            self.assertRegex(package["SPDXID"], r"^SPDXRef-[a-zA-Z0-9.-]+$")
            self.assertTrue(package["name"])
            self.assertTrue(package["versionInfo"])
            self.assertEqual(package["downloadLocation"], "NOASSERTION")
            self.assertIs(package["filesAnalyzed"], False)  # It need not list files.
            for field in ("licenseConcluded", "licenseDeclared", "copyrightText"):
                self.assertEqual(package[field], "NOASSERTION")
            self.assertRegex(package.get("supplier", "Organization: x"), r"^Organization: [^<>]+$")
            for reference in package.get("externalRefs", ()):
                self.assertEqual(reference["referenceCategory"], "PACKAGE-MANAGER")
                self.assertEqual(reference["referenceType"], "purl")
                found = re.fullmatch(
                    r"pkg:deb/(debian|ubuntu)/([a-zA-Z0-9.%-]+)@([a-zA-Z0-9.%~-]+)"
                    r"\?arch=([a-z0-9]+)&distro=\1-[\d.]+", reference["referenceLocator"])
                self.assertIsNotNone(found, reference)
                name, version = map(urllib.parse.unquote, found.group(2, 3))
                self.assertEqual((name, version), (package["name"], package["versionInfo"]))
        related = set()
        for relation in spdx["relationships"]:
            self.assertIn(relation["relationshipType"], RELATIONS)
            for end in ("spdxElementId", "relatedSpdxElement"):
                self.assertIn(relation[end], ["SPDXRef-DOCUMENT", *ids])
                related.add(relation[end])
        self.assertEqual(related, {"SPDXRef-DOCUMENT", *ids}, "a package without a relation")
        described = [r for r in spdx["relationships"] if r["relationshipType"] == "DESCRIBES"]
        self.assertEqual([(r["spdxElementId"], r["relatedSpdxElement"]) for r in described],
                         [("SPDXRef-DOCUMENT", ids[0])])
        return {package["name"]: package for package in spdx["packages"]}

    def test_an_image_lists_every_package_with_its_version(self):
        packages = self.check(document(run(SCRIPT, "rows", "CONTAINS")))
        there = installed()
        self.assertEqual(set(packages) - {"thing"}, {name for name, _ in there})
        for (name, _), version in there.items():
            if sum(name == other for other, _ in there) == 1:
                self.assertEqual(packages[name]["versionInfo"], version)

    def test_a_bundle_lists_what_its_programs_load(self):
        with tempfile.TemporaryDirectory() as built:
            (pathlib.Path(built) / "devices.txt").write_text("CPU only\n")
            command = ('root=$PWD; for part in deploy/tools/*.sh; do source "$part"; done; '
                       'built=$1; shift; bill_of_materials "$@"')
            text = run("bash", "-euo", "pipefail", "-c", command, "-", built, *PROGRAMS)
        spdx = json.loads(text)
        packages = self.check(spdx)
        loaded = set()
        for line in run("ldd", *PROGRAMS).splitlines():
            found = re.search(r"=> (/\S+)", line)
            if found and "libtessera_kernels" not in line:
                loaded.add(pathlib.Path(found.group(1)).resolve())
        self.assertGreater(len(loaded), 20)
        relation = {
            r["relatedSpdxElement"]: r["relationshipType"]
            for r in spdx["relationships"] if r["spdxElementId"] == spdx["packages"][0]["SPDXID"]}
        # For some files in /usr/lib, the database has /lib. The database finds paths faster than
        # patterns.
        files = {str(path).split("/lib", 1)[1] for path in loaded}
        paths = [folder + file for folder in ("/lib", "/usr/lib") for file in files]
        found = subprocess.run(["dpkg-query", "-S", *paths], capture_output=True, text=True)
        owners = {}
        for line in found.stdout.splitlines():
            package, path = line.split(": ", 1)
            owners[path.split("/lib", 1)[1]] = package.split(":")[0]
        self.assertLessEqual(files, {*owners})
        for owner in {owners[file] for file in files}:
            self.assertIn(owner, packages)
            host = owner in ("libc6", "libstdc++6", "libgcc-s1")
            self.assertEqual(
                relation[packages[owner]["SPDXID"]], "DEPENDS_ON" if host else "CONTAINS")
        for tool in ("g++", "cmake", "libgrpc++-dev", "libspdlog-dev"):
            self.assertIn(tool, packages)

    def test_the_same_packages_give_the_same_bytes(self):
        rows = run(SCRIPT, "rows", "CONTAINS", "bash", "dpkg", "coreutils")
        shuffled = "".join(reversed(rows.splitlines(keepends=True))) + rows
        write = lambda text, **more: run(SCRIPT, "document", "thing", "1", text=text, **more)
        self.assertEqual(write(rows), write(shuffled))
        first, later = write(rows), write(rows, epoch="1700000001")
        space = lambda text: json.loads(text)["documentNamespace"]
        self.assertNotEqual(space(first), space(later))
        self.assertEqual(json.loads(first)["creationInfo"]["created"], "2023-11-14T22:13:20Z")

    def test_odd_text_stays_what_it_is(self):
        odd = 'O"Brien \\ & søn $(id) <o@example.org>'
        row = f"CONTAINS\tlibx++\t1:2~3+4\tamd64\t{odd}\thttps://example.org/?a=\"b\"\t\n"
        spdx = document(row + "BUILD_TOOL_OF\tlibx--\t1\tall\t\t\t\n")
        packages = self.check(spdx)
        self.assertEqual(packages["libx++"]["supplier"],
                         'Organization: O"Brien \\ & søn $(id) (o@example.org)')
        self.assertEqual(packages["libx++"]["homepage"], 'https://example.org/?a="b"')
        self.assertNotIn("supplier", packages["libx--"])

    def test_a_package_that_is_not_there_is_an_error(self):
        with self.assertRaises(subprocess.CalledProcessError):
            run(SCRIPT, "rows", "CONTAINS", "bash", "no-such-package")


if __name__ == "__main__":
    o.main()
