#!/usr/bin/env python3
"""Opens the status page in headless Chromium, light and dark, wide and narrow, while calls are
made. Checks that nothing overflows the page, no number is missing, text has contrast, and scripts
have no errors. Leaves pictures for inspection. Needs Chromium; CI does not run it.

usage: status_page.py --server build/bin/tessera-server [--out FOLDER]

The pictures "gpu" show made-up numbers instead of those of a GPU's driver, and a label that
contains markup."""

import argparse
import base64
import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import outsider as o  # noqa: E402

LOAD_SECONDS = 110  # The curves show two minutes.
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
GPU = """
tessera_gpu_busy_ratio{device="cpu"} 0.87
tessera_gpu_memory_used_bytes{device="cpu"} 75161927680
tessera_gpu_temperature_celsius{device="cpu"} 61
tessera_gpu_power_watts{device="cpu"} 612.345
tessera_gpu_power_limit_watts{device="cpu"} 700
tessera_gpu_sm_clock_hertz{device="cpu"} 1.755e+09
tessera_gpu_slowdown{device="cpu",reason="power_cap"} 1
tessera_gpu_slowdown{device="cpu",reason="thermal_hardware"} 0
tessera_gpu_memory_errors_total{device="cpu",kind="corrected"} 3
tessera_gpu_memory_errors_total{device="cpu",kind="uncorrected"} 0
tessera_error_last_timestamp_seconds{code="UNKNOWN",\
reason="<img src=x onerror=document.title=1>\\"\\\\"} 1
"""
# The contrast that WCAG requires for text: 4.5.
CONTRAST = """(() => {
  const style = getComputedStyle(document.documentElement);
  const light = name => {
    const hex = style.getPropertyValue("--" + name).trim().slice(1);
    const digits = hex.length === 3 ? [...hex].map(d => d + d) : hex.match(/../g);
    const [r, g, b] = digits.map(d => parseInt(d, 16) / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = {};
  for (const text of ["text", "soft", "good", "bad", "warn"])
    for (const behind of ["page", "card"]) {
      const [high, low] = [light(text), light(behind)].sort((a, b) => b - a);
      found[text + " on " + behind] = (high + 0.05) / (low + 0.05);
    }
  return found;
})()"""


class Browser:
    """Chromium, controlled with its debugging protocol: JSON messages on two pipes, each terminated
    by a zero byte."""

    def __init__(self, folder):
        names = ("chromium", "chromium-browser", "google-chrome")
        program = next(filter(None, map(shutil.which, names)), None)
        if program is None:
            sys.exit("status_page.py: there is no chromium")
        their_in, self.out = os.pipe()
        self.into, their_out = os.pipe()
        keep = os.dup(their_in), os.dup(their_out)  # Neither is 3 or 4.

        def set_up():
            os.dup2(keep[0], 3)
            os.dup2(keep[1], 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu",
             "--hide-scrollbars", "--no-first-run", f"--user-data-dir={folder}/profile"],
            preexec_fn=set_up, pass_fds=(3, 4), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        for descriptor in (their_in, their_out, *keep):
            os.close(descriptor)
        self.rest, self.number, self.session, self.complaints = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target,
                                 flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                more = os.read(self.into, 1 << 20)
                if not more:
                    raise AssertionError("the browser has ended")
                self.rest += more
            text, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded") or (
                    answer.get("method") == "Runtime.consoleAPICalled"
                    and answer["params"]["type"] == "error"):
                self.complaints.append(answer["params"])
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise AssertionError((method, answer["error"]))
                return answer["result"]

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def show(self, url, scheme, size):
        width, height = SIZES[size]
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=size == "narrow")
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": scheme}])
        if self.value("location.href") != url:
            self.call("Page.navigate", url=url)

    def picture(self, path):
        height = self.value("Math.ceil(document.body.getBoundingClientRect().height)")
        width = self.value("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip,
                         captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self):
        self.process.kill()
        self.process.wait()


