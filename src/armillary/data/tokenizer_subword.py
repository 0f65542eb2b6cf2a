"""Subword tokenizers: any `tokenizer.json`, and byte-level BPE trained on the corpus."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from armillary.data.tokenizer import (
    CHAT_TEMPLATE_FILE,
    DESCRIPTION_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Ids,
    MarkedIds,
    Tokenizer,
    TokenizerConfig,
    description,
    fingerprint_of,
    read_chat_template,
)
from armillary.data.tokenizer_marked import MarkedEncoder, encoder_of
from armillary.data.tokenizer_words import WordEncoder, cuts_words_like_gpt2
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError, nearest
from armillary.foundation.files import sha256_of

if TYPE_CHECKING:
    import tokenizers

BOS_TOKEN, EOS_TOKEN = "<|bos|>", "<|eos|>"
_MINIMUM_VOCAB = 256 + 2
_BOS_NAMES = ("<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "<bos>", "<s>", "[BOS]")
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Tokens for bytes of characters that a vocabulary lacks, as SentencePiece names them."""
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "<|eos|>", "<eos>", "</s>", "[EOS]")


@component("file")
@dataclass(frozen=True, kw_only=True, slots=True)
class File(TokenizerConfig):
    """A tokenizer.json, as published with most models.

    What its post-processor would add is left out: `data.bos` and `data.eos` alone decide that.
    """

    path: str = ""
    """A tokenizer.json, or the folder that holds it."""
    bos: str = ""
    """Token that begins a document; empty: as tokenizer_config.json or a well-known name says."""
    eos: str = ""
    """Token that ends a document; empty: as tokenizer_config.json or a well-known name says."""

    def build(self, texts: Iterable[str] = ()) -> Tokenizer:
        """See `TokenizerConfig.build`."""
        path = self._path()
        parsed = parse_tokenizer(path)
        stated = _stated_tokens(path.parent / TOKENIZER_CONFIG_FILE)
        bos = _find_token(parsed, "bos", self.bos, stated.get("bos_token"), _BOS_NAMES)
        eos = _find_token(parsed, "eos", self.eos, stated.get("eos_token"), _EOS_NAMES)
        return SubwordTokenizer(parsed, bos, eos, read_chat_template(path.parent))

    def expected_vocab_size(self) -> int:
        """See `TokenizerConfig.expected_vocab_size`."""
        return self.build().vocab_size

    def identity(self) -> dict[str, Any]:
        """The content of the file counts, not where it lies."""
        tokenizer = self.build()
        return {
            "name": "file",
            "sha256": sha256_of(self._path()),
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        }

    def _path(self) -> Path:
        if not self.path:
            raise UserError(
                Problem("data.tokenizer.path is empty", fix="--data.tokenizer.path tokenizer.json")
            )
        path = Path(self.path).expanduser()
        return path / TOKENIZER_FILE if path.is_dir() else path


@component("bpe")
@dataclass(frozen=True, kw_only=True, slots=True)
class Bpe(TokenizerConfig):
    """Byte-level byte-pair encoding, trained on training documents. (Sennrich et al. 2016)"""

    vocab_size: int = 4096
    """Tokens in all: 256 bytes, BOS, EOS, and merges."""
    training_bytes: int = 8_000_000
    """At most this much training text is learned from, in bytes, picked by document hash."""
    special: tuple[str, ...] = ()
    """Names of further special tokens, such as <|im_start|>; they are no merges."""

    def build(self, texts: Iterable[str] = ()) -> Tokenizer:
        """See `TokenizerConfig.build`."""
        self._check()
        return SubwordTokenizer(_train_bpe(self.vocab_size, self.special, texts), 0, 1)

    def text_needed(self) -> int:
        """See `TokenizerConfig.text_needed`."""
        return self.training_bytes

    def expected_vocab_size(self) -> int:
        """See `TokenizerConfig.expected_vocab_size`; less if the text has too few merges."""
        return self.vocab_size

    def identity(self) -> dict[str, Any]:
        """See `TokenizerConfig.identity`."""
        self._check()
        values = dataclasses.asdict(self)
        if not self.special:  # as before there was such a thing
            del values["special"]
        return {"name": "bpe", **values}

    def problems(self) -> list[Problem]:
        """See `TokenizerConfig.problems`."""
        problems = []
        least = _MINIMUM_VOCAB + len(self.special)
        further = f", {len(self.special)} special tokens more" if self.special else ""
        if not least <= self.vocab_size <= 2**24:
            problems.append(
                Problem(
                    f"data.tokenizer.vocab_size = {self.vocab_size}",
                    f"{least} (256 bytes, BOS, EOS{further}) to {2**24}",
                    "--data.tokenizer.vocab-size 4096",
                )
            )
        names = (BOS_TOKEN, EOS_TOKEN, *self.special)
        if len(set(names)) < len(names) or "" in names:
            problems.append(
                Problem(
                    f"data.tokenizer.special = {', '.join(self.special)}",
                    f"names, each once, other than {BOS_TOKEN} and {EOS_TOKEN}",
                )
            )
        if self.training_bytes < 1:
            problems.append(
                Problem(
                    f"data.tokenizer.training_bytes = {self.training_bytes}",
                    "1 byte or more",
                    "--data.tokenizer.training-bytes 8000000",
                )
            )
        return problems

    def _check(self) -> None:
        if problems := self.problems():
            raise UserError(problems)


