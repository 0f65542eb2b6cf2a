"""All trials of what docs/reliability.md promises, by one command.

    python tests/reliability/report.py [--write] [NAME ...]

Each trial is a script, most of them beside this one, which prints what it measured in Markdown and
ends with 0 if every promise was kept. With `--write` the page gets the figures of those it ran.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

TRIALS = {
    "kills": "SIGKILL at random moments",
    "stages": "SIGKILL in a run with stages",
    "stops": "A polite stop in every phase",
    "corruption": "Damage to every kind of file",
    "faults": "Disks and stores that fail",
    "stall": "What a save costs training",
    "elastic": "Ranks that come and go",
    "nodes": "Two nodes, one unplugged",
    "replicas": "Replica groups over torchft",
    "soak": "A long run",
    "fuzz": "Hostile files",
}
"""Scripts, in the order of the page, and their headings there."""

ELSEWHERE = {"stall": "benchmarks/checkpoint_stall.py"}
"""Scripts that are not beside this one."""


def main() -> int:
    """Runs what is asked for; 0 if every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRIALS)}")
    parser.add_argument("--write", action="store_true", help="write the figures into the page")
    arguments = parser.parse_args()
    names = arguments.names or list(TRIALS)
    if unknown := set(names) - TRIALS.keys():
        parser.error(f"no trial is called {', '.join(sorted(unknown))}")
    broken = []
    for name in names:
        began = time.monotonic()
        result = subprocess.run(
            [sys.executable, _script(name)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        minutes = (time.monotonic() - began) / 60
        print(f"### {name} ({minutes:.1f} min)\n\n{result.stdout}", flush=True)
        if result.returncode:
            broken.append(name)
        elif arguments.write:
            _write(name, result.stdout.strip(), minutes)
    if broken:
        print(f"broken promises: {', '.join(broken)}")
    return 1 if broken else 0


def _script(name: str) -> str:
    return ELSEWHERE.get(name, f"tests/reliability/{name}.py")


def _write(name: str, measured: str, minutes: float) -> None:
    """Puts what one trial measured in its place on the page, leaving the others."""
    before, rest = PAGE.read_text().split(BEGIN)
    inside, after = rest.split(END)
    sections = dict(re.findall(r"<!-- (\w+) -->\n(.*?)(?=<!-- |\Z)", inside, re.DOTALL))
    heading = f"### {TRIALS[name]}\n\n`python {_script(name)}`, {minutes:.0f} min."
    sections[name] = f"{heading}\n\n{measured}\n\n"
    parts = (f"<!-- {each} -->\n{sections[each]}" for each in TRIALS if each in sections)
    PAGE.write_text(f"{before}{BEGIN}\n{''.join(parts)}{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
