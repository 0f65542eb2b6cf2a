"""Hostile files: only the documented errors, no code run, nothing written outside.

    python tests/reliability/fuzz.py [--inputs 100000] [--seed 0]

Valid files of every kind that Armillary reads are damaged, in bytes and in structure, with their
checksums made right again where there are some, and read. While they are, Python's audit events are
watched: a file opened for writing, moved or removed outside of the folder, a process, a connection,
code compiled, or an object rebuilt by pickle, each is a failure; so is any change to what lies
around the folder. Prints figures; ends with 1 if anything failed, with the inputs that did kept.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from armillary.cli import main as cli
from reliability.fuzz_inputs import of_bytes
from reliability.fuzz_target import Target
from reliability.fuzz_targets import KINDS, TARGETS

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOVES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
_NEVER = ("pickle.find_class", "os.system", "subprocess.Popen", "socket.connect", "exec", "os.exec")
_LONG_SECONDS = 120
"""For one input: it hangs, or nearly so."""
_SAID = 12
"""Failures that are kept and told; there may be thousands of one kind."""


@dataclass
class Outcome:
    """What became of the inputs of one target."""

    inputs: int = 0
    read: int = 0
    """Read as if nothing were wrong: what was damaged does not matter, or is as good."""
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    """By kind of error."""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Watch:
    """Notes what must not happen while hostile files are read. Once installed, it stays."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    @contextmanager
    def over(self, folder: Path) -> Iterator[list[str]]:
        """What happens within, as far as it is outside of the folder or never allowed."""
        self.seen = []
        self.inside = folder
        try:
            yield self.seen
        finally:
            self.inside = None

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.inside is None:
            return
        if event in _NEVER:
            if not (event == "exec" and self._is_ours(arguments)):
                self.seen.append(f"{event} {arguments!r:.200}")
        elif event == "open":
            path, _mode, flags = arguments
            writes = isinstance(flags, int) and flags & _WRITES
            if writes and isinstance(path, str | bytes) and not self._is_inside(path):
                self.seen.append(f"opened for writing: {path!r}")
        elif event in _MOVES:
            paths = [each for each in arguments if isinstance(each, str | bytes)]
            self.seen += [f"{event} {each!r}" for each in paths if not self._is_inside(each)]

    def _is_inside(self, path: str | bytes) -> bool:
        assert self.inside is not None
        whole = os.path.realpath(os.fsdecode(path))
        return whole == os.devnull or whole.startswith(str(self.inside) + os.sep)

    @staticmethod
    def _is_ours(arguments: tuple[object, ...]) -> bool:
        """Code of an installed module that is imported only now, or of a dataclass being made.

        And of a chat template, which Jinja compiles for its sandbox, as it does the places of its
        errors: what they reach is watched.
        """
        file = getattr(arguments[0], "co_filename", "")
        return file in ("<string>", "<template>", "<unknown>") or file.startswith(
            ("<frozen", sys.prefix, sys.base_prefix)
        )


def fuzz(inputs: int, seed: int, keep: Path, watch: Watch) -> dict[str, Outcome]:
    """Reads so many hostile files of all targets; failures are kept in a folder."""
    outcomes = {}
    for target in TARGETS:
        with tempfile.TemporaryDirectory(prefix="armillary-fuzz-", dir=_memory()) as around:
            draw = Random(f"{seed} {target.name}")
            bench = _Bench(target, Path(around).resolve(), keep, watch)
            outcomes[target.name] = bench.run(inputs * target.share // 100, draw)
    return outcomes


def _memory() -> str | None:
    """Files of a moment, where that costs no disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class _Bench:
    """A folder of one target's files, which are damaged in turn."""

    target: Target
    around: Path
    keep: Path
    watch: Watch

    def run(self, inputs: int, draw: Random) -> Outcome:
        """Reads so many damaged files."""
        target, folder = self.target, self.around / "inside"
        folder.mkdir()
        (self.around / "beside").write_text("as it was")
        target.make(folder)
        target.read(folder)  # valid ones are; and what is imported only now
        valid = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        outcome, began = Outcome(), time.monotonic()
        for number in range(inputs):
            file = draw.choice(target.files)
            data = _damaged(valid, folder / file, draw)
            (folder / file).write_bytes(data)
            if target.repair is not None:
                target.repair(folder, file, draw)
            outcome.inputs += 1
            with self.watch.over(folder) as seen:
                failure = _read(target, folder, outcome)
            if failure or seen:
                words = failure or "; ".join(seen)
                outcome.failures.append(f"{target.name}: {file}, input {number}: {words}")
                if len(outcome.failures) <= _SAID:
                    self._keep(f"{number}-{Path(file).name}", data, words)
            _restore(valid, folder)
        there = {path.name for path in self.around.iterdir()}
        if there != {"inside", "beside"} or (self.around / "beside").read_text() != "as it was":
            outcome.failures.append(f"{target.name}: written outside: {there}")
        outcome.seconds = time.monotonic() - began
        return outcome

    def _keep(self, name: str, data: bytes, words: str) -> None:
        self.keep.mkdir(parents=True, exist_ok=True)
        (self.keep / name).write_bytes(data)
        (self.keep / f"{name}.why").write_text(words)


def _damaged(valid: dict[Path, bytes], path: Path, draw: Random) -> bytes:
    of_structure = KINDS.get(path.suffix)
    if of_structure is not None and draw.random() < 0.7:
        return of_structure(valid[path], draw)
    return of_bytes(valid[path], draw, draw.choice(list(valid.values())))


def _read(target: Target, folder: Path, outcome: Outcome) -> str:
    """Why it failed; empty if it was read or refused in words."""
    began = time.monotonic()
    try:
        target.read(folder)
        outcome.read += 1
    except target.documented as error:
        outcome.refused[type(error).__name__] += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error!s:.200} ({where.filename}:{where.lineno})"
    seconds = time.monotonic() - began
    return f"it took {seconds:.0f} s" if seconds > _LONG_SECONDS else ""


def _restore(valid: dict[Path, bytes], folder: Path) -> None:
    for path in list(folder.rglob("*")):
        if path.is_file() and path not in valid:
            path.unlink()
    for path, data in valid.items():
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _raise(error: Exception) -> None:
    """In place of what the command line prints for errors that nobody foresaw."""
    raise error


def main() -> int:
    """Prints the figures; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir(), "armillary-fuzz"))
    arguments = parser.parse_args()
    cli._report_unexpected = _raise
    shutil.rmtree(arguments.keep, ignore_errors=True)
    outcomes = fuzz(arguments.inputs, arguments.seed, arguments.keep, Watch())
    print("| files | inputs | refused in words | read all the same | failures | inputs/s |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, each in outcomes.items():
        rate = each.inputs / each.seconds if each.seconds else 0.0
        print(
            f"| {name} | {each.inputs:,} | {each.refused.total():,} | {each.read:,} |"
            f" {len(each.failures)} | {rate:,.0f} |"
        )
    failures = [failure for each in outcomes.values() for failure in each.failures]
    total = sum(each.inputs for each in outcomes.values())
    print(f"\n{total:,} inputs, seed {arguments.seed}: {len(failures)} failures.")
    for failure in failures[:_SAID]:
        print(f"- {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
