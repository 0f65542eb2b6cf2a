"""A batch keeps tokens, labels, documents and ids together."""

import pytest
import torch

from armillary.data.batch import Batch
from armillary.models.layers.documents import Documents, copied_to


def test_moving_to_a_device_moves_every_tensor() -> None:
    tokens = torch.arange(10).reshape(2, 5)
    batch = Batch(tokens, tokens + 1, Documents.from_lengths([(3, 2), (5,)]), (0, 1))
    moved = batch.to("meta")
    tensors = (moved.tokens, moved.labels, moved.documents.positions, moved.documents.starts)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.sample_ids == (0, 1)


def test_what_goes_to_a_gpu_is_pinned_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: done.append("pinned") or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, non_blocking: done.append((device, non_blocking))
    )
    for device in ("cuda:1", "cpu"):
        copied_to(torch.ones(1), device)
    assert done == ["pinned", ("cuda:1", True), ("cpu", True)]
