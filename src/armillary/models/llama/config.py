"""Llama 3, 3.1 and 3.2. (Grattafiori et al. 2024, arXiv 2407.21783, table 3)"""

from __future__ import annotations

from dataclasses import dataclass

from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError
from armillary.models.dense import DenseDecoder
from armillary.models.rope_scaling import Llama31RopeScaling
from armillary.models.sizes import Size, named


@component("llama")
@dataclass(frozen=True, kw_only=True, slots=True)
class Llama(DenseDecoder):
    """Llama 3: the plain dense decoder."""


LLAMA_SIZES = {
    #             D      L    H    K   P    F      tied
    "debug": Size(256, 8, 8, 4, 32, 768, False),
    "1B": Size(2048, 16, 32, 8, 64, 8192, True),
    "3B": Size(3072, 28, 24, 8, 128, 8192, True),
    "8B": Size(4096, 32, 32, 8, 128, 14336, False),
    "70B": Size(8192, 80, 64, 8, 128, 28672, False),
    "405B": Size(16384, 126, 128, 8, 128, 53248, False),
}
"""Sizes as published (the model cards' config.json), and a debug size of our own."""

LLAMA_RELEASES = {
    "3": ("debug", "8B", "70B"),
    "3.1": ("8B", "70B", "405B"),
    "3.2": ("1B", "3B"),
}
"""Which release published which sizes."""

_SCALING = {
    "3": None,
    "3.1": Llama31RopeScaling(factor=8.0),
    "3.2": Llama31RopeScaling(factor=32.0),
}
_VOCAB_SIZE = 128_256
_DEBUG_VOCAB_SIZE = 2048


def llama3(size: str, *, release: str | None = None) -> Llama:
    """A published size: "1B", "3B", "8B", "70B", "405B", or "debug".

    Args:
        size: name in `LLAMA_SIZES`.
        release: "3", "3.1" or "3.2", which differ in rotary scaling and context; None: the first
            release that has the size.

    Raises:
        UserError: no such size, or not in this release.
    """
    row = named("llama3", size, LLAMA_SIZES)
    having = [name for name, sizes in LLAMA_RELEASES.items() if size in sizes]
    if release is not None and release not in having:
        message = f"llama3 has no size {size!r} in release {release!r}"
        raise UserError(Problem(message, ", ".join(f"{size} in {name}" for name in having)))
    scaling = _SCALING[release or having[0]]
    return Llama(
        **row.fields(),
        vocab_size=_DEBUG_VOCAB_SIZE if size == "debug" else _VOCAB_SIZE,
        rope_scaling=scaling,
        max_seq_len=131_072 if scaling else 8192,
    )
