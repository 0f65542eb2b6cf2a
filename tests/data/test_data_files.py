"""Files of a corpus, in any place and compressed in any way: their documents, and their damage."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import compression, corpus_text, lines, remote_files
from armillary.data import files as files_module
from armillary.data.compression import SUFFIXES, decompressed
from armillary.data.config import (
    Bytes,
    Data,
    JsonLines,
    Megatron,
    Olmo,
    Parquet,
    Text,
)
from armillary.data.corpus import CorpusConfig
from armillary.data.files import find_files, open_file
from armillary.data.store import build
from armillary.foundation.errors import Problem, UserError
from corpus_reading import problems, read
from object_store import ObjectStore, fail_with
from token_corpora import write_megatron, write_olmo


def zstd(content: bytes) -> bytes:
    """One frame, with a checksum."""
    zstandard = pytest.importorskip("zstandard")
    packed: bytes = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return packed


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
assert tuple(PACK) == SUFFIXES
LINES = b'{"text": ""}\n{"text": "one"}\n\n{"text": "' + b"long " * 9_000 + b'"}\n{"text": "last"}'


# Compression ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_compressed_files_hold_the_same_documents(suffix: str, tmp_path: Path) -> None:
    pack = PACK[suffix]
    (tmp_path / "a.jsonl").write_bytes(LINES)
    plain = read(JsonLines(files=(f"{tmp_path}/a.jsonl",)))
    assert [len(text) for _, text in plain] == [0, 3, 45_000, 4]
    (tmp_path / f"b.jsonl{suffix}").write_bytes(pack(LINES))
    for packed in (pack(LINES), pack(LINES[:5_000]) + pack(b"") + pack(LINES[5_000:])):
        (tmp_path / f"b.jsonl{suffix}").write_bytes(packed)
        found = read(JsonLines(files=(f"{tmp_path}/b.jsonl{suffix}",)))
        assert found == [
            (name.replace("a.jsonl", f"b.jsonl{suffix}"), text) for name, text in plain
        ]
    (tmp_path / f"c.txt{suffix}").write_bytes(pack("é\n\nzwei".encode()))
    corpus = Text(files=(f"{tmp_path}/c.*",), separator="\\n\\n")
    assert read(corpus) == [(f"c.txt{suffix}@0", "é"), (f"c.txt{suffix}@4", "zwei")]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_compressed_file_that_is_cut_or_changed_is_told_with_its_place(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    whole = PACK[suffix](LINES)
    corpus = JsonLines(files=(str(path),))
    cuts = [*range(1, min(len(whole), 40)), len(whole) // 2, len(whole) - 1]
    for size in cuts:
        path.write_bytes(whole[:size])
        *_, message = problems(corpus)
        assert f"cannot read {path}: not a whole {suffix} file: " in message, size
        assert " bytes of content, near byte " in message
    path.write_bytes(b"{}\n{}\n")
    assert f"not a whole {suffix} file" in problems(corpus)[-1]


@settings(deadline=None, max_examples=150)
@given(
    suffix=st.sampled_from(SUFFIXES), at=st.integers(0, 200), new=st.binary(min_size=1, max_size=4)
)
def test_damage_to_a_compressed_file_is_an_os_error_or_other_content(
    suffix: str, at: int, new: bytes, *, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("packed") / f"a{suffix}"
    whole = PACK[suffix](LINES)
    path.write_bytes(whole[:at] + new + whole[at + len(new) :])
    try:
        with decompressed(path.open("rb"), str(path)) as file:
            file.read()
    except OSError as error:
        assert f"not a whole {suffix} file" in str(error)


def test_no_more_is_decompressed_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setattr(compression, "_BUFFER_BYTES", 1 << 12)
    packed = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))
    assert len(packed) > 2 * compression._ZSTD_INPUT_BYTES

    class Counted:
        def __init__(self) -> None:
            self.given = 0

        def read(self, size: int) -> bytes:
            self.given += size
            return packed[self.given - size : self.given]

    counted = Counted()
    stream = compression._ZstdFile(counted)  # type: ignore[arg-type]
    assert stream.read1(10) == bytes(10)
    assert counted.given <= 2 * compression._ZSTD_INPUT_BYTES
    assert len(stream._ready) <= 1 << 26


def test_a_line_or_a_document_too_long_to_be_held_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE", 1_000)
    monkeypatch.setattr(corpus_text, "LONGEST_DOCUMENT", 1_000)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "' + b"x" * 2_000)
    (message,) = problems(JsonLines(files=(f"{tmp_path}/a.jsonl",)))
    assert "a.jsonl: the line at byte 16 has more than 1000 bytes" in message
    (tmp_path / "b.txt").write_bytes(b"one|" + b"x" * 2_000)
    (message,) = problems(Text(files=(f"{tmp_path}/b.txt",), separator="|"))
    assert "b.txt: the document at byte 4 has more than 1000 bytes" in message


@settings(deadline=None, max_examples=60)
@given(
    text=st.text("ab|", max_size=40),
    separator=st.sampled_from(["|", "ab", "||"]),
    block=st.sampled_from([1, 2, 7]),
)
def test_a_text_is_cut_the_same_way_in_blocks_of_any_size(
    text: str, separator: str, block: int, *, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_text, "_BLOCK_BYTES", block)
        found = read(Text(files=(str(file),), separator=separator))
    assert [part for _, part in found] == text.split(separator)
    offsets = [int(name.partition("@")[2]) for name, _ in found]
    assert all(text[at:].startswith(part) for at, (_, part) in zip(offsets, found, strict=True))


# Object stores --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    """A server that speaks S3."""
    remote_files._store.cache_clear()
    with ObjectStore() as store:
        yield store
    remote_files._store.cache_clear()


def put(address: str, folder: Path) -> str:
    """All files of a folder, under an address."""
    import boto3

    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    return address


def test_every_kind_of_file_reads_the_same_from_an_object_store(
    server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("SOURCE_BYTES", "REMOTE_SOURCE_BYTES"):
        monkeypatch.setattr(files_module, name, 10_000)
    monkeypatch.setattr(remote_files, "_REQUEST_BYTES", 1_000)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "deep" / "b.jsonl").write_bytes(LINES)
    (tmp_path / "deep" / "er" / "c.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "t.txt").write_text("one\n\ntwo é")
    parquet.write_table(
        pyarrow.table({"text": ["x", "y" * 5_000, ""]}), tmp_path / "p.parquet", row_group_size=2
    )
    write_megatron(tmp_path / "m", [[list(range(256)) * 30], [], [[1]]])
    write_olmo(tmp_path / "o.npy", [[1, 2], [3] * 9_000, []], bounds=True)
    write_olmo(tmp_path / "e.npy", [[1, 0], [2] * 9_000, [0]])
    address = put(server.new_address(), tmp_path)

    def corpora(root: str) -> list[CorpusConfig]:
        return [
            JsonLines(files=(f"{root}/**/*.jsonl*",)),
            JsonLines(files=(f"{root}/deep/b.jsonl", f"{root}/a.jsonl")),
            Text(files=(f"{root}/t.txt",), separator="\\n\\n"),
            Parquet(files=(f"{root}/*.parquet",)),
            Megatron(files=(f"{root}/m",)),
            Olmo(files=(f"{root}/o.npy",)),
            Olmo(files=(f"{root}/e.*",), eos_id=0),
        ]

    for here, there in zip(corpora(str(tmp_path)), corpora(address), strict=True):
        found = read(there)
        assert found == read(here)
        assert len(found) > 1


def test_trouble_of_a_store_is_waited_out_and_what_remains_is_told(
    server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    address = put(server.new_address(), tmp_path)
    corpus = JsonLines(files=(f"{address}/*.jsonl",))
    server.trouble = fail_with(500, 4)
    assert len(read(corpus)) == 4
    (source,) = corpus.sources()
    for name in ("RETRY_SECONDS", "LOOK_UP_SECONDS"):
        monkeypatch.setattr(remote_files, name, 0.1)
    server.trouble = fail_with(503)
    try:
        (message,) = problems(corpus)
        assert f"{address}/*.jsonl' cannot be looked up: " in message
        (item,) = corpus.read(source)
        assert isinstance(item, Problem)
        assert item.message.startswith(f"cannot read {address}/a.jsonl: ")
        server.trouble = fail_with(403)
        (message,) = problems(corpus)
        assert "credentials from the environment: AWS_ACCESS_KEY_ID" in message
    finally:
        server.trouble = fail_with(500, 0)


def test_a_changed_object_changes_the_stamp_and_the_store_that_is_built(
    server: ObjectStore, tmp_path: Path
) -> None:
    texts, address = tmp_path / "texts", server.new_address()
    texts.mkdir()
    stamps, stores = [], []
    for text in ("one", "two"):
        (texts / "a.jsonl").write_text(json.dumps({"text": text}))
        put(address, texts)
        corpus = JsonLines(files=(f"{address}/*.jsonl",))
        stamps.append(corpus.sources()[0].stamp)
        data = Data(
            corpus=corpus, tokenizer=Bytes(), cache=str(tmp_path / "c"), validation_fraction=0
        )
        stores.append(build(data))
        assert build(data).folder == stores[-1].folder
        tokens = stores[-1].train[0].document(0).tolist()
        assert bytes(token for token in tokens if token < 256) == text.encode()
    assert stamps[0] != stamps[1]
    assert stores[0].folder != stores[1].folder


def test_addresses_that_cannot_be_are_refused_in_words(server: ObjectStore) -> None:
    address = server.new_address()
    for pattern, words in (
        (f"{address}/no*thing", "matches no file"),
        (f"{address}/nothing", "matches no file"),
        ("s4://bucket/a", "'s4://bucket/a' is of no kind of place that is known"),
        ("s3://me:secret@bucket/a", "holds a user name or a password"),
    ):
        with pytest.raises(UserError) as caught:
            find_files((pattern,))
        assert words in str(caught.value)
        assert "secret" not in str(caught.value)


def test_a_store_without_its_library_is_refused_at_once_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    asked = []

    def filesystem(kind: str, **_: object) -> None:
        asked.append(kind)
        raise ImportError(kind)

    remote_files._store.cache_clear()
    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    with pytest.raises(UserError) as caught:
        find_files(("az://container/*.jsonl",))
    assert "armillary[az]" in str(caught.value)
    assert "cannot be looked up" not in str(caught.value)
    assert asked == ["az"]


def test_a_remote_file_reads_like_a_local_one(server: ObjectStore, tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    (tmp_path / "a").write_bytes(content)
    address = put(server.new_address(), tmp_path)
    with open_file(f"{address}/a") as remote, open_file(str(tmp_path / "a")) as local:
        for at, whence, size in ((0, 0, 10), (-5, 2, 99), (100, 0, -1), (20_000, 0, 5), (3, 0, 0)):
            assert remote.seek(at, whence) == local.seek(at, whence)
            assert remote.read(size) == local.read(size)
            assert remote.tell() == local.tell()


def test_what_the_hub_holds_is_read_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class Hub(LocalFileSystem):  # type: ignore[misc]
        """The hub's part of fsspec, with a folder for its network."""

        protocol = "hf"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(path).removeprefix("hf://").rstrip("/")

        def _at(self, path: str) -> str:
            return str(tmp_path / self._strip_protocol(path))

        def info(self, path: str, **options: object) -> dict[str, object]:
            found = super().info(self._at(path))
            kept = {key: found[key] for key in ("size", "type")}
            return {**kept, "name": self._strip_protocol(path), "blob_id": "abc"}

        def cat_file(self, path: str, start: int, end: int, **options: object) -> bytes:
            return Path(self._at(path)).read_bytes()[start:end]

        def glob(self, path: str, **options: object) -> dict[str, dict[str, object]]:
            names = [str(one.relative_to(tmp_path)) for one in tmp_path.glob(path)]
            return {name: self.info(name) for name in names}

    (tmp_path / "datasets" / "me" / "set").mkdir(parents=True)
    (tmp_path / "datasets" / "me" / "set" / "a.jsonl").write_bytes(LINES)
    remote_files._store.cache_clear()
    monkeypatch.setattr(fsspec, "filesystem", lambda kind, **options: Hub())
    corpus = JsonLines(files=("hf://datasets/me/set/*.jsonl",))
    assert [source.stamp for source in corpus.sources()] == [f"{len(LINES)} abc"]
    assert [name for name, _ in read(corpus)][1] == "a.jsonl@13"
    remote_files._store.cache_clear()
