"""Corpora and build processes for tests of the data room."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armillary.foundation.progress import Advance


class RecordedProgress:
    """Remembers the labels of tasks and how much each advanced."""

    def __init__(self) -> None:
        self.done: dict[str, float] = {}

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        self.done.setdefault(label, 0.0)

        def advance(amount: float) -> None:
            self.done[label] += amount

        yield advance


def write_texts(folder: Path, count: int, *, seed: int = 0) -> Path:
    """`count` small text files in sub-folders; returns the folder."""
    pick = random.Random(seed)
    words = ["ring", "sphere", "déjà", "星", "model", "of", "the", "sky", "\n", "    ", "42", "x=y"]
    for index in range(count):
        path = folder / f"{index % 7}" / f"file-{index:05}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(pick.choices(words, k=pick.randrange(20, 120))), "utf-8")
    return folder


def write_mixed_corpus(folder: Path, *, texts: int = 2_000) -> Path:
    """Text files, among them empty ones and some in other encodings, and JSON lines."""
    write_texts(folder / "texts", texts)
    odd = folder / "texts" / "odd"
    odd.mkdir()
    for index in range(20):
        (odd / f"latin-{index}.txt").write_bytes(f"café {index} crème".encode("latin-1"))
        (odd / f"wide-{index}.txt").write_bytes(f"wide {index}".encode("utf-16"))
        (odd / f"empty-{index}.txt").write_bytes(b"")
    (odd / "crlf.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\x00three")
    for file in range(3):
        lines = [
            json.dumps({"text": f"line {line} of {file}: " + "né " * line}) for line in range(60)
        ]
        (folder / f"lines-{file}.jsonl").write_text("\n".join(["", *lines]), "utf-8")
    return folder


BUILD = """
import sys
from contextlib import contextmanager
import armillary.data.files as files
import armillary.data.pieces as pieces
from armillary.data.config import Bpe, Bytes, Data, JsonLines, Mixture, Part, Text
from armillary.data.store import build

folder, cache, workers, stop_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pieces.PIECE_BYTES, files.SOURCE_BYTES = 20_000, 3_000
ticks = 0

class Ticks:
    @contextmanager
    def task(self, label, total=None, unit=""):
        print("task", label, flush=True)
        def advance(amount):
            global ticks
            ticks += 1
            if ticks == stop_at:
                print("stopped", flush=True)
                sys.stdin.readline()
        yield advance

data = Data(
    corpus=Mixture(parts=(
        Part(corpus=Text(files=(folder + "/texts/**/*.txt",), on_bad_text="replace")),
        Part(corpus=JsonLines(files=(folder + "/*.jsonl",)), weight=2.0),
    )),
    tokenizer=Bytes(),
    cache=cache,
    workers=workers,
    validation_fraction=0.1,
)
store = build(data, Ticks())
print("ticks", ticks)
print("torch", "torch" in sys.modules)
print("store", store.folder, flush=True)
"""


def start_build(
    folder: Path, cache: Path, *, workers: int = 2, stop_at: int = 0
) -> subprocess.Popen[str]:
    """Builds the mixed corpus in a process that pauses at its `stop_at`-th sign of progress."""
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(folder), str(cache), str(workers), str(stop_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def read_until(process: subprocess.Popen[str], beginning: str) -> str:
    """The next line of a process's output that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return line.strip()
    raise AssertionError(f"the process ended (exit code {process.wait()}) without {beginning!r}")


def tree_digest(folder: Path) -> dict[str, str]:
    """Every file below a folder: relative path to SHA-256."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
