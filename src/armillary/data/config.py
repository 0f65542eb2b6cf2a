"""Data: the part of a recipe that says what is read, how it is tokenised, packed and kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from armillary.data.chat.corpus import Chat
from armillary.data.corpus import CorpusConfig, Part, corpus_parts
from armillary.data.corpus_jsonl import JsonLines
from armillary.data.corpus_megatron import Megatron
from armillary.data.corpus_mixture import Mixture
from armillary.data.corpus_olmo import Olmo
from armillary.data.corpus_tables import HuggingFace, Parquet
from armillary.data.corpus_text import StandardLibrary, Text
from armillary.data.packing import BestFit, Concatenate, PackingConfig, WholeDocuments
from armillary.data.tokenizer import TokenizerConfig
from armillary.data.tokenizer_bytes import Bytes
from armillary.data.tokenizer_subword import Bpe, File
from armillary.foundation.component import name_of
from armillary.foundation.errors import Problem

__all__ = [
    "BestFit",
    "Bpe",
    "Bytes",
    "Chat",
    "Concatenate",
    "CorpusConfig",
    "Data",
    "File",
    "HuggingFace",
    "JsonLines",
    "Megatron",
    "Mixture",
    "Olmo",
    "PackingConfig",
    "Parquet",
    "Part",
    "StandardLibrary",
    "Text",
    "TokenizerConfig",
    "WholeDocuments",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What is trained on."""

    corpus: CorpusConfig = field(default_factory=StandardLibrary)
    """Where documents come from."""
    tokenizer: TokenizerConfig = field(default_factory=Bpe)
    """How text becomes token ids."""
    packing: PackingConfig = field(default_factory=Concatenate)
    """How documents fill samples of equal length."""
    bos: bool = True
    """Whether each document begins with the tokenizer's BOS."""
    eos: bool = True
    """Whether each document ends with the tokenizer's EOS."""
    validation_fraction: float = 0.05
    """Share of documents held out for validation, by hash of their ids, in [0, 1)."""
    cache: str = ""
    """Folder for token stores; empty: below $ARMILLARY_CACHE or ~/.cache/armillary."""
    workers: int = 0
    """Processes that read and tokenise; 0 is one for each core."""
    prefetch: int = 2
    """Batches prepared ahead of the step; 0 prepares each when it is needed."""
    shuffle: bool = True
    """Whether samples come in a random order that the seed decides."""

    def held_out_names(self) -> list[str]:
        """One set, or for a mixture one for each part; none where nothing is held out.

        Raises:
            UserError: see `corpus_parts`.
        """
        if self.validation_fraction == 0:
            return []
        parts = len(corpus_parts(self.corpus))
        return ["validation"] if parts == 1 else [f"validation-{part}" for part in range(parts)]

    def problems(self) -> list[Problem]:
        """What is wrong with the values themselves; looks for no file."""
        found = []
        if not 0 <= self.validation_fraction < 1:
            found.append(
                Problem(
                    f"data.validation_fraction = {self.validation_fraction}",
                    "0 (no validation) up to, not including, 1",
                    "--data.validation-fraction 0.05",
                )
            )
        found += [
            Problem(f"data.{name} = {value}", "0 or more")
            for name, value in (("workers", self.workers), ("prefetch", self.prefetch))
            if value < 0
        ]
        if self.corpus.holds_tokens() and self.tokenizer.text_needed():
            found.append(
                Problem(
                    f"data.tokenizer {name_of(type(self.tokenizer))} learns from text, and "
                    f"data.corpus {name_of(type(self.corpus))} holds tokens",
                    "the tokenizer that they were made with",
                    "--data.tokenizer file --data.tokenizer.path tokenizer.json",
                )
            )
        found += self.corpus.problems() + self.tokenizer.problems()
        return found + self.packing.problems()
