"""The tokens of a batch that this rank computes."""

from __future__ import annotations

from armillary.data.batch import Batch
from armillary.parallel.context.balance import head_tail, indices_by_rank
from armillary.parallel.mesh import Mesh


def shard_batch(batch: Batch, mesh: Mesh) -> Batch:
    """The part of each row that this rank of `cp` holds, with the places its tokens come from.

    Labels were made from whole rows, so the last token of a part has its label too. Rows divide by
    the ranks, and by twice as many where each takes head and tail.
    """
    ranks = mesh.degree("cp")
    if ranks == 1:
        return batch
    length = batch.tokens.shape[1]
    # Made on the device: a copy from the host would wait for all that the device has to do.
    device, balanced = batch.tokens.device, head_tail(mesh.parallel)
    by_rank = indices_by_rank(length, ranks, head_tail=balanced, device=device)
    indices = by_rank[mesh.coordinate("cp")]
    return Batch(
        tokens=batch.tokens[:, indices],
        labels=batch.labels[:, indices],
        documents=batch.documents.select(indices),
        sample_ids=batch.sample_ids,
    )
