"""A checkpoint of ours as a folder that other tools load."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from armillary.checkpoint.hugging_face.families import Family, family_for
from armillary.checkpoint.hugging_face.source import Source, Sources
from armillary.checkpoint.hugging_face.table import (
    Difference,
    shapes_of,
    to_theirs,
)
from armillary.checkpoint.hugging_face.tokenizer import (
    export_tokenizer,
    require_rows,
    special_ids,
    write_json,
)
from armillary.checkpoint.hugging_face.views import Cast, Resized
from armillary.checkpoint.hugging_face.weights import our_shapes
from armillary.checkpoint.hugging_face.writing import DTYPES, Advance, bytes_of, write_shards
from armillary.checkpoint.places.place import unique
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.files import make_folder, sync_folder
from armillary.models.config import ModelConfig
from armillary.models.dense import DenseDecoder

SHARD_BYTES = 5 * 10**9
"""Of values in one file, as others write them."""

_PARTIAL = ".partial"
"""What the names of folders end with that are being written."""

_KEPT_WIDE = ("e_score_correction_bias",)
"""Endings of names that stay float32: they choose experts by differences below a bfloat16's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    tensors: int
    bytes: int
    """Of all tensors."""
    files: tuple[str, ...]
    has_tokenizer: bool
    left_out: str = ""
    """For people: what is not in it, see `Plan.left_out`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A model as it will be written; nothing of it was read so far."""

    family: Family
    config: dict[str, Any]
    """Its config.json."""
    tensors: Sources
    """By their names in the files."""
    left_out: tuple[str, ...] = ()
    """Names of ours that are not written, as other tools would warn of them."""
    bos: bool = False
    """Other tools are to begin a plain text with BOS."""
    turn_ends: Collection[int] = ()
    """Tokens after which an answer is over."""

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(map(bytes_of, self.tensors.values()))


def plan_export(
    model: ModelConfig,
    sources: Sources,
    *,
    dtype: str = "",
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    extra_layer: bool = False,
    bos: bool = False,
    turn_ends: Collection[int] = (),
) -> Plan:
    """Says what would be written.

    Args:
        model: of the sources.
        sources: weights of the plain model, by our names.
        dtype: of the weights; empty: as the sources have them.
        vocab_size: rows of embedding and head, fewer or more than the model's; None: the model's.
        tokenizer: the run's tokenizer, whose special tokens config.json names.
        extra_layer: write also what other tools warn of; see `Family.loadable`.
        bos: other tools are to begin a plain text with BOS.
        turn_ends: tokens after which an answer is over; other tools stop at them as at EOS.

    Raises:
        UserError: the model has no counterpart, the sources are not of this model, or the
            tokenizer has more tokens than rows were asked for.
    """
    family = family_for(model)
    assert isinstance(model, family.config)
    lines = Difference.between(our_shapes(model), shapes_of(sources)).lines()
    if lines:
        raise UserError([Problem(f"the checkpoint {line}") for line in lines])
    written: DenseDecoder = model if extra_layer else family.loadable(model)
    ours = {name: sources[name] for name in our_shapes(written)}
    left_out = tuple(name for name in sources if name not in ours)
    if vocab_size is not None and vocab_size != written.vocab_size:
        require_rows(vocab_size, tokenizer, "--vocab-size")
        for name in ("embedding.weight", "head.weight"):
            if name in ours:
                ours[name] = Resized(ours[name], vocab_size)
        written = replace(written, vocab_size=vocab_size)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.write(written),
        **(special_ids(tokenizer, turn_ends) if tokenizer is not None else {}),
    }
    theirs = to_theirs(family.rules(written, config), ours)
    if dtype:
        theirs = {name: _cast(name, source, DTYPES[dtype]) for name, source in theirs.items()}
    config["dtype"] = str(_main_dtype(theirs)).removeprefix("torch.")
    config["torch_dtype"] = config["dtype"]  # what older readers look for
    return Plan(
        family=family,
        config=config,
        tensors=theirs,
        left_out=left_out,
        bos=bos,
        turn_ends=turn_ends,
    )


def _cast(name: str, source: Source, dtype: torch.dtype) -> Source:
    wanted = torch.float32 if name.endswith(_KEPT_WIDE) else dtype
    return source if source.dtype == wanted else Cast(source, wanted)


def _main_dtype(tensors: Sources) -> torch.dtype:
    """That of the embedding, as of nearly all."""
    return tensors["model.embed_tokens.weight"].dtype


def write_export(
    plan: Plan,
    target: Path,
    *,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = lambda count: None,
) -> Exported:
    """Writes a folder under a name that nobody looks for, and gives it its own at the end.

    Args:
        plan: what to write.
        target: the folder to be; it is not there, or empty.
        tokenizer: the run's tokenizer, if it has one.
        shard_bytes: see `write_shards`.
        advance: see `Advance`; may raise to leave.

    Raises:
        UserError: the target is there already.
        OSError: it could not be written, or a source not be read; nothing of it is left.
    """
    target = target.resolve()  # without . and .., whose names are no names
    require_free(target)
    make_folder(target.parent)
    draft = target.with_name(f".{target.name}.{unique()}{_PARTIAL}")
    draft.mkdir()
    try:
        has_tokenizer = tokenizer is not None and export_tokenizer(
            tokenizer,
            draft,
            max_seq_len=plan.config["max_position_embeddings"],
            bos=plan.bos,
            turn_ends=plan.turn_ends,
        )
        write_shards(draft, plan.tensors, shard_bytes, advance)
        write_json(draft / "config.json", plan.config)
        if not (draft / "generation_config.json").is_file():
            write_json(draft / "generation_config.json", {})
        for path in draft.iterdir():
            _make_durable(path)
        sync_folder(draft)
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync_folder(target.parent)
    return Exported(
        folder=target,
        tensors=len(plan.tensors),
        bytes=plan.bytes,
        files=tuple(sorted(path.name for path in target.iterdir())),
        has_tokenizer=has_tokenizer,
        left_out=_in_words(plan.left_out),
    )


def _in_words(left_out: tuple[str, ...]) -> str:
    if not left_out:
        return ""
    return f"left out: {left_out[0]} and {len(left_out) - 1} more; --extra-layer writes them"


def clear_drafts(folder: Path) -> None:
    """Removes what dead writers have left beside exports; nobody else may be writing there."""
    for path in folder.glob(f".*{_PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def require_free(target: Path) -> None:
    """Refuses a folder that holds something.

    Raises:
        UserError: it does.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        message = f"{target} is there already"
        raise UserError(
            Problem(message, "a folder that is not there, or empty", "another --to DIR")
        )


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
