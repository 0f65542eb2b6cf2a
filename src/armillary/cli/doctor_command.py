"""`armillary doctor`: what this machine is, what it can do, and what to change."""

from __future__ import annotations

import argparse
import json
import sys

from armillary.foundation.errors import EXIT_FAILED, EXIT_FINISHED
from armillary.foundation.progress import NoProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("--quick", action="store_true", help="measure for a shorter time")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; 1 when something makes training impossible."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return _no_torch(error, as_json=arguments.json)

    from armillary.telemetry.machine.examine import examine

    findings = []
    for found in examine(quick=arguments.quick, progress=NoProgress()):
        findings.append(found)
        if not arguments.json:
            print(_line(found.name, found.verdict, found.text, found.advice), flush=True)
    verdicts = [found.verdict for found in findings]
    if arguments.json:
        document = {
            "verdict": next((v for v in ("fail", "warn") if v in verdicts), "ok"),
            "findings": [found.as_json() for found in findings],
        }
        print(json.dumps(document, indent=1))
    else:
        print(_summary(verdicts.count("warn"), verdicts.count("fail")))
    return EXIT_FAILED if "fail" in verdicts else EXIT_FINISHED


def _line(name: str, verdict: str, text: str, advice: str) -> str:
    line = f"{verdict:<5} {name:<12} {text}"
    return f"{line}\n{'':18} -> {advice}" if advice else line


def _summary(warnings: int, failures: int) -> str:
    if failures:
        return f"{failures} to repair before training can work, {warnings} to look at"
    if warnings:
        return f"ready to train; {warnings} to look at"
    return "ready to train"


def _no_torch(error: ImportError, *, as_json: bool) -> int:
    text, advice = f"cannot be imported: {error}", 'pip install "torch>=2.11,<2.14"'
    if as_json:
        found = {"name": "torch", "verdict": "fail", "text": text, "advice": advice, "values": {}}
        print(json.dumps({"verdict": "fail", "findings": [found]}, indent=1))
    else:
        print(_line("torch", "fail", text, advice))
        print(_summary(0, 1), file=sys.stdout)
    return EXIT_FAILED
