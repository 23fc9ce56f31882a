"""Common parts of the Python suites: stubs of the protocol, server processes, parsed errors,
CRC-32C, and handwritten HTTP/2 frames.

Usage of a suite: X_test.py --server build/bin/tessera-server [--cli build/bin/tessera]
                  [--device cuda:0] [TEST...]
"""

import argparse
import atexit
import collections
import concurrent.futures
import contextlib
import importlib
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
import urllib.request

import google
import grpc
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
DESCRIPTORS = ROOT / "client" / "python" / "tessera" / "protocol.binpb"
START_TIMEOUT_S = 60  # A sanitized server on a busy machine is slow to start.
CALL_TIMEOUT_S = 60
MI = 1 << 20

# Filled by make_stubs(): tessera.v1.buffer_pb2 and so on.
buffers = compute = shared = buffer_grpc = compute_grpc = shared_grpc = None
status_pb2 = error_details_pb2 = None


# --- Stubs ----------------------------------------------------------------------------------------

MODULES = {"buffers": "tessera.v1.buffer_pb2",
           "compute": "tessera.v1.compute_pb2",
           "shared": "tessera.v1.shared_memory_pb2",
           "status_pb2": "google.rpc.status_pb2",
           "error_details_pb2": "google.rpc.error_details_pb2",
           "buffer_grpc": "tessera.v1.buffer_pb2_grpc",
           "compute_grpc": "tessera.v1.compute_pb2_grpc",
           "shared_grpc": "tessera.v1.shared_memory_pb2_grpc"}
SOURCES = [PROTO / (name.removesuffix("_pb2").replace(".", "/") + ".proto")
           for name in MODULES.values()
           if name.endswith("_pb2")]


def protoc(*outputs):
    """Compiles the protocol, including imported files."""
    subprocess.run(["protoc", f"-I{PROTO}", *outputs, *SOURCES], check=True)


def built_stubs():
    """Returns the folder where the build keeps the stubs of the server's protocol, or None."""
    folder = pathlib.Path(Program.path or "").absolute().parent.parent / "stubs"
    return folder if (folder / "tessera").is_dir() else None


def make_stubs(folder=None):
    """Imports the Python modules of the protocol. They come from the build, or are generated into
    folder or a temporary folder. If protoc or its plugin is missing, as on a bare GPU host, they
    are made from DESCRIPTORS, which must exist."""
    plugin = shutil.which("grpc_python_plugin")
    stubs = built_stubs()
    if stubs is None and plugin and shutil.which("protoc"):
        stubs = folder
        if stubs is None:
            stubs = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, stubs)
        out = (f"--python_out={stubs}", f"--grpc_python_out={stubs}")
        protoc(*out, f"--plugin=protoc-gen-grpc_python={plugin}")
    if stubs is not None:
        sys.path.insert(0, str(stubs))
        # protobuf itself is in the package "google" as well.
        google.__path__.append(os.path.join(stubs, "google"))
    else:
        import descriptor_stubs

        descriptor_stubs.install(DESCRIPTORS)
    globals().update((name, importlib.import_module(path)) for name, path in MODULES.items())


def make_descriptors():
    """Updates DESCRIPTORS, which the Python client reads when it is imported. Concurrent suites may
    each write it, but the file is always complete. Without protoc, it must exist."""
    stubs = built_stubs()
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(stubs or folder) / "protocol.binpb"
        if not made.exists():
            if shutil.which("protoc") is None:
                return
            made = pathlib.Path(folder) / "protocol.binpb"
            protoc("--include_imports", f"--descriptor_set_out={made}")
        data = made.read_bytes()
    if not DESCRIPTORS.exists() or DESCRIPTORS.read_bytes() != data:
        staged = DESCRIPTORS.with_name(f".protocol.{os.getpid()}")
        staged.write_bytes(data)
        os.replace(staged, DESCRIPTORS)


# --- Values ---------------------------------------------------------------------------------------

NUMPY_TYPES = {1: "<f4", 2: "<f8", 3: "<f2", 4: "<u2", 5: "<i4", 6: "<i8", 7: "?", 8: "u1", 9: "i1"}
WIRE_TYPES = {
    "float32": 1, "float64": 2, "float16": 3, "uint16": 4, "int32": 5, "int64": 6, "bool": 7,
    "uint8": 8, "int8": 9}


