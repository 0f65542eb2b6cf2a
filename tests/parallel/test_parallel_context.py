"""Context parallelism in every way, on 2 and 4 ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from context_cases import (
    LENGTH,
    LONG,
    LONG_WINDOW,
    ONE_OF_EACH,
    WAYS,
    everything,
    long_inputs,
    long_rows,
    packed_batch,
    relative,
)
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.kernels import partial_attention
from armillary.parallel import Parallel
from armillary.parallel.context.balance import indices_by_rank
from armillary.parallel.context.batches import shard_batch
from armillary.parallel.mesh import Mesh
from ranks import run_ranks

Outcome = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4], ids=["cp2", "cp4"])
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """What each rank found."""
    ranks: int = request.param
    return run_ranks(everything, ranks, ranks, compiled=ranks == 2)


def _worst(outcome: Outcome, what: str) -> dict[str, float]:
    return {case: max(rank[what][case] for rank in outcome) for case in outcome[0][what]}


def test_attention_and_its_gradients_are_those_of_one_process(outcome: Outcome) -> None:
    worst = _worst(outcome, "attention")
    assert max(worst.values()) < 2e-6, worst


def test_loss_and_gradients_of_a_decoder_are_those_of_one_process(outcome: Outcome) -> None:
    worst = _worst(outcome, "decoder")
    assert len(worst) == len(WAYS) + len(ONE_OF_EACH)
    assert max(worst.values()) < 1e-5, worst


def test_bfloat16_errs_as_little_as_eager_torch_does(outcome: Outcome) -> None:
    worst = _worst(outcome, "low precision")
    # The ring knows the sum of a row's gradients only from an out that was rounded.
    limits = {case: 1.5 if case.startswith("ring") else 1.05 for case in worst}
    assert all(worst[case] < limit for case, limit in limits.items()), worst


def test_flex_attention_sees_the_same_keys(outcome: Outcome) -> None:
    worst = _worst(outcome, "fused")
    assert max(worst.values()) < 2e-6, worst


def test_other_documents_change_no_bit(outcome: Outcome) -> None:
    assert not any(leak for rank in outcome for leak in rank["leaks"].values())


def test_whole_rows_and_cached_rows_are_computed_as_before(outcome: Outcome) -> None:
    assert all(same for rank in outcome for same in rank["whole rows"].values())


def test_ranks_share_every_token_with_its_label_and_position_once(outcome: Outcome) -> None:
    whole = packed_batch()
    for number, _ in enumerate(WAYS):
        parts = [rank["shards"][number] for rank in outcome]
        order = torch.cat([part.documents.indices for part in parts])
        assert order.sort().values.tolist() == list(range(LENGTH))
        for take in (
            lambda batch: batch.tokens,
            lambda batch: batch.labels,
            lambda batch: batch.documents.positions,
            lambda batch: batch.documents.starts,
        ):
            assert torch.equal(torch.cat([take(p) for p in parts], dim=1), take(whole)[:, order])


def test_rows_of_32768_tokens_are_computed_without_whole_scores() -> None:
    query, key, value, grad = long_inputs()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    index = torch.arange(LONG)
    starts = (index - LONG_WINDOW + 1).clamp(min=0)[None]
    out, _ = partial_attention(*leaves, index, index, starts=starts)
    truth = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    scores_mebibytes = (
        4 * LONG // 4 * LONG * 4 / 2**20
    )  # of one rank: 4 heads, a quarter of queries
    for way in ONE_OF_EACH:
        for results, indices, grown in run_ranks(long_rows, 4, 4, way):
            assert grown < scores_mebibytes / 8
            worst = max(relative(x, t[:, :, indices]) for x, t in zip(results, truth, strict=True))
            assert worst < 1e-5, (way, worst)


def test_head_and_tail_give_every_rank_as_many_keys() -> None:
    balanced = indices_by_rank(64, 4, head_tail=True)
    assert len(set((balanced + 1).sum(1).tolist())) == 1
    assert (balanced.diff(dim=1) > 0).all()
    assert indices_by_rank(64, 4, head_tail=False).flatten().tolist() == list(range(64))


def test_one_rank_keeps_its_batch() -> None:
    batch = packed_batch()
    assert shard_batch(batch, Mesh.create(Parallel(), torch.device("cpu"))) is batch


class _NoCopies(TorchDispatchMode):
    """Refuses copies between devices: one from the host would wait for all that the other does."""

    def __torch_dispatch__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is not torch.ops.aten._to_copy.default
        return function(*args, **kwargs or {})


def test_the_places_of_tokens_are_made_where_the_tokens_are() -> None:
    batch, mesh = packed_batch().to("meta"), Mesh.imagined(Parallel(cp=2), 2, 1)
    with _NoCopies():
        part = shard_batch(batch, mesh)
    assert part.tokens.is_meta and part.tokens.shape[1] * 2 == batch.tokens.shape[1]
