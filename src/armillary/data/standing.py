"""Where the corpora of a run stand when a stage of it begins.

A corpus that goes on with the same packing goes on where it was, so that no sample comes twice
before the corpus is through; any other begins with an order of its own. All of it follows from the
recipe and the positions at which stages began; there is no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from armillary.data.cache import digest_of
from armillary.data.mixture import Interleaving

if TYPE_CHECKING:
    from armillary.data.config import Data
    from armillary.data.token_store import TokenStore

_CORPUS_STRIDE = 0x632BE59BD9B4E019
_STAGE_STRIDE = 0xD1B54A32D192ED03
"""As the other, a large odd number: an order's seed is one modulo 2^64."""

_OF_PARTS = ("corpora", "masks", "chat_template")
"""What a store is made from that not all of its parts have in common."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a stage begins to read a corpus."""

    seed: int
    """Of the corpus's order, in which it stays for as long as it goes on."""
    position: int = 0
    """Samples of it that were read before; with those of whole epochs."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a run has come with its corpora when a stage begins. As it is, the first one."""

    stage: int = 0
    """Number of the stage that begins."""
    position: int = 0
    """Global position of its first sample."""
    read: Mapping[str, Start] = field(default_factory=dict)
    """By name, as `readings` gives it, where each corpus that was read would go on."""

    def starts(self, names: Sequence[str], seed: int) -> tuple[Start, ...]:
        """Where the stage begins to read the corpora of these names, by number of the corpus."""
        return tuple(
            self.read.get(name) or Start(order_seed(seed, corpus, self.stage))
            for corpus, name in enumerate(names)
        )

    def after(
        self, names: Sequence[str], seed: int, weights: Sequence[float], until: int
    ) -> Standing:
        """Where the next stage begins, once this one has read its corpora up to a position."""
        mixture = Interleaving(weights)
        read = dict(self.read)
        for corpus, (name, start) in enumerate(zip(names, self.starts(names, seed), strict=True)):
            more = mixture.count_before(until - self.position, corpus)
            read[name] = replace(start, position=start.position + more)
        return Standing(self.stage + 1, until, read)


def order_seed(seed: int, corpus: int, stage: int = 0) -> int:
    """Corpora of a mixture have orders of their own; the first keeps the run's seed."""
    return seed + corpus * _CORPUS_STRIDE + stage * _STAGE_STRIDE


def readings(store: TokenStore, data: Data, seq_len: int) -> tuple[str, ...]:
    """A name for each corpus as it is read: its documents, how they are tokenised and packed.

    Corpora of two stores have one name if and only if the samples of both are the same.
    """
    manifest = store.manifest
    made_from = manifest["made_from"]
    how = {name: value for name, value in made_from.items() if name not in _OF_PARTS}
    how["tokenizer"] = manifest["tokenizer"]["fingerprint"]
    masks = made_from.get("masks", [False] * len(manifest["parts"]))
    packing = [repr(data.packing), seq_len, data.shuffle]
    names: list[str] = []
    for part, masked in zip(manifest["parts"], masks, strict=True):
        template = made_from.get("chat_template") if masked else None
        digest = digest_of([part["fingerprint"], masked, template, how, packing])
        # A corpus that is there twice is two, each with an order of its own.
        names.append(f"{digest} {sum(name.startswith(digest) for name in names)}")
    return tuple(names)