def dtype_of(array):
    """Returns the protocol's type of a NumPy array. uint16 stands for the bits of bf16."""
    return WIRE_TYPES[array.dtype.name]


def spec_of(array, **more):
    return buffers.BufferSpec(dtype=dtype_of(array), shape=array.shape, **more)


def tensor(array):
    array = np.asarray(array)
    return compute.Tensor(
        dtype=dtype_of(array), shape=array.shape, data=np.ascontiguousarray(array).tobytes())


def to_numpy(message):
    return np.frombuffer(message.data, NUMPY_TYPES[message.dtype]).reshape(tuple(message.shape))


def view(shape, strides=(), offset=0):
    return buffers.View(offset=offset, shape=shape, strides=strides)


def resident(name, window=None, version=0):
    return compute.Operand(buffer=name, view=window, version=version)


def inline(array, window=None):
    return compute.Operand(tensor=tensor(array), view=window)


def methods(*modules):
    """Returns the path of each method of the protocol, or of some of its files, by name."""
    services = [service for module in modules or (buffers, compute, shared)
                for service in module.DESCRIPTOR.services_by_name.values()]
    return {method.name: f"/{service.full_name}/{method.name}"
            for service in services for method in service.methods}


def operations():
    """Returns the method of each operation, by the operation's name."""
    fields = compute.Step.DESCRIPTOR.oneofs_by_name["operation"].fields
    return {field.name: field.message_type.name.removesuffix("Request") for field in fields}


def fields_of(rpc, operand):
    """Returns the fields of an operation's request: the operand in the place of each operand, and 1
    for each number without which the request is refused."""
    fields = {}
    if rpc == "Linalg":
        matrix = compute.Operand()
        matrix.CopyFrom(operand)
        matrix.view.CopyFrom(buffers.View(shape=[1, 1]))
        return dict(function="LINALG_FUNCTION_QR", x=matrix)
    for field in compute.DESCRIPTOR.message_types_by_name[rpc + "Request"].fields:
        if field.name in ("a", "b", "x"):
            fields[field.name] = operand
        elif field.name == "indices" and field.message_type.name == "Operand":
            fields["indices"] = inline(np.zeros(1, np.int64))
        elif field.name in ("mask", "keys", "labels"):
            fields["x"] = compute.Operand()
            fields["x"].CopyFrom(operand)
            fields["x"].view.CopyFrom(buffers.View(shape=[1]))
            fields[field.name] = {"mask": inline(np.ones(1, bool)), "keys": operand,
                                  "labels": inline(np.zeros(1, np.int64))}[field.name]
        elif field.name == "even":
            fields["even"] = dict(count=1, high=1)
        elif field.name == "integers":
            continue  # the bins are even
        elif field.name == "operands":
            fields["operands"] = [operand]
            fields["expression"] = dict(nodes=[dict(operand=0)])
        elif field.name == "op" or field.type == field.TYPE_INT64:
            fields[field.name] = 1
    return fields


def into(name, **more):
    return compute.Result(buffer=compute.BufferTarget(name=name, **more))


def operand(number):
    return dict(operand=number)


def node(op, *args, dtype=0):
    return dict(op="MAP_OP_" + op, args=args, dtype=dtype)


def expression(*nodes):
    return compute.Expression(nodes=[compute.Expression.Node(**fields) for fields in nodes])


def step(number, window=None, output=0):
    """Returns the result of an earlier step of a program as an operand."""
    return compute.Operand(step=number, view=window, output=output)


def scratch():
    return compute.Result(scratch=True)


