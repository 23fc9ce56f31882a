"""Certificates for tests, made with openssl."""

import pathlib
import subprocess

import grpc


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def channel(address, ca, pair=None, *options):
    """Returns a separate connection that trusts a CA. pair: the client's certificate and key."""
    files = (ca.cert, *(pair[::-1] if pair else ()))
    credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in files))
    return grpc.secure_channel(
        address, credentials, [("grpc.use_local_subchannel_pool", 1), *options])


KEY = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")  # For -newkey.


class Authority:
    """A CA in its own folder."""

    def __init__(self, folder, name, newkey=KEY):
        self.folder = pathlib.Path(folder) / name
        self.folder.mkdir()
        self.cert, self.key = self.folder / "ca.pem", self.folder / "ca.key"
        openssl("req", "-x509", "-newkey", *newkey, "-nodes", "-days", "2", "-subj", f"/CN={name}",
                "-keyout", self.key, "-out", self.cert)

    def issue(self, name, days=2, names="IP:127.0.0.1,DNS:localhost", newkey=KEY):
        """Returns the paths of a certificate for 127.0.0.1, or for other names, and of its key."""
        base = self.folder / name
        request, cert, key = (base.with_suffix(suffix) for suffix in (".csr", ".pem", ".key"))
        extensions = base.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={names}\n")
        openssl("req", "-newkey", *newkey, "-nodes", "-subj", f"/CN={name}", "-keyout", key,
                "-out", request)
        openssl("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key,
                "-CAcreateserial", "-days", str(days), "-extfile", extensions, "-out", cert)
        return cert, key
