"""What the tests of the Python client share: the package from the sources, and a server."""

import argparse
import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import outsider as o

# Flags of a server that allows the slow products that tests interrupt.
PATIENT = ("--max-operation-seconds", "600", "--max-slow-operation-seconds", "600")
PACKAGE = o.ROOT / "client" / "python"


def build_protocol(folder):
    """The package's descriptors, where the import finds them. Tests that run at once may each
    write the file: what is there is complete at any moment. Without protoc, as on a bare GPU host,
    the file has to be there."""
    if shutil.which("protoc") is None:
        return
    out = pathlib.Path(folder) / "protocol.binpb"
    names = ["tessera/v1/compute", "tessera/v1/shared_memory", "google/rpc/status"]
    files = [f"{name}.proto" for name in [*names, "google/rpc/error_details"]]
    subprocess.run(
        ["protoc", f"-I{o.PROTO}", "--include_imports", f"--descriptor_set_out={out}", *files],
        check=True,
        cwd=o.PROTO,
    )
    staged = PACKAGE / "tessera" / f".protocol.{os.getpid()}"
    staged.write_bytes(out.read_bytes())
    os.replace(staged, PACKAGE / "tessera" / "protocol.binpb")


class Case(unittest.TestCase):
    """Tests with a server of their own for each class; FLAGS are the server's."""

    FLAGS = ()

    @classmethod
    def setUpClass(cls):
        import tessera as ts

        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.server = o.Server(folder.name, *cls.FLAGS)
        cls.addClassCleanup(cls.server.kill)
        cls.t = ts.connect(cls.server.address)
        cls.addClassCleanup(cls.t.close)


    @contextlib.contextmanager
    def calls(self):
        """The methods of the unary calls that the client makes meanwhile."""
        found = []
        call = self.t._io.call
        self.t._io.call = lambda method, *rest: found.append(method) or call(method, *rest)
        try:
            yield found
        finally:
            del self.t._io.call


def main(module):
    """Runs the tests of a module: --server PATH [--device DEVICE] [unittest arguments]."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--server", required=True)
    parser.add_argument("--device", default="cpu")
    arguments, rest = parser.parse_known_args()
    o.Program.path, o.Program.device = os.path.abspath(arguments.server), arguments.device
    unittest.main(module=module, argv=[sys.argv[0], *rest])


sys.path.insert(0, str(PACKAGE))
with tempfile.TemporaryDirectory() as _folder:
    build_protocol(_folder)