def _crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data, crc=0):
    """Returns CRC-32C (Castagnoli), as in RFC 3720. For b"123456789" it is 0xe3069283."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


# --- Errors ---------------------------------------------------------------------------------------

class Outcome:
    """How a call ended: its code ("OK", "NOT_FOUND"...), the reason and metadata of its ErrorInfo,
    and its text."""

    def __init__(self, answer=None, error=None):
        self.answer = answer
        self.code = "OK"
        self.reason = ""
        self.domain = ""
        self.metadata = {}
        self.retry_s = None  # The delay of a RetryInfo, in seconds.
        self.text = ""
        if error is None:
            return
        self.code = error.code().name
        self.text = error.details() or ""
        for key, value in error.trailing_metadata() or ():
            if key != "grpc-status-details-bin":
                continue
            info = error_details_pb2.ErrorInfo()
            retry = error_details_pb2.RetryInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    self.reason, self.domain = info.reason, info.domain
                    self.metadata = dict(info.metadata)
                elif detail.Unpack(retry):
                    self.retry_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9

    @classmethod
    def of_step(cls, result):
        """Returns the outcome of one StepResult of a program."""
        kind = result.WhichOneof("result")
        if kind != "error":
            return cls(answer=getattr(result, kind))
        outcome = cls()
        codes = {code.value[0]: code.name for code in grpc.StatusCode}
        outcome.code, outcome.text = codes[result.error.code], result.error.message
        outcome.reason, outcome.domain = result.error.reason, "tessera"
        outcome.metadata = dict(result.error.metadata)
        return outcome

    @property
    def ok(self):
        return self.code == "OK"

    def __repr__(self):
        if self.ok:
            return "OK"
        return f"{self.code}/{self.reason or '-'} {self.metadata} {self.text[:200]!r}"


def outcome_of(call):
    """Returns the outcome of a function, or of a gRPC future."""
    try:
        return Outcome(
            answer=call() if callable(call) and not hasattr(call, "result") else call.result())
    except grpc.RpcError as error:
        return Outcome(error=error)
    except grpc.FutureCancelledError:
        outcome = Outcome()
        outcome.code = "CANCELLED"
        return outcome


def check_refusal(outcome, code, reason, /, **metadata):
    """Checks that the call failed with this code, reason and metadata. Returns the outcome."""
    assert (outcome.code, outcome.reason, outcome.domain) == (code, reason, "tessera"), outcome
    for key, value in metadata.items():
        assert outcome.metadata.get(key) == str(value), f"{key} of {outcome}"
    return outcome


# --- Clients --------------------------------------------------------------------------------------

class Client:
    """A separate connection, with the stubs and the few calls that every test makes."""

    def __init__(self, address, **channel):
        options = [("grpc.use_local_subchannel_pool", 1), *channel.pop("options", ())]
        self.channel = grpc.insecure_channel(address, options=options, **channel)
        self.b = buffer_grpc.BufferServiceStub(self.channel)
        self.c = compute_grpc.ComputeServiceStub(self.channel)

    def close(self):
        self.channel.close()

    def call(self, rpc, timeout=CALL_TIMEOUT_S, **fields):
        """Returns the response of a unary method, given the fields of its request."""
        module, stub = (buffers, self.b) if hasattr(self.b, rpc) else (compute, self.c)
        return getattr(stub, rpc)(getattr(module, rpc + "Request")(**fields), timeout=timeout)

    def future(self, rpc, timeout=CALL_TIMEOUT_S, **fields):
        module, stub = (buffers, self.b) if hasattr(self.b, rpc) else (compute, self.c)
        request = getattr(module, rpc + "Request")(**fields)
        return getattr(stub, rpc).future(request, timeout=timeout)

    def attempt(self, rpc, **fields):
        return outcome_of(lambda: self.call(rpc, **fields))

    def upload(self, messages, timeout=CALL_TIMEOUT_S):
        """Uploads messages, which are dicts of fields."""
        requests = (buffers.UploadRequest(**fields) for fields in messages)
        return self.b.Upload(requests, timeout=timeout)

    def try_upload(self, messages, **more):
        return outcome_of(lambda: self.upload(messages, **more))

    def begin_upload(self, hold, *messages, then=(), pause=None, timeout=600, **how):
        """Begins an upload of messages. Until the event hold is set, it sends nothing more, or an
        empty message after each pause. Then it sends the rest."""

        def requests():
            yield from (buffers.UploadRequest(**fields) for fields in messages)
            while not hold.wait(pause):
                yield buffers.UploadRequest()
            yield from (buffers.UploadRequest(**fields) for fields in then)

        return self.b.Upload.future(requests(), timeout=timeout, **how)

    def put(self, name, array, **spec):
        """Uploads an array in messages of 1 MiB."""
        array = np.asarray(array)
        data = array.tobytes()
        parts = [dict(data=data[i : i + MI]) for i in range(0, max(1, len(data)), MI)]
        parts[0].update(name=name, spec=spec_of(array, **spec))
        return self.upload(parts).buffer

    def create(self, name, array, **spec):
        array = np.asarray(array)
        return self.call("CreateBuffer", name=name, spec=spec_of(array, **spec)).buffer

    def download(self, name, timeout=CALL_TIMEOUT_S, **fields):
        request = buffers.DownloadRequest(name=name, **fields)
        return b"".join(message.data for message in self.b.Download(request, timeout=timeout))

    def dot_of_ones(self, timeout=CALL_TIMEOUT_S):
        """Makes the smallest call that needs a worker."""
        one = np.ones(1, np.float32)
        return self.call("Dot", timeout=timeout, a=inline(one), b=inline(one)).value.real

    def info(self):
        return self.call("GetServerInfo")

    def device(self):
        return self.info().devices[0]

    def devices(self):
        """Returns the names of the devices."""
        return [device.name for device in self.info().devices]

    def strategies(self, operation):
        """Returns the available strategies of the first device."""
        listed = self.call("ListStrategies", operation=operation, backend=self.device().backend)
        return [one for one in listed.strategies if one.available]

    def is_idle(self):
        """Returns whether no operation is waiting and none holds scratch memory."""
        return not any(d.scratch_used_bytes or d.waiting for d in self.info().devices)

    def budget(self, name):
        found = [budget for budget in self.info().budgets if budget.name == name]
        if len(found) != 1:
            raise AssertionError(f"GetServerInfo has {len(found)} budgets named {name!r}")
        return found[0]

    def health(self, service="tessera.v1.ComputeService", timeout=CALL_TIMEOUT_S):
        """Returns 1 for SERVING and 2 for NOT_SERVING. grpc.health.v1 is not packaged for Python
        here, so its HealthCheckRequest { string service = 1; } and HealthCheckResponse { enum
        status = 1; } are written as bytes."""
        name = service.encode()
        request = b"\x0a" + bytes([len(name)]) + name if name else b""
        answer = self.channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=timeout)
        return answer[1] if len(answer) == 2 and answer[0] == 8 else 0

    def names(self):
        return [buffer.name for buffer in self.call("ListBuffers", page_size=1000).buffers]


# --- Servers --------------------------------------------------------------------------------------

def environment(**more):
    """Returns this process's environment without the variables that the project's programs read,
    plus `more`."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("TESSERA_")}, **more}


