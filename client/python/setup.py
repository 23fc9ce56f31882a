"""Compiles the .proto files to tessera/protocol.binpb, the descriptors that the package reads.

An unpacked source archive has that file but no .proto files next to it. In that case the file is
kept.
"""

import pathlib
import subprocess

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
PROTO = HERE.parents[1] / "proto"
FILES = (
    "tessera/v1/buffer.proto",
    "tessera/v1/compute.proto",
    "tessera/v1/shared_memory.proto",
    "google/rpc/status.proto",
    "google/rpc/error_details.proto",
)


class BuildWithProtocol(build_py):
    def run(self) -> None:
        if PROTO.is_dir():
            out = HERE / "tessera" / "protocol.binpb"
            subprocess.run(
                ["protoc", f"-I{PROTO}", "--include_imports", f"--descriptor_set_out={out}"]
                + list(FILES),
                check=True,
                cwd=PROTO,
            )
        super().run()


setup(cmdclass={"build_py": BuildWithProtocol})
