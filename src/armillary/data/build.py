"""build: finds the token store of a corpus in the cache, or makes it.

In order: list the sources; scan the pieces (fingerprint of the corpus); build the tokenizer; encode
the pieces; assemble the store; publish it with one rename. Each piece is a file of its own, so a
killed build goes on where it was, and the result depends neither on kills nor on workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from armillary.data.cache import Cache, cache_error, cache_folder, digest_of
from armillary.data.config import Data, Text
from armillary.data.corpus import corpus_parts
from armillary.data.encoding import Encoding
from armillary.data.pieces import (
    MOST_PROBLEMS,
    Arrays,
    changed_while_building,
    encode_piece,
    held_out_below,
    read_arrays,
    scan_piece,
)
from armillary.data.reading import Reading, chat_template_of, made_from, readings_of
from armillary.data.store_writer import assemble, publish
from armillary.data.token_store import TokenStore, open_store
from armillary.data.tokenizer import (
    Tokenizer,
    check_special_tokens,
    load_tokenizer,
    save_tokenizer,
)
from armillary.data.training_text import choose_training_text
from armillary.data.workers import WorkerPool, runs_in_workers
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.machine import available_cores
from armillary.foundation.progress import NoProgress, Progress


def build(data: Data, progress: Progress | None = None) -> TokenStore:
    """The token store of a corpus: from the cache, or built there.

    Raises:
        UserError: something about the corpus, the tokenizer or the cache folder is wrong.
        RunError: the disk is full, or a file changed meanwhile.
    """
    problems = data.problems()
    if problems:
        raise UserError(problems)
    cache = Cache(cache_folder(data.cache))
    readings = readings_of(data)
    weights = tuple(part.weight for part in corpus_parts(data.corpus))
    tokenizer = None if data.tokenizer.text_needed() else data.tokenizer.build()
    if tokenizer is not None:
        check_special_tokens(tokenizer, bos=data.bos, eos=data.eos)
    key = _known_key(data, cache, readings)
    found = None if key is None else _open_if_whole(cache, key, weights)
    if found is not None:
        return found
    try:
        return _Build(
            data,
            cache=cache,
            readings=readings,
            weights=weights,
            tokenizer=tokenizer,
            progress=progress or NoProgress(),
        ).run()
    except OSError as error:
        raise cache_error(error, cache.folder) from error


def locate(data: Data) -> Path | None:
    """The folder of a corpus's token store, if it was built and the corpus lies unchanged."""
    cache = Cache(cache_folder(data.cache))
    key = _known_key(data, cache, readings_of(data))
    return cache.store(key) if key is not None and cache.store(key).is_dir() else None


def _known_key(data: Data, cache: Cache, readings: Sequence[Reading]) -> str | None:
    """The key of the store, where no file has changed since it was last read."""
    known = [cache.known_fingerprint(reading.stamp) for reading in readings]
    fingerprints = [fingerprint for fingerprint in known if fingerprint is not None]
    return _key(data, readings, fingerprints) if len(fingerprints) == len(readings) else None


def _key(data: Data, readings: Sequence[Reading], fingerprints: list[str]) -> str:
    return digest_of(made_from(data, readings, fingerprints))


def _open_if_whole(cache: Cache, key: str, weights: tuple[float, ...]) -> TokenStore | None:
    """The finished store of a key; a damaged one counts as missing and is built again."""
    try:
        return open_store(cache.store(key), weights)
    except UserError:
        return None