def program_flag(name):
    """Returns the absolute path that the command line gives for a program, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, type=os.path.abspath)
    return vars(parser.parse_known_args()[0])[name.strip("-")]


class Program:
    """The executables, and the device that the tests run on."""

    path = program_flag("--server")  # The path of the server.
    cli = program_flag("--cli")
    device = "cpu"
    # Whether servers on the CPU measure its strategies before they listen.
    warm_up = True
    _sanitized = None

    @classmethod
    def sanitized(cls):
        """Returns whether the server was built with AddressSanitizer or ThreadSanitizer."""
        if cls._sanitized is None:
            program = pathlib.Path(cls.path).read_bytes()
            cls._sanitized = b"__asan_init" in program or b"__tsan_init" in program
        return cls._sanitized

    @classmethod
    def patience(cls):
        """Returns how many times longer than a plain server this one may take. Under a sanitizer,
        servers that run in parallel share few cores."""
        return 5 if cls.sanitized() else 1


def descriptors(server):
    """Returns the number of descriptors that the process has open."""
    return len(os.listdir(f"/proc/{server.pid}/fd"))


# Matches in the log of a server, or on a separate line.
LISTENING = rb"(?m)(?:listening on |^)(unix:\S+|\d+(?:\.\d+){3}:[1-9]\d*)[\s\"]"


class Server:
    """A server process, by default on a free loopback port."""

    def __init__(self, folder, *flags, prefix=(), pipe=False, listen="127.0.0.1:0", device=None,
                 command=None, **variables):
        """pipe: the log goes into a pipe, which is not read once the address is known. listen:
        another address. device: a device other than the suite's. command: the command of another
        program that listens, which gets only the flags. variables: its environment variables."""
        self.log_path = pathlib.Path(folder) / f"server{time.monotonic_ns()}.log"
        self.clients = []
        device = device or Program.device
        if command is None:
            command = (Program.path, "--listen", listen, "--device", device)
            if not Program.warm_up and device.startswith("cpu"):
                flags = ("--no-warm-up", *flags)
        command = [*prefix, *command, *map(str, flags)]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if pipe else log,
                stderr=subprocess.STDOUT, env=environment(**variables))
        self.pid = self.process.pid
        self.pipe = self.process.stdout.fileno() if pipe else None
        give_up = time.monotonic() + START_TIMEOUT_S
        text = b""
        while True:
            text = text + os.read(self.pipe, 4096) if pipe else self.log_path.read_bytes()
            found = re.search(LISTENING, text)
            if found:
                self.address = found.group(1).decode()
                return
            if self.process.poll() is not None or time.monotonic() > give_up:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the server did not start: {' '.join(map(str, command))}\n"
                                     + text.decode(errors="replace"))
            time.sleep(0.01)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()

    def client(self, **channel):
        client = Client(self.address, **channel)
        self.clients.append(client)
        return client

    def socket(self, timeout=60, here=None):
        """Returns a connection. here: the local address and port, which may have other
        connections."""
        host, port = self.address.rsplit(":", 1)
        address = (host.strip("[]"), int(port))
        if here is None:
            return socket.create_connection(address, timeout=timeout)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.settimeout(timeout)
        connection.bind(here)
        connection.connect(address)
        return connection

    def log(self):
        return self.log_path.read_bytes().decode(errors="surrogateescape")

    def http_address(self):
        """Returns the address that --metrics-listen has chosen."""
        return re.search(r"metrics at http://([^/\s]+)/", self.log())[1]

    def page(self, path="metrics"):
        with urllib.request.urlopen(f"http://{self.http_address()}/{path}", timeout=60) as answer:
            return answer.read().decode()

    def _status(self, key):
        with open(f"/proc/{self.pid}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith(key + ":"):
                    return int(line.split()[1])
        raise AssertionError(
            f"the server (pid {self.pid}) is gone: exit code {self.process.poll()}")

    def rss(self):
        """Returns the resident memory in bytes."""
        return self._status("VmRSS") * 1024

    def peak_rss(self):
        return self._status("VmHWM") * 1024

    def threads(self):
        return self._status("Threads")

    def cpu_seconds(self):
        """Returns the CPU time of all its threads in seconds, with a resolution of one clock
        tick."""
        fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def asleep(self):
        """Returns whether no thread of the server and no other thread of this process is running or
        runnable. In that case nothing that was sent is still in transit."""
        return asleep(self.pid) and asleep(os.getpid())

    def alive(self):
        return self.process.poll() is None

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, timeout):
        """Returns the exit code, or None if the process has not ended."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout=START_TIMEOUT_S):
        """Returns the exit code after SIGTERM."""
        self.signal()
        return self.wait(timeout)

    def kill(self):
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def asleep(pid):
    """Returns whether none of the process's threads except the caller's is running or runnable."""
    states = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
            if int(task.name) != threading.get_native_id():
                states.append((task / "stat").read_text().rsplit(")", 1)[1].split()[0])
    return "R" not in states


