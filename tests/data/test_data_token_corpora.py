"""Corpora that come as tokens: documents of any length, wherever files are cut, and damage."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import corpus_olmo
from armillary.data import files as files_module
from armillary.data.config import Bpe, Bytes, Data, Megatron, Mixture, Olmo, Part, Text
from armillary.data.corpus import CorpusConfig, Document
from armillary.data.store import build
from armillary.foundation.errors import Problem, UserError
from corpus_reading import problems
from token_corpora import MEGATRON_CODES, write_megatron, write_olmo


def read(corpus: CorpusConfig) -> list[tuple[str, list[int]]]:
    """Ids and tokens of all documents; a problem fails the test."""
    found = [item for source in corpus.sources() for item in corpus.read(source)]
    documents = [item for item in found if isinstance(item, Document)]
    assert len(documents) == len(found), [item for item in found if isinstance(item, Problem)]
    assert all(document.text == "" for document in documents)
    return [(document.id, document.tokens.tolist()) for document in documents]  # type: ignore[union-attr]


LONG = list(range(100)) * 20
"""Longer than a source in these tests."""


@pytest.mark.parametrize("dtype", MEGATRON_CODES)
def test_every_kind_of_number_of_megatron_is_read(dtype: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[[1, 2]], [[3], [4, 5]], [[127]]], dtype)
    expected = [("a:0", [1, 2]), ("a:1", [3, 4, 5]), ("a:2", [127])]
    for name in ("a", "a.idx", "a.bin", "a.*", "*"):
        assert read(Megatron(files=(f"{tmp_path}/{name}",))) == expected


def test_megatron_documents_of_no_one_and_many_tokens_in_several_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "SOURCE_BYTES", 64)
    write_megatron(tmp_path / "x" / "a", [[], [[]], [[7]], [LONG, [], LONG], [], [[8]], []])
    write_megatron(tmp_path / "y" / "b", [[[1]]])
    corpus = Megatron(files=(f"{tmp_path}/x/*", f"{tmp_path}/y/b"))
    assert len(corpus.sources()) > 2
    assert read(corpus) == [
        ("x/a:0", []),
        ("x/a:1", []),
        ("x/a:2", [7]),
        ("x/a:3", LONG + LONG),
        ("x/a:4", []),
        ("x/a:5", [8]),
        ("x/a:6", []),
        ("y/b:0", [1]),
    ]


documents_of_sequences = st.lists(
    st.lists(st.lists(st.integers(0, 255), max_size=12), max_size=3), max_size=12
)


@settings(deadline=None, max_examples=40)
@given(documents=documents_of_sequences, step=st.integers(1, 60))
def test_megatron_documents_are_the_same_wherever_the_files_are_cut(
    documents: list[list[list[int]]], step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = write_megatron(tmp_path_factory.mktemp("m") / "a", documents, "int32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "SOURCE_BYTES", step)
        found = read(Megatron(files=(str(prefix),)))
    whole = [[token for sequence in document for token in sequence] for document in documents]
    assert found == [(f"a:{index}", tokens) for index, tokens in enumerate(whole)]


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(1, 255), max_size=20), max_size=12),
    step=st.integers(1, 60),
    block=st.integers(1, 30),
    header=st.booleans(),
    bounds=st.booleans(),
    dtype=st.sampled_from(corpus_olmo.DTYPES),
)
def test_flat_arrays_are_the_same_documents_wherever_they_are_cut(
    *,
    documents: list[list[int]],
    step: int,
    block: int,
    header: bool,
    bounds: bool,
    dtype: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("o") / "a.npy"
    written = documents if bounds else [[*document, 0] for document in documents]
    write_olmo(path, written, dtype, header=header, bounds=bounds)
    corpus = Olmo(files=(str(path),), dtype=dtype, eos_id=-1 if bounds else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "SOURCE_BYTES", step)
        patch.setattr(corpus_olmo, "_BLOCK", block)
        found = read(corpus)
    assert [tokens for _, tokens in found] == written
    starts = np.cumsum([0, *map(len, written)])[:-1].tolist()
    assert [name for name, _ in found] == [f"a.npy@{start}" for start in starts]


def test_tokens_after_the_last_eos_are_a_document_and_gaps_between_bounds_are_none(
    tmp_path: Path,
) -> None:
    write_olmo(tmp_path / "a.npy", [[5, 0], [0], [6, 7]], "uint16")
    corpus = Olmo(files=(f"{tmp_path}/a.npy",), dtype="uint16", eos_id=0)
    assert read(corpus) == [("a.npy@0", [5, 0]), ("a.npy@2", [0]), ("a.npy@3", [6, 7])]
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"1,3,id,source\n4,5\n"))
    assert read(corpus) == [("a.npy@1", [0, 0]), ("a.npy@4", [7])]


def test_a_flat_array_needs_an_eos_or_bounds(tmp_path: Path) -> None:
    write_olmo(tmp_path / "a.npy", [[5, 0]])
    (message,) = problems(Olmo(files=(f"{tmp_path}/a.npy",)))
    assert "a.npy has no a.csv.gz beside it, and data.corpus.eos_id is not given" in message
    assert "try: --data.corpus.eos-id N" in message
    found = Data(corpus=Olmo(dtype="int7", eos_id=-2), tokenizer=Bytes()).problems()
    assert [problem.message for problem in found] == [
        "data.corpus.dtype = 'int7'",
        "data.corpus.eos_id = -2",
    ]


def store_of(corpus: CorpusConfig, folder: Path, **options: bool) -> list[list[int]]:
    store = build(
        Data(
            corpus=corpus,
            tokenizer=Bytes(),
            cache=str(folder / "cache"),
            validation_fraction=0,
            **options,
        )
    )
    (split,) = store.train
    assert split.n_bytes == sum(
        len(bytes(token for token in split.document(index).tolist() if token < 256))
        for index in range(split.n_documents)
    )
    return [split.document(index).tolist() for index in range(split.n_documents)]


def test_a_store_of_tokens_has_bos_and_eos_where_they_are_missing(tmp_path: Path) -> None:
    bos, eos = Bytes().build().bos_id, Bytes().build().eos_id
    assert bos is not None
    assert eos is not None
    word = list(b"word")
    write_megatron(tmp_path / "a", [[word], [], [[bos, *word, eos]], [[*word, eos]]])
    corpus = Megatron(files=(f"{tmp_path}/a",))
    framed = [bos, *word, eos]
    assert store_of(corpus, tmp_path) == [framed] * 3
    as_they_are = store_of(corpus, tmp_path, bos=False, eos=False)
    assert as_they_are == [word, framed, [*word, eos]]


def test_tokens_that_the_tokenizer_does_not_know_are_named(tmp_path: Path) -> None:
    write_olmo(tmp_path / "a.npy", [[1, 2, 3], [4, 70_000]], "uint32", bounds=True)
    with pytest.raises(UserError, match=r"document a\.npy@3: token 1 is 70000"):
        store_of(Olmo(files=(f"{tmp_path}/a.npy",)), tmp_path)
    write_megatron(tmp_path / "b", [[[-1]]], "int16")
    with pytest.raises(UserError, match=r"document b:0: token 0 is -1"):
        store_of(Megatron(files=(f"{tmp_path}/b",)), tmp_path)


def test_a_tokenizer_that_learns_from_text_is_refused_for_tokens(tmp_path: Path) -> None:
    parts = (Part(corpus=Text(files=("x",))), Part(corpus=Megatron(files=("y",))))
    for corpus in (Megatron(files=("y",)), Olmo(files=("y",), eos_id=0), Mixture(parts=parts)):
        (found,) = Data(corpus=corpus, tokenizer=Bpe()).problems()
        assert "learns from text, and data.corpus" in found.message
        assert not Data(corpus=corpus, tokenizer=Bytes()).problems()


def test_a_changed_bin_or_list_of_bounds_changes_the_stamp(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[[1, 2]]])
    write_olmo(tmp_path / "b.npy", [[1, 2]], bounds=True)
    for corpus, file in (
        (Megatron(files=(f"{tmp_path}/a",)), "a.bin"),
        (Olmo(files=(f"{tmp_path}/b.npy",)), "b.csv.gz"),
    ):
        (before,) = corpus.sources()
        path = tmp_path / file
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        (after,) = corpus.sources()
        assert before.stamp != after.stamp


# Damage ---------------------------------------------------------------------------------------


def damaged_index(content: bytes, byte: int, kind: str, value: int) -> bytes:
    """The index with one of its numbers changed."""
    packed = struct.pack(kind, value)
    return content[:byte] + packed + content[byte + len(packed) :]


LENGTHS, BEGINS, BOUNDS = 34, 34 + 4 * 3, 34 + 12 * 3
"""Bytes of the arrays in the index of three sequences below."""


@pytest.mark.parametrize(
    ("byte", "kind", "value", "where", "words"),
    [
        (0, "<B", 0x4E, 0, "it begins with b'NMIDIDX"),
        (9, "<Q", 2, 9, "version 2, where only 1 is known"),
        (17, "<B", 7, 17, "code 7, numbers with fractions; token ids are 1 (uint8)"),
        (17, "<B", 99, 17, "code 99, unknown numbers"),
        (17, "<B", 5, 8, "it ends within a number: int64 has 8 bytes"),
        (18, "<Q", 2**63, 94, "9223372036854775808 sequences and 3 bounds of documents need"),
        (26, "<Q", 0, 70, "3 sequences and 0 bounds of documents need 70 bytes, it has 94"),
        (LENGTHS, "<i", -1, LENGTHS, "a sequence of -1 tokens"),
        (LENGTHS + 8, "<i", 4, 12, "it ends here, but sequences reach to 14"),
        (LENGTHS + 8, "<i", 2, 10, "no sequence has what follows; the file has 12 bytes"),
        (BEGINS, "<q", 2, BEGINS, "a sequence at byte 2 of the tokens"),
        (BEGINS + 16, "<q", 2**62, BEGINS + 16, "so that byte 6 is right"),
        (BOUNDS, "<q", 1, BOUNDS, "document 0 begins with sequence 1, out of order"),
        (BOUNDS + 8, "<q", 9, BOUNDS + 8, "begins with sequence 9, out of order or not among 3"),
        (BOUNDS + 16, "<q", 2, BOUNDS + 16, "document 2 begins with sequence 2, out of order"),
    ],
)
def test_damage_to_an_index_is_told_with_file_byte_and_reason(
    byte: int, kind: str, value: int, where: int, words: str, *, tmp_path: Path
) -> None:
    write_megatron(tmp_path / "a", [[[1, 2], [3]], [[4, 5, 6]]])
    index = tmp_path / "a.idx"
    index.write_bytes(damaged_index(index.read_bytes(), byte, kind, value))
    (message,) = problems(Megatron(files=(f"{tmp_path}/a",)))
    first, *_ = message.splitlines()
    assert first.startswith(f"error: {tmp_path}/a.")
    assert f": byte {where}: " in first
    assert words in first


def test_a_megatron_pair_that_is_cut_or_lacks_one_file_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[[1, 2], [3]], [[4, 5, 6]]])
    corpus = Megatron(files=(f"{tmp_path}/a",))
    index, tokens = (tmp_path / f"a.{suffix}" for suffix in ("idx", "bin"))
    whole = index.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        (message,) = problems(corpus)
        assert f"a.idx: byte {size}: " in message
    index.write_bytes(whole + b"\0\0\0")
    assert "a.idx: byte 94: kinds of sequences" in problems(corpus)[0]
    index.write_bytes(whole)
    ids = tokens.read_bytes()
    for size in range(len(ids)):
        tokens.write_bytes(ids[:size])
        (message,) = problems(corpus)
        assert f"a.bin: byte {size // 2 * 2}: it ends" in message
    tokens.unlink()
    assert f"cannot read {index}: there is no {tokens}" in problems(corpus)[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0,9\n", "byte 0: of its content: b'0,9\\n', not `start,end`, in order, in 4 tokens"),
        (b"0,2\n1,3\n", "byte 4: of its content: b'1,3"),
        (b"0,2\n3,2\n", "byte 4: of its content: b'3,2"),
        (b"start,end\n", "byte 0: of its content: b'start,end"),
        (b"0\n", "byte 0: of its content: b'0"),
        (b"0,-1\n", "byte 0: of its content: b'0,-1"),
        (b"0," + b"1" * 100_000, "byte 0: of its content"),
    ],
)
def test_bounds_that_cannot_be_are_told_with_their_place(
    content: bytes, words: str, tmp_path: Path
) -> None:
    write_olmo(tmp_path / "a.npy", [[1, 2], [3, 4]])
    bounds = tmp_path / "a.csv.gz"
    bounds.write_bytes(gzip.compress(content))
    (message,) = problems(Olmo(files=(f"{tmp_path}/a.npy",)))
    assert f"{bounds}: {words}" in message
    assert len(message) < 400


def test_a_flat_array_that_is_cut_is_told_with_its_place(tmp_path: Path) -> None:
    path = write_olmo(tmp_path / "a.npy", [[1, 2, 0]])
    corpus = Olmo(files=(str(path),), eos_id=0)
    path.write_bytes(path.read_bytes()[:10])
    assert f"{path}: byte 8: it ends within a number" in problems(corpus)[0]
    write_olmo(path, [[1, 2, 0]], header=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"{path}: byte {len(whole) - 1}: it ends here, but its header" in problems(corpus)[0]
    path.write_bytes(whole[:20])
    assert f"{path}: byte 0: its NumPy header cannot be read" in problems(corpus)[0]
    np.save(path, np.zeros((2, 2), np.int64))
    assert "it holds int64 of shape (2, 2), not one list" in problems(corpus)[0]
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    assert "it holds object of shape (1,), not one list" in problems(corpus)[0]


def test_an_eos_that_never_comes_is_told_rather_than_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_olmo, "LONGEST_DOCUMENT", 20)
    monkeypatch.setattr(corpus_olmo, "_BLOCK", 8)
    path = write_olmo(tmp_path / "a.npy", [[1] * 100])
    (message,) = problems(Olmo(files=(str(path),), eos_id=7))
    assert "byte 0: no 7 for 20 tokens: is data.corpus.eos_id right?" in message


FILES = st.sampled_from(["m.idx", "m.bin", "o.npy", "o.csv.gz", "h.npy"])


@settings(deadline=None, max_examples=300)
@given(name=FILES, at=st.integers(0, 400), new=st.binary(min_size=1, max_size=9), cut=st.booleans())
def test_no_damage_brings_another_error_than_a_problem(
    name: str, at: int, new: bytes, cut: bool, *, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_megatron(folder / "m", [[[1, 2], [3]], [], [[4, 5, 6]] * 3], "int32")
    write_olmo(folder / "o.npy", [[1, 2], [], [3] * 9], bounds=True)
    write_olmo(folder / "h.npy", [[1, 2, 0], [3] * 9], header=True)
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:at] + new + (b"" if cut else content[at + len(new) :]))
    for corpus in (
        Megatron(files=(f"{folder}/m",)),
        Olmo(files=(f"{folder}/o.npy",)),
        Olmo(files=(f"{folder}/h.npy",), eos_id=0),
    ):
        for message in problems(corpus):
            assert str(folder) in message
