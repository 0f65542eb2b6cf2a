"""Documents that bring tokens, and tokens that are only read: from a corpus to labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.data import pieces
from armillary.data.batch import IGNORED
from armillary.data.config import Bytes, Concatenate, Data, Text, WholeDocuments
from armillary.data.corpus import CorpusConfig, Document, Source
from armillary.data.dataset import PackedDataset, ValidationDataset, training_set
from armillary.data.splits import Bits, Split
from armillary.data.store import build, open_store, verify
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError

COUNT = 40


def tokens_of(index: int) -> np.ndarray:
    """As many tokens as the number says, letters only."""
    return (97 + np.arange(index) % 26).astype(np.uint16)


@component("test-tokens")
@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens(CorpusConfig):
    """Documents 0 to 39 as tokens; the first has none, the last names a token too many if asked."""

    masked: bool = False
    wrong: bool = False
    framed: bool = False

    def sources(self) -> list[Source]:
        return [Source(name=str(n), start=n * 4, end=n * 4 + 4, size=9) for n in range(COUNT // 4)]

    def masks(self) -> bool:
        return self.masked

    def read(self, source: Source) -> Iterator[Document | Problem]:
        for index in range(source.start, source.end):
            tokens = tokens_of(index)
            if self.framed and index:
                tokens = np.concatenate([[256], tokens, [257]])
            if self.wrong and index == COUNT - 1:
                tokens[7] = 300
            scored = tokens % 2 == 0 if self.masked and index % 3 else None
            yield Document(f"{index:02}", "", tokens=tokens, scored=scored)


def data_of(tmp_path: Path, corpus: CorpusConfig, **values: object) -> Data:
    options = {"tokenizer": Bytes(), "cache": f"{tmp_path}/cache", "workers": 1} | values
    return Data(corpus=corpus, validation_fraction=0.3, **options)


def documents(split: Split) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
    for place, name in enumerate(split.ids):
        start, end = split.document_offsets[place : place + 2]
        scored = None if split.scored is None else split.scored[start:end]
        yield int(name), split.document(place), scored


@pytest.mark.parametrize("framed", [False, True], ids=["bare", "framed"])
def test_tokens_of_a_corpus_come_through_with_one_bos_and_one_eos(
    tmp_path: Path, framed: bool
) -> None:
    store = build(data_of(tmp_path, Tokens(framed=framed)))
    seen = []
    for split in (store.train[0], store.validation[0]):
        for index, tokens, scored in documents(split):
            assert tokens.tolist() == [256, *tokens_of(index), 257]
            assert scored is None
            seen.append(index)
        assert split.document_bytes.tolist() == [index for index, _, _ in documents(split)]
    assert sorted(seen) == list(range(1, COUNT))
    assert store.manifest["parts"][0]["empty_documents"] == 1
    texts = list(store.validation[0].documents_bytes())
    assert texts == [bytes(tokens_of(n).tolist()) for n, _, _ in documents(store.validation[0])]


def test_a_token_that_the_vocabulary_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"document 39: token 7 is 300\n.*0 to 257, the vocabulary"):
        build(data_of(tmp_path, Tokens(wrong=True)))


def test_masks_come_through_the_store_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 20)
    store = build(data_of(tmp_path, Tokens(masked=True)))
    assert verify(store.folder) == []
    for split in (store.train[0], store.validation[0]):
        assert isinstance(split.scored, Bits)
        for place, (index, tokens, scored) in enumerate(documents(split)):
            assert tokens.tolist() == tokens_of(index).tolist()  # nothing is added
            expected = tokens % 2 == 0 if index % 3 else np.ones(index, bool)
            expected[0] = False
            assert scored is not None and scored.tolist() == expected.tolist()
            assert split.document_bytes[place] == expected.sum()
    path = store.folder / "part-0/train/scored.npy"
    np.save(path, np.load(path)[:-1])
    with pytest.raises(UserError, match=r"scored\.npy is missing or cut short"):
        open_store(store.folder)


def test_unscored_tokens_are_no_labels_in_training_and_validation(tmp_path: Path) -> None:
    data = data_of(tmp_path, Tokens(masked=True), packing=WholeDocuments())
    store = build(data)
    training = training_set(store, data, seq_len=64, seed=0)
    validation = ValidationDataset(store.validation[0], seq_len=16, stride=4)
    for split, dataset, rows in (
        (store.train[0], training, training.samples_per_epoch),
        (store.validation[0], validation, validation.n_rows),
    ):
        batch = dataset.batch(0, rows)
        labels = batch.labels[batch.labels != IGNORED].tolist()
        wanted = [
            token
            for _, tokens, scored in documents(split)
            if scored is not None
            for token in tokens[scored].tolist()
        ]
        assert sorted(labels) == sorted(wanted)
    assert validation.n_tokens == len(wanted) == validation.n_bytes


def test_a_corpus_with_masks_has_another_store_than_the_same_tokens_without(
    tmp_path: Path,
) -> None:
    plain = build(data_of(tmp_path, Tokens()))
    masked = build(data_of(tmp_path, Tokens(masked=True)))
    assert plain.fingerprint != masked.fingerprint
    assert not (plain.folder / "part-0/train/scored.npy").exists()


def test_stores_of_text_have_the_keys_that_they_always_had(tmp_path: Path) -> None:
    for index in range(30):
        (tmp_path / f"{index}.txt").write_text(f"text {index} " * (1 + index % 5))
    data = data_of(tmp_path, Text(files=(f"{tmp_path}/*.txt",)))
    store = build(data)
    assert store.fingerprint == "9fd890881d67cad4b496ac05d7b1b69c9f4fc88ba7a0a439c03b8823d6bd5642"
    assert (
        training_set(store, data, seq_len=16, seed=3).fingerprint
        == "2b83b899a531a9049d497c9bd8904ee983a06168df548dfd39f8e619438bd78d"
    )


@given(st.lists(st.booleans(), max_size=70), st.integers(0, 70), st.integers(0, 70))
def test_bits_are_the_flags_they_were_made_of(flags: list[bool], start: int, stop: int) -> None:
    array = np.array(flags, bool)
    bits = Bits(np.packbits(array), len(array))
    assert bits[start:stop].tolist() == flags[start:stop]
    where = np.arange(len(flags))[::3]
    assert bits[where].tolist() == flags[::3]


def test_samples_without_a_token_to_learn_are_left_out() -> None:
    offsets = np.arange(0, 41, 8)
    scored = np.zeros(40, bool)
    scored[[3, 17, 20]] = True
    split = Split(np.arange(40, dtype=np.uint32), offsets, scored=scored)
    dataset = PackedDataset(split, Concatenate(), seq_len=8, shuffle=False)
    batch = dataset.batch(0, 2)
    assert dataset.samples_per_epoch == 2
    assert [row[row != IGNORED].tolist() for row in batch.labels] == [[3], [17, 20]]
    silent = Split(split.tokens, offsets, scored=np.zeros(40, bool))
    with pytest.raises(UserError, match="no sample holds a token to learn"):
        PackedDataset(silent, Concatenate(), seq_len=8)


def lengths_split(lengths: list[int]) -> Split:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Split(np.arange(offsets[-1], dtype=np.uint32), offsets)


def test_whole_documents_begin_rows_only_with_beginnings_and_tell_what_is_left_out() -> None:
    lengths = [9, 10, 30, 2, 1, 0, 5]
    split = lengths_split(lengths)
    begins = split.document_offsets[:-1]
    for too_long, used in (("cut", [8, 8, 8, 1, 0, 0, 4]), ("drop", [8, 0, 0, 1, 0, 0, 4])):
        dataset = PackedDataset(split, WholeDocuments(too_long=too_long), seq_len=8)
        batch = dataset.batch(0, dataset.samples_per_epoch)
        labels = sorted(batch.labels[batch.labels != IGNORED].tolist())
        wanted = [b + 1 + i for b, count in zip(begins, used, strict=True) for i in range(count)]
        assert labels == sorted(wanted)
        [remark] = dataset.remarks
        assert remark.startswith("2 of 7 documents are longer than budget.seq_len = 8")
    assert WholeDocuments(too_long="split").problems()[0].allowed == "cut, drop"