@contextlib.contextmanager
def handling(service):
    """Yields the address of a gRPC server. service(details) returns the handler of a call."""
    handler = type("Handler", (grpc.GenericRpcHandler,), {"service": staticmethod(service)})
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), [handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def answering(answer):
    """Does the same as handling(). Unary calls return answer(method, request) in bytes."""
    return handling(lambda details: grpc.unary_unary_rpc_method_handler(
        lambda request, _: answer(details.method, request)))


def refused(*flags):
    """Returns the output of a server that refuses to start."""
    command = [Program.path, "--device", "cpu", "--no-warm-up", *map(str, flags)]
    ended = run(*command)
    assert ended.returncode == 1, ended.stderr
    return ended.stdout + ended.stderr


def run(*command, timeout=120, env=None, **more):
    """Runs a program to its end, and returns it with its output."""
    return subprocess.run(
        list(map(str, command)), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=timeout, env=environment() if env is None else env, **more)


def eventually(condition, seconds=60, pause=0.02):
    """Returns the condition's value once it is true, or its last, falsy value after that time."""
    give_up = time.monotonic() + seconds * Program.patience()
    while True:
        value = condition()
        if value or time.monotonic() > give_up:
            return value
        time.sleep(pause)


@contextlib.contextmanager
def meanwhile(work):
    """Calls work() again and again in another thread until the block ends."""
    over = threading.Event()

    def run_on():
        while not over.is_set():
            work()

    thread = threading.Thread(target=run_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def in_threads(count, work):
    """Runs work(i) in count threads at the same time. Raises the first exception again."""
    errors = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:  # pylint: disable=broad-except
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- Handwritten HTTP/2 ---------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS = 1, 4


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def request_headers(path):
    """Returns the header block of a gRPC POST, with literals that are not indexed."""

    def text(value):
        value = value.encode()
        assert len(value) < 127
        return bytes([len(value)]) + value

    fields = [(":method", "POST"),
              (":scheme", "http"),
              (":path", path),
              (":authority", "localhost"),
              ("te", "trailers"),
              ("content-type", "application/grpc")]
    return b"".join(b"\x00" + text(name) + text(value) for name, value in fields)


class RawConnection:
    """An HTTP/2 connection that does only what it is told to do."""

    def __init__(self, server=None, window=None, here=None, tls=None, begun=None,
                 session=None):
        """window: the number of bytes of a response that may arrive before the stream's reader
        requests more. here: as for Server.socket. tls: an ssl.SSLContext. begun: a socket whose
        preface has been sent. session: the ssl.SSLSession to resume."""
        self.bytes, self.next_stream, self.socket = b"", 1, begun
        if begun is not None:
            return
        self.socket = server.socket(here=here)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost",
                                          session=session)
        settings = b"" if window is None else struct.pack(">HI", 4, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))

    def send(self, *frames):
        self.socket.sendall(b"".join(frames))

    def call(self, path, request):
        """Begins a unary call with a request message. The connection's own window must suffice."""
        body = request.SerializeToString()
        body = b"\0" + len(body).to_bytes(4, "big") + body
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        parts = [body[i : i + 16384] for i in range(0, len(body), 16384)]
        self.send(frame(HEADERS, END_HEADERS, stream, request_headers(path)))
        for part in parts:
            self.send(frame(DATA, END_STREAM if part is parts[-1] else 0, stream, part))

    def read_frame(self, seconds):
        """Returns (kind, flags, stream, payload), or None if the connection or the time ends."""
        give_up = time.monotonic() + seconds
        while True:
            if len(self.bytes) >= 9:
                length = int.from_bytes(self.bytes[:3], "big")
                if len(self.bytes) >= 9 + length:
                    kind, flags, stream = struct.unpack(">BBI", self.bytes[3:9])
                    payload = self.bytes[9 : 9 + length]
                    self.bytes = self.bytes[9 + length :]
                    if kind == SETTINGS and not flags & 1:
                        self.send(frame(SETTINGS, 1, 0))
                    elif kind == PING and not flags & 1:
                        self.send(frame(PING, 1, 0, payload))
                    return kind, flags, stream, payload
            left = give_up - time.monotonic()
            if left <= 0:
                return None
            self.socket.settimeout(left)
            try:
                more = self.socket.recv(65536)
            except OSError:
                return None
            if not more:
                return None
            self.bytes += more

    def find_frame(self, kind, seconds):
        give_up = time.monotonic() + seconds
        while True:
            found = self.read_frame(max(0, give_up - time.monotonic()))
            if found is None or found[0] == kind:
                return found

    def close(self):
        self.socket.close()


