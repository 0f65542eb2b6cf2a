"""Embedding, logits and loss over shards of a vocabulary against the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensor_cases import relative
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.kernels import linear_cross_entropy
from armillary.models.layers.embedding import Embedding, Head
from armillary.parallel.collectives import all_reduce, group_name
from armillary.parallel.tensor.region import TensorRanks
from armillary.parallel.tensor.vocabulary import (
    split_embedding,
    split_head,
    vocabulary_cross_entropy,
    words_of,
)
from ranks import run_ranks

WIDTH, ROWS, LENGTH = 16, 2, 12
VOCABULARIES = (251, 64, 5, 3)
"""Uneven, even, and with shards without words."""


def ranks_here() -> TensorRanks:
    group = group_name(dist.group.WORLD)
    ranks = TensorRanks(group, dist.get_world_size(), dist.get_rank())
    ranks.begin(LENGTH, cached=False, training=True)
    assert ranks.sequence_split
    return ranks


def own_rows(whole: Tensor, ranks: TensorRanks) -> Tensor:
    words = words_of(ranks.rank, ranks.size, whole.shape[0])
    return whole[words.first : words.first + words.count].detach().clone().requires_grad_()


def case(vocabulary: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden, weight, tokens and labels, of which some are none."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = scale * torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    weight = torch.randn(vocabulary, WIDTH, generator=generator)
    tokens, labels = (
        torch.randint(vocabulary, (ROWS, LENGTH), generator=generator) for _ in range(2)
    )
    labels[0, :7] = -100  # a whole chunk, and part of one
    return hidden.requires_grad_(), weight.requires_grad_(), tokens, labels


def compare_all() -> dict[str, float]:
    torch.set_num_threads(1)
    worst: dict[str, float] = {}
    for vocabulary in VOCABULARIES:
        deviations = compare_head(vocabulary) | compare_loss(vocabulary)
        for kind, value in deviations.items():
            worst[kind] = max(worst.get(kind, 0.0), value)
        compare_embedding(vocabulary)
    hold_little()
    return worst


def compare_embedding(vocabulary: int) -> None:
    """Bit for bit, also in a format that could round a sum."""
    _, weight, tokens, _ = case(vocabulary)
    ranks = ranks_here()
    own = slice(ranks.rank * LENGTH // ranks.size, (ranks.rank + 1) * LENGTH // ranks.size)
    for dtype in (torch.float32, torch.bfloat16):
        embedding = Embedding(vocabulary, WIDTH, std=1.0)
        embedding.output_dtype = dtype
        embedding.weight = torch.nn.Parameter(weight.detach().clone())
        expected = embedding(tokens)
        factor = torch.arange(expected.numel(), dtype=dtype).view_as(expected) % 7
        (expected * factor).sum().backward()
        gradient = embedding.weight.grad
        assert gradient is not None
        embedding.weight = torch.nn.Parameter(own_rows(weight, ranks))
        split_embedding(embedding, ranks, vocabulary)
        found = embedding(tokens)
        assert torch.equal(found, expected[:, own])
        (found * factor[:, own]).sum().backward()
        assert embedding.weight.grad is not None, "an empty shard has a gradient too"
        assert torch.equal(embedding.weight.grad, own_rows(gradient, ranks))


def compare_head(vocabulary: int) -> dict[str, float]:
    """Through the module, from shares of hidden: logits, loss and their gradients."""
    deviations: dict[str, float] = {}
    ranks = ranks_here()
    for kind in ("loss", "logits"):
        hidden, weight, _, labels = case(vocabulary)
        head = Head(WIDTH, vocabulary, std=1.0)
        head.weight = torch.nn.Parameter(weight.detach().clone())
        expected = result(head, kind, hidden, labels)
        expected.sum().backward()
        assert head.weight.grad is not None and hidden.grad is not None
        whole_gradient, hidden_gradient = head.weight.grad, hidden.grad
        head.weight = torch.nn.Parameter(own_rows(weight, ranks))
        split_head(head, ranks, vocabulary)
        share = hidden.detach().chunk(ranks.size, 1)[ranks.rank].requires_grad_()
        ours = result(head, kind, share, labels)
        ours.sum().backward()
        assert head.weight.grad is not None and share.grad is not None
        deviations |= {
            kind: relative(ours.detach(), expected.detach()),
            f"{kind}: weight": relative_to(head.weight.grad, own_rows(whole_gradient, ranks)),
            f"{kind}: hidden": relative(
                share.grad, hidden_gradient.chunk(ranks.size, 1)[ranks.rank]
            ),
        }
    return deviations


def result(head: Head, kind: str, hidden: Tensor, labels: Tensor) -> Tensor:
    if kind == "loss":
        return head.cross_entropy(hidden, labels, chunk_tokens=5, ignore_index=-100)
    return head(hidden).square()


def relative_to(ours: Tensor, theirs: Tensor) -> float:
    """Of tensors that may be empty."""
    assert ours.shape == theirs.shape
    return relative(ours, theirs.detach()) if ours.numel() else 0.0


def compare_loss(vocabulary: int) -> dict[str, float]:
    """Logits of thousands, whose exponentials no format holds; and bfloat16."""
    ranks = ranks_here()
    assert ranks.group is not None
    deviations: dict[str, float] = {}
    for dtype, scale in ((torch.float32, 1e3), (torch.bfloat16, 1.0)):
        hidden, weight, _, labels = case(vocabulary, scale)
        flat = hidden.detach().flatten(0, 1).to(dtype).requires_grad_()
        expected = linear_cross_entropy(flat, weight, labels.flatten(), chunk_tokens=5)
        (3 * expected).backward()
        own, part = own_rows(weight, ranks), flat.detach().clone().requires_grad_()
        ours = vocabulary_cross_entropy(
            part,
            own,
            labels.flatten(),
            words=words_of(ranks.rank, ranks.size, vocabulary),
            group=ranks.group,
            chunk_tokens=5,
        )
        (3 * ours).backward()
        assert torch.isfinite(ours) and part.grad is not None and flat.grad is not None
        assert part.grad.dtype == dtype and own.grad is not None and weight.grad is not None
        kind = str(dtype).removeprefix("torch.")
        summed = all_reduce(part.grad.float(), ranks.group)
        deviations |= {
            f"{kind} loss": relative(ours.detach(), expected.detach()),
            f"{kind} hidden": relative(summed, flat.grad),
            f"{kind} weight": relative_to(own.grad, own_rows(weight.grad, ranks)),
        }
    return deviations


@contextmanager
def largest() -> Iterator[dict[str, int]]:
    """The largest result of any operator inside."""
    found = {"elements": 0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    found["elements"] = max(found["elements"], tensor.numel())
            return out

    with Watch():
        yield found


def hold_little() -> None:
    """At no time does a rank hold more logits than those of a chunk and its own words."""
    ranks = ranks_here()
    tokens, width, vocabulary, chunk = 96, 4, 64 * ranks.size, 8
    hidden = torch.ones(tokens, width, requires_grad=True)
    weight = torch.ones(64, width, requires_grad=True)
    labels = torch.arange(tokens) % vocabulary
    assert ranks.group is not None
    with largest() as found:
        words = words_of(ranks.rank, ranks.size, vocabulary)
        vocabulary_cross_entropy(
            hidden, weight, labels, words=words, group=ranks.group, chunk_tokens=chunk
        ).backward()
    assert found["elements"] == max(chunk * 64, tokens * width)


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_vocabulary_gives_the_results_of_one_process(world_size: int) -> None:
    for worst in run_ranks(compare_all, world_size):
        print(worst)
        # Another order of sums, in the format of hidden.
        assert max(v for k, v in worst.items() if not k.startswith("bfloat16")) <= 2e-6, worst
        assert worst["bfloat16 loss"] <= 1e-6
        assert max(worst["bfloat16 hidden"], worst["bfloat16 weight"]) <= 2**-7


def test_words_are_dealt_as_chunks() -> None:
    for vocabulary in VOCABULARIES:
        for ranks in (2, 4, 8):
            dealt = [words_of(rank, ranks, vocabulary) for rank in range(ranks)]
            chunks = [len(chunk) for chunk in torch.arange(vocabulary).chunk(ranks)]
            chunks += [0] * (ranks - len(chunks))
            assert [words.count for words in dealt] == chunks
            assert [words.first for words in dealt] == [sum(chunks[:n]) for n in range(ranks)]
