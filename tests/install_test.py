#!/usr/bin/env python3
"""Checks that what `cmake --install` installs works from any folder. Programs find their library. A
separate project finds the client library, builds the example of docs/cpp.md with it, and runs
it."""

import argparse
import pathlib
import re
import sys
import unittest

import outsider

ROOT = pathlib.Path(__file__).resolve().parent.parent

build = None  # --build


class InstallTest(outsider.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.prefix = cls.folder / "prefix"
        for component in ("server", "cli", "client"):
            cls.run_command("cmake", "--install", build, "--prefix", cls.prefix, "--component",
                            component)
        outsider.Program.path = str(cls.prefix / "bin" / "tessera-server")
        cls.server = cls.serve_class()

    @staticmethod
    def run_command(*command):
        result = outsider.run(*command, timeout=600)
        if result.returncode != 0:
            raise AssertionError(f"{command}: {result.stdout}{result.stderr}")
        return result.stdout

    def test_programs(self):
        out = self.run_command(self.prefix / "bin/tessera", "--server", self.server.address,
                               "health")
        self.assertEqual(out, "serving\n")
        maps = pathlib.Path(f"/proc/{self.server.pid}/maps").read_text()
        libraries = set(re.findall(r"\S+libtessera\w+\.so", maps))
        self.assertEqual(libraries, {str(self.prefix / "lib/tessera/libtessera_kernels.so")})

    def test_consumer(self):
        example = re.search(r"```cpp\n(.*?)```", (ROOT / "docs" / "cpp.md").read_text(), re.DOTALL)
        main, out = self.folder / "main.cc", self.folder / "consumer"
        main.write_text(example[1])
        self.run_command(
            "cmake", "-G", "Ninja", "-S", ROOT / "tests/consumer", "-B", out, f"-DMAIN={main}",
            f"-DCMAKE_PREFIX_PATH={self.prefix}",
            "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        self.run_command("cmake", "--build", out)
        commands = self.run_command("ninja", "-C", out, "-t", "commands")
        self.assertIn(f"{self.prefix}/include/tessera", commands)
        self.assertNotIn(f"{ROOT}/client", commands)  # Nothing refers to the sources.
        answer = self.run_command(out / "consumer", self.server.address)
        self.assertRegex(answer, r"^250000 by fixed_tree, the square of 500\n$")

    def test_headers_are_complete(self):
        """Every public header can be included by itself, and no header includes a file that is not
        installed."""
        installed = self.prefix / "include/tessera"
        names = [str(header.relative_to(installed)) for header in installed.rglob("*.h")]
        self.assertIn("client/ring_client.h", names)
        for name in [name for name in names if not name.endswith(".pb.h")]:
            with self.subTest(name):
                alone = self.folder / "alone.cc"
                alone.write_text(f'#include "{name}"\n')
                self.run_command("c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra",
                                 "-Werror", "-I", installed, alone)
        for header in installed.rglob("*.h"):
            for name in re.findall(r'#include "([^"]+)"', header.read_text()):
                ours = name.startswith(("client/", "kernels/", "server/", "tessera/"))
                self.assertTrue(not ours or (installed / name).is_file(), f"{header}: {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", required=True)
    options, rest = parser.parse_known_args()
    build = options.build
    unittest.main(argv=[sys.argv[0], *rest])