# --- Suites of functions --------------------------------------------------------------------------

class Case(unittest.TestCase):
    """Tests with one folder per class, and servers that end with their test."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)

    @classmethod
    def serve_class(cls, *flags, **how):
        """Starts a server that ends with the class."""
        server = Server(cls.folder, *flags, **how)
        cls.addClassCleanup(server.kill)
        return server

    def serve(self, *flags, **how):
        server = Server(self.folder, *flags, **how)
        self.addCleanup(server.kill)
        return server


class FreshCase(Case):
    """Each test has its own folder."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))


def cases_of(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases_of(test)
        else:
            yield test


def run_case(case):
    """Returns (name, verdict, seconds, texts)."""
    result = unittest.TestResult()
    started = time.monotonic()
    case.run(result)
    texts = [f"{which}\n{text}" for which, text in result.failures + result.errors]
    verdict = "FAILED" if texts else "skipped" if result.skipped else "ok"
    name = f"{type(case).__name__}.{case._testMethodName}"
    return name, verdict, time.monotonic() - started, texts or [why for _, why in result.skipped]


def run_cases(names, jobs, by_class):
    """Runs the cases whose names contain one of the names, `jobs` cases at a time. With by_class,
    the cases of one class run one after the other. Returns the exit code."""
    module = sys.modules["__main__"]
    every = cases_of(unittest.defaultTestLoader.loadTestsFromModule(module))
    groups, verdicts = collections.defaultdict(list), []
    for case in every:
        if not names or any(name in case.id() for name in names):
            groups[type(case) if by_class else case].append(case)

    def end(one):
        one.doClassCleanups()
        for _, error, _ in one.tearDown_exceptions:
            verdicts.append("FAILED")
            print(f"FAILED at the end of {one.__name__}: {error}", flush=True)

    def run_group(group):
        for case in group:
            name, verdict, seconds, texts = run_case(case)
            verdicts.append(verdict)
            print(f"{verdict:8}{seconds:6.1f} s  {name}", *texts, sep="\n    ", flush=True)
        if by_class:
            end(type(group[0]))

    classes = {type(case) for group in groups.values() for case in group}
    # The classes that wait longest are last in a suite, and run first.
    order = list(vars(module))
    queue = sorted(groups.values(), key=lambda group: -order.index(type(group[0]).__name__))
    try:
        for one in classes:
            one.setUpClass()
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(run_group, group) for group in queue]:
                done.result()
    finally:
        for one in classes:
            end(one)
    counts = collections.Counter(verdicts)
    print(f"{counts['ok']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped")
    return 0 if counts["ok"] and not counts["FAILED"] else 1


