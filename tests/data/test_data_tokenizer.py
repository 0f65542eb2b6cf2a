"""Tokenizers: exact round trips, no special tokens but the asked ones, the same on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Parsed
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from armillary.data.config import Bpe, Bytes, File
from armillary.data.tokenizer import (
    Tokenizer,
    check_special_tokens,
    load_tokenizer,
    save_tokenizer,
)
from armillary.data.tokenizer_words import WordEncoder, cuts_words_like_gpt2
from armillary.foundation.errors import UserError

TEXTS = [
    "def ring(x):\n    return x  # it's the sphere's\n\n\nclass Sky:\n\tpass\n" * 3,
    "we'll see 12345 stars... <|eos|> <|bos|>\r\n  é 星 \u3000\x85 done",
    "   \n \n",
]
MADE = Bpe(vocab_size=320).build(TEXTS)


@pytest.mark.parametrize("tokenizer", [Bytes().build(), MADE], ids=["bytes", "bpe"])
@settings(deadline=None, max_examples=60)
@given(
    text=st.lists(
        st.sampled_from([*" \n\t\r'sdlverm1٣½éA星\u3000\x1c\x85.", "x=1", "<|eos|>", "\n    "])
        | st.characters(codec="utf-8"),
        max_size=60,
    ).map("".join)
)
def test_text_comes_back_exactly_and_batches_agree_with_single_texts(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert {tokenizer.bos_id, tokenizer.eos_id}.isdisjoint(ids)
    assert max(ids, default=0) < tokenizer.vocab_size
    batch = tokenizer.encode_batch([text, "", text])
    assert [one.tolist() for one in batch] == [ids, [], ids]


def test_bpe_does_not_depend_on_the_order_of_texts_and_learns_merges() -> None:
    again = Bpe(vocab_size=320).build(reversed(TEXTS))
    assert again.fingerprint == MADE.fingerprint
    assert (MADE.bos_id, MADE.eos_id, MADE.vocab_size) == (0, 1, 320)
    assert len(MADE.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert MADE.fingerprint != Bpe(vocab_size=310).build(TEXTS).fingerprint


def test_special_tokens_show_when_asked_for() -> None:
    for tokenizer in (Bytes().build(), MADE):
        ids = [tokenizer.bos_id, *tokenizer.encode("hi"), tokenizer.eos_id]
        assert tokenizer.decode(ids) == "hi"  # type: ignore[arg-type]
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|>hi<|eos|>"  # type: ignore[arg-type]
    assert Bytes().build().decode([0xE6, 0x98]) == "\ufffd"


def test_saved_tokenizers_load_as_they_were(tmp_path: Path) -> None:
    for name, tokenizer in (("bytes", Bytes().build()), ("bpe", MADE)):
        save_tokenizer(tokenizer, tmp_path / name)
        loaded = load_tokenizer(tmp_path / name)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
        assert (loaded.bos_id, loaded.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert Parsed.from_file(str(tmp_path / "bpe/tokenizer.json")).get_vocab_size() == 320
    with pytest.raises(UserError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "bpe/armillary_tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is damaged"):
        load_tokenizer(tmp_path / "bpe")


def published(folder: Path, **parts: Any) -> Path:
    """A tokenizer.json as others publish them, with a post-processor that adds BOS and EOS."""
    vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "<|end|>": 5}
    parsed = Parsed(models.WordLevel(vocabulary, unk_token="[UNK]"))
    parsed.pre_tokenizer = pre_tokenizers.Whitespace()
    parsed.add_special_tokens(["<s>", "</s>", "<|end|>"])
    parsed.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    parsed.enable_padding(length=9)
    parsed.enable_truncation(1)
    for name, part in parts.items():
        setattr(parsed, name, part)
    folder.mkdir(exist_ok=True)
    parsed.save(str(folder / "tokenizer.json"))
    return folder


def test_a_published_tokenizer_adds_nothing_cuts_nothing_and_reads_no_special_tokens(
    tmp_path: Path,
) -> None:
    tokenizer = File(path=str(published(tmp_path / "t"))).build()
    assert tokenizer.encode("a b a") == [3, 4, 3]
    assert [one.tolist() for one in tokenizer.encode_batch(["a b a", "b"])] == [[3, 4, 3], [4]]
    assert 2 not in tokenizer.encode("a </s> b")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 6)
    check_special_tokens(tokenizer, bos=True, eos=True)


def test_bos_and_eos_come_from_the_recipe_then_the_model_then_well_known_names(
    tmp_path: Path,
) -> None:
    folder = published(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": None, "eos_token": {"content": "<|end|>"}})
    )
    stated = File(path=str(folder / "tokenizer.json")).build()
    assert (stated.bos_id, stated.eos_id) == (1, 5)
    chosen = File(path=str(folder), bos="<|end|>", eos="</s>")
    assert (chosen.build().bos_id, chosen.build().eos_id) == (5, 2)
    assert chosen.identity()["bos_id"] == 5
    assert chosen.expected_vocab_size() == 6
    with pytest.raises(UserError) as caught:
        File(path=str(folder), eos="<|edn|>").build()
    assert "data.tokenizer.eos = '<|edn|>' is not in the vocabulary" in str(caught.value)
    assert "try: --data.tokenizer.eos '<|end|>'" in str(caught.value)


def test_a_missing_special_token_is_an_error_only_where_it_is_asked_for(tmp_path: Path) -> None:
    parsed = Parsed(models.WordLevel({"a": 0}, unk_token="a"))
    parsed.save(str(tmp_path / "tokenizer.json"))
    tokenizer = File(path=str(tmp_path)).build()
    check_special_tokens(tokenizer, bos=False, eos=False)
    with pytest.raises(UserError) as caught:
        check_special_tokens(tokenizer, bos=True, eos=True)
    assert "data.bos = true, but the tokenizer has no BOS token" in str(caught.value)
    assert "--data.eos false" in str(caught.value)


def test_missing_and_corrupt_tokenizer_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        File(path=str(tmp_path / "none.json")).build()
    (tmp_path / "t.json").write_text('{"model": ')
    with pytest.raises(UserError, match=r"t\.json is not a tokenizer"):
        File(path=str(tmp_path / "t.json")).build()
    (tmp_path / "t.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"t\.json is not UTF-8"):
        File(path=str(tmp_path / "t.json")).build()


def test_the_quick_way_is_taken_only_where_it_gives_the_same_ids(tmp_path: Path) -> None:
    def made(**parts: Any) -> Parsed:
        parsed = Parsed.from_str(MADE.files()["tokenizer.json"])
        for name, part in parts.items():
            setattr(parsed, name, part)
        return parsed

    assert cuts_words_like_gpt2(made())
    byte_level = pre_tokenizers.ByteLevel
    assert not cuts_words_like_gpt2(made(pre_tokenizer=byte_level(add_prefix_space=True)))
    assert not cuts_words_like_gpt2(
        made(pre_tokenizer=byte_level(add_prefix_space=False, use_regex=False))
    )
    assert not cuts_words_like_gpt2(made(normalizer=normalizers.NFC()))
    added = made()
    added.add_tokens(["ring"])
    assert not cuts_words_like_gpt2(added)


def test_lines_that_are_not_ascii_are_not_remembered() -> None:
    encoder = WordEncoder(Parsed.from_str(MADE.files()["tokenizer.json"]))
    texts = ["a ring\nthe déjà vu\nof", "déjà vu\n", "a ring"] * 2
    for _ in range(2):
        found = [ids.tolist() for ids in encoder.encode_batch(texts)]
        assert found == [MADE.encode(text) for text in texts]
    assert set(encoder._known) == {"a", " ring", "\n", "of"}


def test_a_first_token_stands_for_as_many_bytes_as_it_was_made_of(tmp_path: Path) -> None:
    assert Bytes().build().byte_count(ord("x")) == 1
    for text in ["ring", "星", "x"]:
        ids = MADE.encode(text)
        assert sum(map(MADE.byte_count, ids)) == len(text.encode())
    named = File(path=str(published(tmp_path / "t"))).build()
    assert named.byte_count(named.encode("a")[0]) == 1
    pieces = Parsed(models.BPE({"▁": 0, "<0xE6>": 1, "é": 2, "▁é": 3}, [("▁", "é")]))
    pieces.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    pieces.save(str(tmp_path / "tokenizer.json"))
    by_piece = File(path=str(tmp_path)).build()
    assert [by_piece.byte_count(token) for token in (1, 2, 3)] == [1, 2, 2]


def test_ids_come_as_unsigned_integers() -> None:
    for tokenizer in (Bytes().build(), MADE):
        assert all(
            np.issubdtype(ids.dtype, np.unsignedinteger) for ids in tokenizer.encode_batch(TEXTS)
        )
