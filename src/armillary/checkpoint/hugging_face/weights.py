"""Weights from anywhere, as sources by our names: what training starts from, and what is exported.

An address is `hf:OWNER/NAME`, a folder of Hugging Face format, or a run or checkpoint of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from armillary.checkpoint.find import Found, find_checkpoint, open_checkpoints
from armillary.checkpoint.hugging_face.facts import Facts
from armillary.checkpoint.hugging_face.families import Family, family_of
from armillary.checkpoint.hugging_face.files import (
    Config,
    config_of,
    is_weights_folder,
    open_folder,
)
from armillary.checkpoint.hugging_face.hub import folder_of, is_hub
from armillary.checkpoint.hugging_face.own import checkpoint_sources
from armillary.checkpoint.hugging_face.source import Sources, Tally
from armillary.checkpoint.hugging_face.table import (
    Difference,
    shapes_of,
    their_shapes,
    to_ours,
)
from armillary.checkpoint.hugging_face.views import Resized
from armillary.checkpoint.places.open import is_remote
from armillary.foundation.component import name_of
from armillary.foundation.errors import Problem, UserError
from armillary.models.config import ModelConfig
from armillary.models.dense import DenseDecoder

_VOCABULARY = ("embedding.weight", "head.weight")
_NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A folder of Hugging Face format, read as far as its config.json."""

    address: str
    folder: Path
    family: Family
    config: Config
    model: DenseDecoder
    """As config.json has it."""
    ignored: tuple[str, ...]
    """Keys of config.json that were not read and may mean something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights that can be read by our names."""

    address: str
    sources: Sources
    tally: Tally
    """What was read of them so far."""
    left_out: tuple[str, ...] = ()
    """Tensors there that are not read, with the reason, for people."""
    raw: Sources | None = None
    """The tensors as they lie there, by their own names, where they are of Hugging Face format."""
    foreign: Foreign | None = None
    """Their folder, the same."""
    found: Found | None = None
    """The checkpoint, where it is one of ours."""


def open_foreign(address: str) -> Foreign:
    """Reads config.json.

    Raises:
        UserError: no such folder, no config.json, an unknown family, or a variant that is not ours.
    """
    folder = folder_of(address)
    config = config_of(folder)
    family = family_of(config)
    facts = Facts(config)
    facts.quantised(family.quantised)
    model = family.read(facts)
    facts.tokens_within(model.vocab_size)
    ignored = tuple(facts.finish())
    return Foreign(
        address=address, folder=folder, family=family, config=config, model=model, ignored=ignored
    )


def foreign_weights(foreign: Foreign, model: ModelConfig) -> Weights:
    """The tensors of a folder by our names, for a model that may have another vocabulary size.

    Raises:
        UserError: tensors are missing, have no place, or have other shapes or are no plain numbers;
            with all their names.
    """
    tally = Tally()
    raw = open_folder(foreign.folder, tally)
    family = foreign.family
    if type(model) is not family.config:
        kind = name_of(family.config)
        message = f"{foreign.address} holds a {kind}, and the model is a {name_of(type(model))}"
        raise UserError(Problem(message, kind, f"--model {kind}"))
    assert isinstance(model, DenseDecoder)
    theirs = family.unpack(raw, foreign.config)
    there = replace(model, vocab_size=foreign.model.vocab_size)
    rules = family.rules(there, foreign.config)
    wanted = their_shapes(rules, our_shapes(there))
    left_out = {}
    for name in theirs.keys() - wanted.keys():
        reason = family.left_out(name, there) or _tied_copy(name, there)
        if reason is not None:
            left_out[name] = reason
    found = {name: s for name, s in shapes_of(theirs).items() if name not in left_out}
    if lines := Difference.between(wanted, found).lines():
        fix = "--model.LEAF VALUE, so that the model is the one that was written"
        raise UserError([Problem(f"{foreign.address} {line}", None, fix) for line in lines])
    _require_numbers(foreign.address, {name: theirs[name] for name in wanted})
    ours = to_ours(rules, theirs)
    if model.vocab_size != there.vocab_size:
        for name in _VOCABULARY:
            if name in ours:
                ours[name] = Resized(ours[name], model.vocab_size)
    return Weights(
        address=foreign.address,
        sources=ours,
        tally=tally,
        left_out=_grouped(left_out),
        raw=raw,
        foreign=foreign,
    )


def _require_numbers(address: str, tensors: Sources) -> None:
    """Refuses values that stand for others, and whose factors are not there or not known."""
    odd = {name: source.dtype for name, source in tensors.items() if source.dtype not in _NUMBERS}
    if odd:
        name, dtype = next(iter(odd.items()))
        message = f"{address} holds quantised values ({len(odd)}): {name} is {dtype}"
        allowed = (
            "bfloat16, float16, float32; DeepSeek-V3's float8 with its factors, GPT-OSS's MXFP4"
        )
        raise UserError(Problem(message, allowed, "fetch the model's unquantised weights"))


def our_shapes(model: DenseDecoder) -> dict[str, tuple[int, ...]]:
    """Of all parameters and persistent buffers, tied ones once."""
    with torch.device("meta"):
        built = model.build()
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, tensor in built.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name] = tuple(tensor.shape)
    return shapes


def _tied_copy(name: str, model: DenseDecoder) -> str | None:
    is_copy = model.tied_embeddings and name == "lm_head.weight"
    return "is tied to the embedding" if is_copy else None


def _grouped(left_out: dict[str, str]) -> tuple[str, ...]:
    """One line a reason, with the number of tensors and the first of them."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(left_out.items()):
        by_reason.setdefault(reason, []).append(name)
    return tuple(
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in by_reason.items()
    )


def is_foreign(address: str) -> bool:
    """Whether an address is of Hugging Face format, rather than of a run of ours."""
    if is_hub(address):
        return True
    return not is_remote(address) and is_weights_folder(Path(address).expanduser())


def open_weights(address: str, model: ModelConfig) -> Weights:
    """Weights from anywhere, for a model.

    Raises:
        UserError: there are none, or they are of another model.
        RunError: they could not be read.
    """
    if is_foreign(address):
        return foreign_weights(open_foreign(address), model)
    place, name = open_checkpoints(address)
    asked = f"{place.address.rstrip('/')}/{name}" if name is not None else "auto"
    found = find_checkpoint(place, asked)
    if found is None:
        raise UserError(Problem(f"{address} has no checkpoint yet", "a run that has saved one"))
    return checkpoint_weights(found)


def checkpoint_weights(found: Found) -> Weights:
    """The weights in a checkpoint of ours; see `checkpoint_sources`."""
    tally = Tally()
    sources = checkpoint_sources(found, tally)
    return Weights(address=found.path, sources=sources, tally=tally, found=found)
