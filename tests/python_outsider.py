"""Common parts of the Python client's tests: the package from the sources, and a server."""

import argparse
import contextlib
import sys
import unittest

import outsider as o

# Flags for a server that allows the slow products that tests interrupt.
PATIENT = ("--max-operation-seconds", "3600")
PACKAGE = o.ROOT / "client" / "python"


class Case(o.Case):
    """Tests with one server per class. FLAGS are the server's flags."""

    FLAGS = ()

    @classmethod
    def setUpClass(cls):
        import tessera as ts

        super().setUpClass()
        cls.server = cls.serve_class(*cls.FLAGS)
        cls.t = ts.connect(cls.server.address)
        cls.addClassCleanup(cls.t.close)

    @contextlib.contextmanager
    def calls(self):
        """Yields a list of the methods of the unary calls that the client makes in this context."""
        found = []
        call = self.t._io.call
        self.t._io.call = lambda method, *rest: found.append(method) or call(method, *rest)
        try:
            yield found
        finally:
            del self.t._io.call


def impatient(t, **options):
    """Gives a client shorter timeouts after it has connected with longer ones."""
    for name, value in options.items():
        object.__setattr__(t._core.options, name, value)


def main(module):
    """Runs the tests of a module: --server PATH [--device DEVICE] [unittest arguments]."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--server", required=True)
    parser.add_argument("--cli")
    parser.add_argument("--device", default="cpu")
    arguments, rest = parser.parse_known_args()
    o.Program.device, o.Program.warm_up = arguments.device, False
    unittest.main(module=module, argv=[sys.argv[0], *rest])


sys.path.insert(0, str(PACKAGE))
o.make_descriptors()