def main(jobs=1, by_class=False):
    """Runs the cases of a suite, `jobs` cases at a time. The command line is --server PATH [--cli
    PATH] [--device DEVICE] and unittest's arguments, or parts of names if cases run at the same
    time. by_class: the cases of one class run one after the other."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--server", required=True)
    for program in ("--cli", "--bench", "--recorder"):
        parser.add_argument(program)
    parser.add_argument("--device", default="cpu", help="such as cuda:0")
    arguments, rest = parser.parse_known_args()
    Program.device, Program.warm_up = arguments.device, False
    make_stubs()
    if jobs > 1:
        sys.exit(run_cases([name for name in rest if name != "-k"], jobs, by_class))
    unittest.main(argv=[sys.argv[0], *rest])


def run_tests(namespace, *flags, device="cpu"):
    """Calls the tests of a suite, which are the functions test_* of a module. Each test gets a
    client and a separate server, which has these flags (with a folder for "{folder}") and must end
    without an error. Reads the server, the device and parts of names from the command line. Returns
    the exit code."""
    parser = argparse.ArgumentParser(description=namespace["__doc__"].split("\n", maxsplit=1)[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--device", default=device)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    Program.device, Program.warm_up = arguments.device, False
    parts, verdicts = arguments.names or [""], collections.Counter()
    tests = {name: test for name, test in namespace.items()
             if name.startswith("test_") and any(part in name for part in parts)}
    with tempfile.TemporaryDirectory() as folder:
        make_stubs(folder)
        for name, test in tests.items():
            begin = time.monotonic()
            server = Server(folder, *(flag.replace("{folder}", folder) for flag in flags))
            try:
                client = server.client()
                client.dot_of_ones()  # The connection is established from here on.
                test(server, client)
                client.close()
                end = server.stop() if server.alive() else server.process.returncode
                assert end in (0, None), f"the server ended with {end}"
                verdict = "ok"
            except unittest.SkipTest as why:
                verdict = "skipped"
                print(why)
            except Exception:
                verdict = "FAILED"
                traceback.print_exc()
                print(server.log()[-2000:])
            finally:
                server.kill()
            verdicts[verdict] += 1
            print(f"{verdict:8}{time.monotonic() - begin:6.1f} s  {name}", flush=True)
    print(f"{verdicts['ok']} passed, {verdicts['FAILED']} failed, {verdicts['skipped']} skipped")
    return 0 if tests and not verdicts["FAILED"] else 1
