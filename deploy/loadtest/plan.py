#!/usr/bin/env python3
"""Writes a configuration of ghz for each call of the selected cases of slo.toml.

usage: plan.py --slo FILE --out FOLDER --private FOLDER --seconds N [--cases "NAME..."]

Prints a line for each case: its name, then the stems of its configurations, which run at the same
time. ghz reads the configurations in the private folder; those in the other folder lack the
metadata, which may contain a token. Credentials are taken from TESSERA_CLIENT_TLS_CA,
TESSERA_TOKEN_FILE, TESSERA_TOKEN and so on, as for `tessera`, which puts the operands first and
refuses to send a token unencrypted.
"""

import argparse
import json
import os
import pathlib
import sys
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OURS = ("call", "calls", "pattern", "objective", "optional")  # all other keys are ghz's
TLS = {"CA": "cacert", "CERT": "cert", "KEY": "key", "SERVER_NAME": "cname"}


def variable(name):
    """Returns a variable as `tessera` reads it."""
    return os.environ.get(name, "").removeprefix("\ufeff").strip()


def tls_keys():
    """Returns ghz's flags for the client's environment variables."""
    found = {key: variable(f"TESSERA_CLIENT_TLS_{name}") for name, key in TLS.items()}
    found = {key: value for key, value in found.items() if value}
    return found if "cacert" in found else {"insecure": True}


def metadata():
    """Returns the metadata that has the caller's token."""
    file, token = variable("TESSERA_TOKEN_FILE"), variable("TESSERA_TOKEN")
    if file:
        token = pathlib.Path(file).read_text(encoding="utf-8-sig").strip()
    return {"authorization": f"Bearer {token}"} if token else {}


def read(path):
    """Reads the objectives file. Raises ValueError if the file is invalid."""
    slo = tomllib.loads(path.read_text())
    for name, case in slo["case"].items():
        if case["pattern"] not in slo["pattern"]:
            raise ValueError(f"case {name}: there is no pattern {case['pattern']!r}")
        if ("call" in case) == ("calls" in case):
            raise ValueError(f"case {name}: give it either call or calls")
        for call in calls_of(case):
            if not (HERE / "calls" / f"{call}.json").is_file():
                raise ValueError(f"case {name}: there is no call {call!r} in {HERE / 'calls'}")
    return slo


def calls_of(case):
    return case["calls"] if "calls" in case else [case["call"]]


def reports_of(name, case):
    """Returns {stem of a report: its call}."""
    calls = calls_of(case)
    return {name if len(calls) == 1 else f"{name}.{call}": call for call in calls}


def configuration(slo, case, call, seconds):
    """Returns what ghz reads: the call, the pattern, and the keys that the case overrides."""
    config = json.loads((HERE / "calls" / f"{call}.json").read_text())
    config["proto"] = str(ROOT / config["proto"])
    config["import-paths"] = [str(ROOT / path) for path in config["import-paths"]]
    config.update(slo["pattern"][case["pattern"]])
    config.update({key: value for key, value in case.items() if key not in OURS})
    if config.get("load-schedule") == "step":
        steps = (config["load-end"] - config["load-start"]) // config["load-step"] + 1
        config["load-step-duration"] = f"{max(1, seconds * 1000 // steps)}ms"
    # With "wait", calls that are in progress when the time is up still count. Otherwise they would
    # fail with their connection.
    config.update({"duration": f"{seconds}s", "duration-stop": "wait", "format": "json"})
    return config


def chosen(slo, names):
    if not names:
        return {name: case for name, case in slo["case"].items() if not case.get("optional")}
    unknown = [name for name in names if name not in slo["case"]]
    if unknown:
        raise ValueError(f"there is no case {unknown[0]!r}; the cases are {', '.join(slo['case'])}")
    return {name: slo["case"][name] for name in names}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--slo", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--private", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--cases", default="")
    options = parser.parse_args()
    try:
        slo = read(options.slo)
        cases = chosen(slo, options.cases.split())
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"loadtest: {options.slo}: {error}")
    caller = metadata()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, case in cases.items():
        reports = reports_of(name, case)
        for stem, call in reports.items():
            config = {**configuration(slo, case, call, options.seconds), **tls_keys()}
            config["metadata"] = {**config.get("metadata", {}), **caller}
            (options.private / f"{stem}.config.json").write_text(json.dumps(config))
            del config["metadata"]
            (options.out / f"{stem}.config.json").write_text(json.dumps(config, indent=2))
        print(name, *reports)


if __name__ == "__main__":
    main()
