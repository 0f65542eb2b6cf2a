"""A few steps of a tiny model on any mesh, for comparison of pipelines with one process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from armillary.data.batch import Batch
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.models.llama.config import Llama
from armillary.parallel import Scale, process
from armillary.parallel.gradients import norms_by_name, scale_and_clip
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import LOSS_AXES, ParallelModel
from armillary.parallel.parallelize import parallelize
from armillary.precision import Precision
from armillary.tasks.next_token import NextToken

ROWS, LENGTH, VOCABULARY, LAYERS, STEPS = 8, 16, 67, 8, 3
TASK = NextToken(chunk_tokens=5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run varies."""

    scale: Scale = field(default_factory=lambda: Scale(precision=Precision(compute="float32")))
    microbatches: int = 1
    tied: bool = False


@dataclass(frozen=True)
class Trace:
    """What must not depend on the mesh."""

    initial: dict[str, str]
    """Digest of each whole parameter that this rank has a part of."""
    numbers: dict[str, float]
    """Losses and norms, by what they are of."""
    logits: list[Tensor]
    """Of a prompt, and of the tokens after it."""
    final: dict[str, str]
    """Digests after the last step, of every copy of a parameter."""


def traces(cases: list[Case]) -> list[Trace]:
    """The cases in turn, in this process or over the ranks of its group."""
    return [_trace(case) for case in cases]


def tiny(*, tied: bool = False, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> nn.Module:
    """A decoder on `meta`."""
    config = Llama(
        vocab_size=vocabulary,
        dim=16,
        n_layers=layers,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=24,
        max_seq_len=64,
        tied_embeddings=tied,
    )
    with torch.device("meta"):
        return config.build()


def _trace(case: Case) -> Trace:
    mesh = Mesh.create(case.scale.parallel, process.choose_device("cpu"))
    model = parallelize(tiny(tied=case.tied), mesh, case.scale)
    materialise(model, mesh.device, seed=3)
    initial = _digests(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    numbers: dict[str, float] = {}
    for step in range(STEPS):
        batch = _batch(ROWS, step)
        weight = float(TASK.weight(batch))
        (own,) = _shares(batch, mesh.data_size)[mesh.data_rank : mesh.data_rank + 1]
        loss = model.forward_backward(TASK, _shares(own, case.microbatches))
        numbers[f"loss {step}"] = float(mesh.sum_over(loss, LOSS_AXES))
        numbers |= {f"{name} {step}": norm for name, norm in norms_by_name(model).items()}
        numbers[f"norm {step}"] = float(scale_and_clip(model, weight, max_norm=1.0))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # validation between steps, of rows that no number of microbatches divides
            validated = model.evaluate(TASK, _batch(3, 9))
            axes = [axis for axis in LOSS_AXES if axis in ("pp", "cp")]
            numbers["validation"] = float(mesh.sum_over(validated, axes))
    cache, prompt = KeyValueCache(capacity=10), _batch(2, 5).tokens
    logits = [model(prompt[:, :6], cache=cache)]
    logits += [model(prompt[:, 6 + new : 7 + new], cache=cache) for new in range(3)]
    return Trace(initial, numbers, logits, _digests(model))


def _digests(model: ParallelModel) -> dict[str, str]:
    found = {}
    for part in model.parts:
        for name, parameter in part.named_parameters():
            whole = model.gather(model.layouts.canonical(name), parameter.detach())
            found[name] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
    return found


def _batch(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    for row in range(rows):
        labels[row, LENGTH - (row + seed) % 7 :] = -100
    first = [3 + (row + seed) % 5 for row in range(rows)]
    documents = Documents.from_lengths([(length, LENGTH - length) for length in first])
    return Batch(tokens=tokens, labels=labels, documents=documents, sample_ids=tuple(range(rows)))


def _shares(batch: Batch, parts: int) -> list[Batch]:
    rows = batch.tokens.shape[0] // parts
    cuts = [slice(part * rows, (part + 1) * rows) for part in range(parts)]
    return [
        Batch(
            tokens=batch.tokens[cut],
            labels=batch.labels[cut],
            documents=Documents.from_lengths(batch.documents.lengths[cut]),
            sample_ids=batch.sample_ids[cut],
        )
        for cut in cuts
    ]