class _Build:
    """One build under way."""

    def __init__(
        self,
        data: Data,
        *,
        cache: Cache,
        readings: list[Reading],
        weights: tuple[float, ...],
        tokenizer: Tokenizer | None,
        progress: Progress,
    ) -> None:
        self.data = data
        self.cache = cache
        self.readings = readings
        self.weights = weights
        self.tokenizer = tokenizer
        self.progress = progress
        self.scan_name = "scan-" + digest_of([reading.stamp for reading in readings])[:32]
        size = data.workers or available_cores()
        importable = all(runs_in_workers(reading.corpus) for reading in readings)
        self.pool = WorkerPool(size if importable else 1)

    def run(self) -> TokenStore:
        """The store; waits where another process builds it."""
        with self.cache.locked(self.scan_name, self.progress), self.pool:
            fingerprints = self._scan()
            key = _key(self.data, self.readings, fingerprints)
            with self.cache.locked(f"store-{key}", self.progress):
                store = _open_if_whole(self.cache, key, self.weights)
                if store is None:
                    self._check_split()
                    self._make(key, fingerprints)
                    store = open_store(self.cache.store(key), self.weights)
                self.cache.discard(f"store-{key}")
            self.cache.discard(self.scan_name)
            for reading, fingerprint in zip(self.readings, fingerprints, strict=True):
                self.cache.remember_fingerprint(reading.stamp, fingerprint, reading.sources)
            return store

    # Scanning

    def _scan_path(self, part: int, piece: int) -> Path:
        return self.cache.building(self.scan_name) / f"part-{part}" / f"{piece:05}.scan"

    def _each_piece(self) -> Iterator[tuple[int, int]]:
        for part, reading in enumerate(self.readings):
            for piece in range(len(reading.pieces)):
                yield part, piece

    def _scan(self) -> list[str]:
        """Reads every document once; the fingerprint of each part."""
        total = sum(source.size for reading in self.readings for source in reading.sources)
        problems: list[Problem] = []
        with self.progress.task("reading the corpus", total, "B") as advance:
            missing = []
            for part, piece in self._each_piece():
                path = self._scan_path(part, piece)
                path.parent.mkdir(parents=True, exist_ok=True)
                if read_arrays(path) is None:
                    missing.append((part, piece))
                else:
                    advance(self.readings[part].size(piece))
            calls = [
                (self.readings[p].corpus, self.readings[p].piece(i), self._scan_path(p, i))
                for p, i in missing
            ]
            for index, found in self.pool.run(scan_piece, calls):
                problems += found
                if len(problems) >= MOST_PROBLEMS:
                    break
                part, piece = missing[index]
                advance(self.readings[part].size(piece))
        if problems:
            raise UserError(sorted(problems, key=lambda problem: problem.message))
        return [self._fingerprint(part) for part in range(len(self.readings))]

    def scanned(self, part: int) -> Iterator[Arrays]:
        """What the scan found, piece by piece."""
        for piece in range(len(self.readings[part].pieces)):
            found = read_arrays(self._scan_path(part, piece))
            if found is None:
                raise changed_while_building(self.readings[part].piece(piece)[0])
            yield found

    def _fingerprint(self, part: int) -> str:
        """SHA-256 over (id, SHA-256 of the text) of every document, in the corpus's order."""
        digest = hashlib.sha256()
        for found in self.scanned(part):
            id_text, digests = found["id_text"].tobytes(), found["digests"].tobytes()
            start = 0
            for index, length in enumerate(found["id_lengths"].tolist()):
                digest.update(length.to_bytes(8, "little") + id_text[start : start + length])
                digest.update(digests[32 * index : 32 * index + 32])
                start += length
        return digest.hexdigest()

    def _check_split(self) -> None:
        """Raises UserError unless each part has documents on both sides."""
        threshold = np.uint64(held_out_below(self.data.validation_fraction))
        problems = []
        for part in range(len(self.readings)):
            documents = held_out = empty = 0
            for found in self.scanned(part):
                documents += len(found["hashes"])
                held_out += int((found["hashes"] < threshold).sum())
                empty += int(found["empty"][0])
            problem = _split_problem(
                documents,
                held_out,
                empty,
                self.data.validation_fraction,
                whole_files=isinstance(self.readings[part].corpus, Text),
            )
            if problem is not None:
                corpus = self.readings[part].name
                where = (
                    f"data.corpus ({corpus})"
                    if len(self.readings) == 1
                    else f"data.corpus.parts.{part}"
                )
                problems.append(Problem(f"{where} {problem.message}", problem.allowed, problem.fix))
        if problems:
            raise UserError(problems)

    # Making

    def _make(self, key: str, fingerprints: list[str]) -> None:
        work = self.cache.building(f"store-{key}")
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = self._saved_tokenizer(work / "tokenizer")
        how = Encoding(
            tokenizer_folder=str(work / "tokenizer"),
            bos=self.data.bos,
            eos=self.data.eos,
            held_out_below=held_out_below(self.data.validation_fraction),
            dtype="uint16" if tokenizer.vocab_size <= 2**16 else "uint32",
        )
        pieces = self._encode(work, how)
        facts = {
            "key": key,
            "corpus_fingerprint": digest_of(fingerprints),
            "made_from": made_from(self.data, self.readings, fingerprints),
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "bos_id": tokenizer.bos_id,
                "eos_id": tokenizer.eos_id,
            },
            "parts": [
                {
                    "corpus": reading.name,
                    "fingerprint": fingerprints[part],
                    "empty_documents": sum(int(one["empty"][0]) for one in self.scanned(part)),
                }
                for part, reading in enumerate(self.readings)
            ],
        }
        total = 2.0 * sum(len(paths) for paths in pieces)
        with self.progress.task("writing the token store", total, "pieces") as advance:
            assemble(
                work / "store",
                pieces,
                work / "tokenizer",
                facts=facts,
                dtype=how.dtype,
                masks=[reading.corpus.masks() for reading in self.readings],
                advance=advance,
            )
        publish(work / "store", self.cache.store(key))

    def _saved_tokenizer(self, folder: Path) -> Tokenizer:
        try:
            return load_tokenizer(folder)
        except UserError:
            pass
        tokenizer = self.tokenizer
        if tokenizer is None:
            with self.progress.task("learning the vocabulary", None, "") as advance:
                texts = choose_training_text(
                    [(reading.corpus, reading.sources) for reading in self.readings],
                    [self.scanned(part) for part in range(len(self.readings))],
                    held_out_below(self.data.validation_fraction),
                    self.data.tokenizer.text_needed(),
                )
                tokenizer = self.data.tokenizer.build(texts)
                advance(1)
            check_special_tokens(tokenizer, bos=self.data.bos, eos=self.data.eos)
        tokenizer.chat_template = chat_template_of(self.readings) or tokenizer.chat_template
        save_tokenizer(tokenizer, folder)
        return tokenizer

    def _encode(self, work: Path, how: Encoding) -> list[list[Path]]:
        """Tokenises every piece that is not done; the paths by part."""
        pieces: list[list[Path]] = [
            [work / f"part-{part}" / f"{piece:05}.tokens" for piece in range(len(reading.pieces))]
            for part, reading in enumerate(self.readings)
        ]
        total = sum(source.size for reading in self.readings for source in reading.sources)
        with self.progress.task("tokenising", total, "B") as advance:
            missing = []
            for part, piece in self._each_piece():
                path = pieces[part][piece]
                path.parent.mkdir(exist_ok=True)
                if read_arrays(path) is None:
                    missing.append((part, piece))
                else:
                    advance(self.readings[part].size(piece))
            calls = [
                (
                    self.readings[p].corpus,
                    self.readings[p].piece(i),
                    self._scan_path(p, i),
                    dataclasses.replace(how, masks=self.readings[p].corpus.masks()),
                    pieces[p][i],
                )
                for p, i in missing
            ]
            for index, _ in self.pool.run(encode_piece, calls):
                part, piece = missing[index]
                advance(self.readings[part].size(piece))
        return pieces


SEPARATED = "--data.corpus.separator '\\n\\n'"
"""How texts whose files hold several documents each are cut."""


def _split_problem(
    documents: int, held_out: int, empty: int, fraction: float, *, whole_files: bool
) -> Problem | None:
    if documents == 0:
        return Problem(
            f"is empty: no document has any text ({empty} are empty)",
            "a corpus with text",
            "check --data.corpus",
        )
    if held_out == documents:
        return Problem(
            f"leaves nothing to train on: all {documents} documents are held out",
            "more documents, or a smaller share",
            "--data.validation-fraction 0.05",
        )
    if fraction > 0 and held_out == 0:
        return Problem(
            f"has no validation document: of {documents} documents the share "
            f"data.validation_fraction = {fraction} comes to none",
            "a share or a corpus large enough for one, or 0 for no validation",
            "--data.validation-fraction 0 for a handful of documents, 0.3 for some more"
            + (f", or cut files into documents: {SEPARATED}" if whole_files else ""),
        )
    return None
