"""A batch keeps tokens, labels, documents and ids together."""

import torch

from armillary.data.batch import Batch
from armillary.models.layers.documents import Documents

LENGTHS = ((3, 2), (5,), (1, 1, 3), (4, 1), (2, 3))


def batch_of(rows: int) -> Batch:
    tokens = torch.arange(rows * 5).reshape(rows, 5)
    return Batch(tokens, tokens + 1, Documents.from_lengths(LENGTHS[:rows]), tuple(range(rows)))


def test_splitting_keeps_all_rows_in_order_and_their_documents() -> None:
    batch = batch_of(5)
    parts = batch.split(2)
    assert [part.sample_ids for part in parts] == [(0, 1), (2, 3), (4,)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    for part, begin in zip(parts, (0, 2, 4), strict=True):
        alone = Documents.from_lengths(LENGTHS[begin : begin + 2])
        assert part.documents.lengths == alone.lengths
        assert torch.equal(part.documents.positions, alone.positions)
        assert torch.equal(part.documents.starts, alone.starts)


def test_moving_to_a_device_moves_every_tensor() -> None:
    moved = batch_of(2).to("meta")
    tensors = (moved.tokens, moved.labels, moved.documents.positions, moved.documents.starts)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.sample_ids == (0, 1)
