#!/usr/bin/env python3
"""Tests the Python package as users get it: the wheel in a clean environment, the lines of the
README, the tutorial line by line, the examples and their pages."""

import doctest
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import outsider as o
import python_outsider
from python_outsider import PACKAGE

DEFAULT = "127.0.0.1:50051"
EXAMPLES = sorted(path.stem for path in (PACKAGE / "examples").glob("*.py"))
# Arguments with which the examples take one second.
SMALL = {"least_squares": (), "linear_model": ("--seconds", "0.5"),
         "nearest_neighbours": ("--rows", "5000"), "principal_components": (),
         "streaming_statistics": ("--mib", "24", "--piece-mib", "8")}


def run(command, **options):
    process = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=240, **options)
    if process.returncode != 0:
        raise AssertionError(f"{command}: exit code {process.returncode}\n{process.stdout}")
    return process.stdout


def run_here(*command):
    """Runs a Python program with the package from the sources."""
    return run([sys.executable, *command], env={**os.environ, "PYTHONPATH": str(PACKAGE)})


def package_folder(name):
    return pathlib.Path(importlib.import_module(name).__file__).resolve().parent


class PackageTest(python_outsider.Case):
    def block(self, path):
        """Returns the first Python block of a page, adapted to the test's server."""
        page = (o.ROOT / path).read_text(encoding="utf-8")
        code = re.search(r"```python\n(import numpy.*?)```", page, re.S).group(1)
        self.assertIn(DEFAULT, code)
        return code.replace(DEFAULT, self.server.address)

    def test_the_wheel_in_a_clean_environment(self):
        """The wheel is built in a copy of the sources, so that nothing is left in them."""
        root = self.folder / "sources"
        package = root / "client" / "python"
        ignore = shutil.ignore_patterns("build", "dist", "*.egg-info", "*.binpb", "__pycache__")
        shutil.copytree(PACKAGE, package, ignore=ignore)
        shutil.copytree(o.PROTO, root / "proto")
        run([sys.executable, "-m", "build", "--wheel", "--no-isolation", package])
        (wheel,) = (package / "dist").glob("*.whl")
        self.assertTrue(wheel.name.endswith("-py3-none-any.whl"), wheel.name)
        names = zipfile.ZipFile(wheel).namelist()
        for name in ("tessera/py.typed", "tessera/protocol.binpb", "tessera/aio.py"):
            self.assertIn(name, names)
        self.assertFalse([name for name in names if "_pb2" in name])
        venv = self.folder / "venv"
        run([sys.executable, "-m", "venv", "--without-pip", venv])
        python = venv / "bin" / "python"
        with_installer = {**os.environ, "PYTHONPATH": str(package_folder("installer").parent)}
        run([python, "-m", "installer", wheel], env=with_installer)
        self.expose(python, "numpy", "grpc", "google.protobuf")
        where = run([python, "-c", "import tessera; print(tessera.__file__)"], cwd=self.folder)
        self.assertTrue(where.startswith(str(venv)), where)
        for page in ("README.md", "client/python/README.md"):
            script = self.folder / "readme.py"
            script.write_text(self.block(page))
            self.assertIn("one Execute", run([python, script], cwd=o.ROOT))

    def expose(self, python, *packages):
        """Makes only these packages of this environment visible to a clean one."""
        shown = self.folder / "shown"
        for name in packages:
            link = shown / name.replace(".", "/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(package_folder(name))
            # Wheels also have shared libraries, and compiled modules next to the package.
            folder = link.resolve().parent
            for more in (f"{name}.libs", "_upb"):
                if (folder / more).exists():
                    (link.parent / more).symlink_to(folder / more)
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = pathlib.Path(run([python, "-c", code]).strip())
        (site / "shown.pth").write_text(f"{shown}\n", encoding="utf-8")

    def test_the_tutorial_line_by_line(self):
        page = (o.ROOT / "docs" / "python.md").read_text(encoding="utf-8")
        for name in [array.name for array in self.t.list()]:
            self.t.delete(name)
        page = page.replace(DEFAULT, self.server.address)
        test = doctest.DocTestParser().get_doctest(page, {}, "docs/python.md", None, 0)
        self.assertGreater(len(test.examples), 30)
        flags = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL | doctest.ELLIPSIS
        report = []
        doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
        self.assertFalse(report, "".join(report))

    def test_the_examples(self):
        self.assertEqual(EXAMPLES, sorted(SMALL))
        for name, arguments in SMALL.items():
            with self.subTest(name):
                run_here(PACKAGE / "examples" / f"{name}.py", self.server.address, *arguments)

    def test_the_typed_example(self):
        run_here(o.ROOT / "tests" / "typed_example.py", self.server.address)

    def test_the_comparison_with_peers(self):
        """NumPy replaces CuPy, and the script itself compares all results."""
        out = self.folder / "peers.json"
        options = "--peer numpy --rounds 1 --seconds 0 --elements 1000 --json".split()
        run_here(PACKAGE / "peers.py", self.server.address, *options, out)
        rows = json.loads(out.read_text())["rows"]
        self.assertEqual(len(rows), 5 * 10)
        self.assertTrue(all(row["us"] > 0 for row in rows))

    def test_pages_that_programs_write_are_fresh(self):
        for program in ("render_examples.py", "make_api_page.py"):
            run_here(PACKAGE / program, "--check")

    def test_generated_code_of_the_same_files_may_be_there_as_well(self):
        stubs = self.folder / "stubs"
        stubs.mkdir()
        files = [f"{o.PROTO}/tessera/v1/{name}.proto" for name in ("buffer", "compute")]
        run(["protoc", f"-I{o.PROTO}", f"--python_out={stubs}", *files])
        script = ("import tessera as ts\n"
                  "from tessera.v1 import compute_pb2\n"
                  f"t = ts.connect({self.server.address!r})\n"
                  "print(float(t.put([1.0, 2.0]).sum()), compute_pb2.DotRequest(strategy='x'))\n")
        for order in ([stubs, PACKAGE], [PACKAGE, stubs]):
            environment = {**os.environ, "PYTHONPATH": ":".join(map(str, order))}
            self.assertIn("3.0", run([sys.executable, "-c", script], env=environment))


if __name__ == "__main__":
    python_outsider.main("__main__")
