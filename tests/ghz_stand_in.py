#!/usr/bin/python3
"""Stands in for ghz if it is not installed: makes the calls of a ghz configuration with plain
grpcio, in a loop with few callers, and reports them as ghz 0.121 does."""

import argparse
import collections
import concurrent.futures
import datetime
import json
import pathlib
import re
import tempfile
import threading
import time

import grpc
from google.protobuf import json_format

import outsider

CALLERS = 4  # Test machines are small.


def render(text, worker, number):
    """Replaces the template variables that the configurations use."""
    text = text.replace("{{.WorkerID}}", worker).replace("{{.RequestNumber}}", str(number))
    text = re.sub(r"\{\{repeat (\d+) `(\w+)`\}\}", lambda m: m[2] * int(m[1]), text)
    if "{{" in text:
        raise ValueError(f"unknown template in {text[:200]!r}")
    return text


class Method:
    """The call that a configuration names."""

    def __init__(self, config):
        service, name = config["call"].rsplit(".", 1)
        module = outsider.compute if service.endswith("ComputeService") else outsider.buffers
        self.descriptor = module.DESCRIPTOR.services_by_name[service.split(".")[-1]]
        self.method = self.descriptor.methods_by_name[name]
        self.request = getattr(module, self.method.input_type.name)
        self.response = getattr(module, self.method.output_type.name)
        self.path = f"/{service}/{name}"
        self.text = json.dumps(config["data"])

    def messages(self, worker="0", number=0):
        """Returns the request messages. Raises json_format.ParseError if the data are not such
        messages."""
        data = json.loads(render(self.text, worker, number))
        data = data if isinstance(data, list) else [data]
        return [json_format.ParseDict(message, self.request()) for message in data]

    def call(self, channel, messages, timeout, metadata=None):
        kind = ("stream" if self.method.client_streaming else "unary",
                "stream" if self.method.server_streaming else "unary")
        stub = getattr(channel, "_".join(kind))(
            self.path, self.request.SerializeToString, self.response.FromString)
        request = iter(messages) if kind[0] == "stream" else messages[0]
        answer = stub(request, timeout=timeout, metadata=metadata)
        return list(answer) if kind[1] == "stream" else answer


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(ms|s)", text).groups()
    return int(number) / (1000 if unit == "ms" else 1)


class Run:
    def __init__(self, config, channel):
        self.config, self.channel, self.method = config, channel, Method(config)
        self.details, self.lock, self.number = [], threading.Lock(), 0

    def one(self, worker):
        with self.lock:
            self.number += 1
            number = self.number
        messages = self.method.messages(worker, number)
        now, start = datetime.datetime.now(datetime.timezone.utc), time.perf_counter_ns()
        status, error = "OK", ""
        try:
            self.method.call(self.channel, messages, seconds(self.config["timeout"]),
                             list(self.config.get("metadata", {}).items()))
        except grpc.RpcError as failure:
            status = "".join(part.title() for part in failure.code().name.split("_"))
            error = f"rpc error: code = {status} desc = {failure.details()}"
        latency = time.perf_counter_ns() - start
        with self.lock:
            self.details.append({"timestamp": now.isoformat().replace("+00:00", "Z"),
                                 "latency": latency, "error": error, "status": status})

    def loop(self, worker, end):
        self.one(worker)  # Even if the machine is so busy that the end has already come.
        while time.monotonic() < end:
            self.one(worker)

    def run(self):
        start, callers = time.monotonic(), min(CALLERS, self.config["concurrency"])
        end = start + seconds(self.config["duration"])
        with concurrent.futures.ThreadPoolExecutor(callers) as pool:
            list(pool.map(self.loop, map(str, range(callers)), [end] * callers))
        return time.monotonic() - start


def count(details, key):
    return collections.Counter(detail[key] for detail in details if detail[key])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("target")
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    with tempfile.TemporaryDirectory() as folder:
        outsider.make_stubs(folder)
        with grpc.insecure_channel(arguments.target) as channel:
            run = Run(config, channel)
            total = run.run()
    schedule = {key: config[key] for key in config if key.startswith("load-")}
    arguments.output.write_text(json.dumps({
        "date": datetime.datetime.now().isoformat(), "endReason": "timeout",
        "options": {"call": config["call"], "host": arguments.target, "load-schedule": "const",
                    "metadata": config.get("metadata"), **schedule},
        "count": len(run.details), "total": int(total * 1e9), "rps": len(run.details) / total,
        "errorDistribution": count(run.details, "error"),
        "statusCodeDistribution": count(run.details, "status"), "details": run.details}))


if __name__ == "__main__":
    main()