class SubwordTokenizer:
    """A parsed tokenizer.json with an explicit BOS and EOS."""

    def __init__(
        self,
        parsed: tokenizers.Tokenizer,
        bos_id: int | None,
        eos_id: int | None,
        chat_template: str = "",
    ) -> None:
        parsed.encode_special_tokens = True  # "<|eos|>" in a text is text, not the end of it
        parsed.no_padding()
        parsed.no_truncation()
        self._parsed = parsed
        self._words = WordEncoder(parsed) if cuts_words_like_gpt2(parsed) else None
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.chat_template = chat_template
        self.vocab_size: int = max(parsed.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """See `Tokenizer.special_tokens`."""
        added = self._parsed.get_added_tokens_decoder()
        found = {token.content: number for number, token in added.items() if token.special}
        for number in (self.bos_id, self.eos_id):  # a vocabulary may not call them special
            if number is not None and (name := self._parsed.id_to_token(number)) is not None:
                found[name] = number
        return found

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _marked(self) -> MarkedEncoder:
        return encoder_of(self._parsed, self.special_tokens)

    @property
    def fingerprint(self) -> str:
        """See `Tokenizer.fingerprint`."""
        return fingerprint_of(self.files())

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        ids: list[int] = self._parsed.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """See `Tokenizer.encode_batch`."""
        if self._words is not None:
            return self._words.encode_batch(texts)
        found = self._parsed.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in found]

    def encode_marked(self, text: str, template: Sequence[tuple[int, int]]) -> MarkedIds:
        """See `Tokenizer.encode_marked`."""
        return self._marked.encode(text, template)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._parsed.decode(
            [int(token) for token in ids], skip_special_tokens=skip_special_tokens
        )
        return text

    def byte_count(self, token: int) -> int:
        """See `Tokenizer.byte_count`."""
        name: str | None = self._parsed.id_to_token(token)
        if token in self._special_ids:
            return 0
        if name is not None and type(self._parsed.decoder).__name__ == "ByteLevel":
            return len(name)  # one character for each byte, whole characters or not
        if name is not None and _BYTE.fullmatch(name):
            return 1
        return len(self.decode([token], skip_special_tokens=False).encode("utf-8"))

    def files(self) -> dict[str, str]:
        """See `Tokenizer.files`."""
        return {
            TOKENIZER_FILE: self._parsed.to_str(),
            DESCRIPTION_FILE: description("subword", self.bos_id, self.eos_id),
            **({CHAT_TEMPLATE_FILE: self.chat_template} if self.chat_template else {}),
        }


def parse_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer.json.

    Raises:
        UserError: it is missing or not a tokenizer.
    """
    import tokenizers

    try:
        content = path.read_text("utf-8")
    except OSError as error:
        raise UserError(
            Problem(
                f"data.tokenizer.path: cannot read {path}: {error.strerror}",
                "a tokenizer.json, or a folder that holds one",
                "--data.tokenizer.path FILE, or --data.tokenizer bpe to train one",
            )
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(Problem(f"data.tokenizer.path: {path} is not UTF-8 text")) from error
    try:
        return tokenizers.Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain Exception, or a panic of Rust, which is not even one
        raise UserError(
            Problem(
                f"data.tokenizer.path: {path} is not a tokenizer: {error}",
                "the tokenizer.json that the tokenizers library writes",
                "fetch it again, or --data.tokenizer bpe to train one",
            )
        ) from error


def _train_bpe(
    vocab_size: int, special: tuple[str, ...], texts: Iterable[str]
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Parsed
    from tokenizers import decoders, models, pre_tokenizers, trainers

    parsed = Parsed(models.BPE())
    parsed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parsed.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parsed.train_from_iterator(texts, trainer)
    return parsed


def _stated_tokens(path: Path) -> dict[str, str]:
    """BOS and EOS as a tokenizer_config.json beside the tokenizer names them."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    tokens = {}
    for key in ("bos_token", "eos_token"):
        value = found.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def _find_token(
    parsed: tokenizers.Tokenizer, name: str, wanted: str, stated: str | None, known: tuple[str, ...]
) -> int | None:
    if wanted:
        found: int | None = parsed.token_to_id(wanted)
        if found is None:
            special = [token.content for token in parsed.get_added_tokens_decoder().values()]
            close = nearest(wanted, special)
            raise UserError(
                Problem(
                    f"data.tokenizer.{name} = {wanted!r} is not in the vocabulary",
                    f"special tokens: {', '.join(special[:12]) or 'none'}",
                    f"--data.tokenizer.{name} '{close}'" if close else None,
                )
            )
        return found
    for token in (stated, *known):
        if token is not None and (found := parsed.token_to_id(token)) is not None:
            return found
    return None
