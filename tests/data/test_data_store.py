"""Token stores on disk: opened, verified, refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from armillary.data.config import Bytes, Data, File, Text
from armillary.data.splits import Split
from armillary.data.store import TokenStore, build, open_store, verify
from armillary.foundation.errors import UserError
from data_examples import write_texts


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    write_texts(tmp_path / "texts", 40)
    corpus = Text(files=(f"{tmp_path}/texts/**/*.txt",))
    data = Data(corpus=corpus, tokenizer=Bytes(), cache=f"{tmp_path}/c", validation_fraction=0.2)
    return build(data)


def test_an_opened_store_is_the_built_one_and_needs_no_corpus(
    store: TokenStore, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    store.folder.rename(moved)
    opened = open_store(moved)
    assert opened.fingerprint == store.fingerprint
    assert opened.tokenizer.fingerprint == opened.manifest["tokenizer"]["fingerprint"]
    for split in opened.splits.values():
        assert isinstance(split.tokens, np.memmap)
        assert split.tokens.dtype == np.uint16
    held_out = opened.splits["validation"]
    texts = list(held_out.documents_bytes())
    assert [opened.tokenizer.decode(held_out.document(i)[1:-1].tolist()).encode()
            for i in range(held_out.n_documents)] == texts  # fmt: skip
    assert opened.manifest["parts"][0]["validation"] == {
        "documents": len(texts),
        "tokens": held_out.n_tokens,
        "bytes": sum(map(len, texts)),
    }
    with pytest.raises(ValueError, match="only the validation split"):
        next(opened.splits["train"].documents_bytes())


def test_verify_names_each_file_that_is_not_as_it_was_written(store: TokenStore) -> None:
    assert verify(store.folder) == []
    tokens = store.folder / "part-0/train/tokens.npy"
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    tokens.write_bytes(content)
    (store.folder / "part-0/validation/ids.txt").unlink()
    text = store.folder / "part-0/validation/text.bin"
    text.write_bytes(text.read_bytes() + b"!")
    messages = [problem.message for problem in verify(store.folder)]
    assert len(messages) == 3
    assert "train/tokens.npy has changed: SHA-256" in messages[0]
    assert "validation/ids.txt is missing" in messages[1]
    assert "validation/text.bin has" in messages[2]
    with pytest.raises(UserError, match=r"ids.txt is missing or cut short") as caught:
        open_store(store.folder)
    assert len(caught.value.problems) == 2


def test_foreign_folders_and_other_formats_are_refused(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a token store"):
        open_store(tmp_path)
    manifest = store.folder / "manifest.json"
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**found, "format": 99}))
    with pytest.raises(UserError, match="has format 99"):
        open_store(store.folder)
    manifest.write_text("{}")
    with pytest.raises(UserError, match="is not the manifest"):
        open_store(store.folder)
    manifest.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        verify(store.folder)


def test_a_vocabulary_beyond_16_bits_is_kept_in_32(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Parsed
    from tokenizers import models, pre_tokenizers

    vocabulary = {"<s>": 0, "</s>": 70_000, "ring": 69_999, "[UNK]": 1}
    parsed = Parsed(models.WordLevel(vocabulary, unk_token="[UNK]"))
    parsed.pre_tokenizer = pre_tokenizers.Whitespace()
    parsed.save(str(tmp_path / "tokenizer.json"))
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text("ring ring")
    corpus = Text(files=(f"{tmp_path}/*.txt",))
    tokenizer = File(path=f"{tmp_path}/tokenizer.json")
    data = Data(corpus=corpus, tokenizer=tokenizer, cache=f"{tmp_path}/c", validation_fraction=0.3)
    train = build(data).splits["train"]
    assert train.tokens.dtype == np.uint32
    assert train.document(0).tolist() == [0, 69_999, 69_999, 70_000]


def test_a_split_can_be_made_from_plain_arrays() -> None:
    split = Split(np.arange(5, dtype=np.uint16), [0, 2, 5], [1, 2], ["a", "b"], b"xyz")
    assert (split.n_documents, split.n_tokens, split.n_bytes) == (2, 5, 3)
    assert list(split.documents_bytes()) == [b"x", b"yz"]
    assert split.document(1).tolist() == [2, 3, 4]
    with pytest.raises(AssertionError):
        Split(np.arange(5), [0, 2])