class Calls:
    """Makes calls of several kinds, some of which fail, until it is closed."""

    def __init__(self, server):
        self.stop = threading.Event()
        client = server.client()
        values = np.random.default_rng(1).normal(size=(256, 256)).astype(np.float32)
        for name in ("queries", "documents", "weights"):
            client.put(name, values)
        self.threads = [threading.Thread(target=self.work, args=(server.client(), i))
                        for i in range(3)]
        for thread in self.threads:
            thread.start()

    def work(self, client, i):
        x, flat, turn = o.resident("queries"), o.resident("queries", o.view([65536], [1])), 0
        while not self.stop.is_set():
            turn += 1
            client.attempt("Dot", a=flat, b=flat, timing=turn % 2 == 0)
            client.attempt("Reduce", op=1, x=x, timing=turn % 3 == 0)
            if turn % 5 == i:
                client.attempt("Matmul", a=x, b=o.resident("weights"), timing=True)
            if turn % 20 == i:
                client.put("upload", np.ones(200_000, np.float32), replace=True)
                client.download("documents")
            if turn % 50 == i:
                client.attempt("GetBuffer", name="missing")
            if turn % 90 == i:
                client.attempt("Dot", a=flat, b=flat, strategy="fastest")
            self.stop.wait(0.004)

    def close(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


@contextlib.contextmanager
def with_gpu(address):
    """Returns the address of a server with the same pages, but with a GPU's numbers in the
    metrics."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with urllib.request.urlopen(f"http://{address}{self.path}", timeout=20) as answer:
                body, kind = answer.read(), answer.headers["Content-Type"]
            if self.path == "/metrics":
                body += GPU.lstrip().encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield "127.0.0.1:%d" % listener.server_port
    listener.shutdown()
    listener.server_close()


def check(browser, what):
    fits = browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert fits, f"{what}: overflows the page"
    text = browser.value("document.body.innerText")
    assert not re.search("NaN|undefined|Infinity|null", text), f"{what}: {text}"
    assert browser.value("document.querySelectorAll('.tile').length") == 8, what
    for pair, ratio in browser.value(CONTRAST).items():
        assert ratio >= 4.5, f"{what}: {pair} has a contrast of {ratio:.2f}"
    return text


def main(folder, out):
    server = o.Server(folder, "--metrics-listen", "127.0.0.1:0", "--memory-limit", "64Mi")
    address = server.http_address()
    calls = Calls(server)
    browser = Browser(folder)
    try:
        browser.show(f"http://{address}/", "light", "wide")
        print(f"calls for {LOAD_SECONDS} s", flush=True)
        time.sleep(LOAD_SECONDS)
        for scheme in ("light", "dark"):
            for size in SIZES:
                browser.show(f"http://{address}/", scheme, size)
                text = check(browser, f"{scheme} {size}")
                for wanted in ("ready", "Dot", "fixed_tree", "BUFFER_NOT_FOUND",
                               "UNKNOWN_STRATEGY"):
                    assert wanted in text, (wanted, text)
                assert "GPU:" not in text, text
                browser.picture(out / f"page_{scheme}_{size}.png")
        with with_gpu(address) as other:
            for scheme, size in (("light", "wide"), ("dark", "narrow")):
                browser.show(f"http://{other}/", scheme, size)
                time.sleep(5)
                text = check(browser, f"gpu {scheme} {size}")
                for wanted in ("87 % busy", "61 °C", "612 W of 700 W", "1.75 GHz",
                               "70.0 GiB used by all",
                               "slowed down: power cap", "3 corrected memory errors"):
                    assert wanted in text, (wanted, text)
                assert "thermal" not in text, text
                assert '<img src=x onerror=document.title=1>"\\' in text, text
                assert browser.value("document.title") != "1"
                browser.picture(out / f"gpu_{scheme}_{size}.png")
        browser.show(f"http://{address}/", "light", "wide")
        time.sleep(3)
        assert not browser.complaints, browser.complaints
        calls.close()
        server.stop()
        assert o.eventually(lambda: "no answer" in browser.value("document.body.innerText"), 30)
        browser.picture(out / "gone_light_wide.png")
    finally:
        calls.close()
        browser.close()
        server.kill()
    for picture in sorted(out.glob("*.png")):
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/status_page"))
    arguments = parser.parse_args()
    o.Program.path = os.path.abspath(arguments.server)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        o.make_stubs(place)
        main(place, arguments.out)
