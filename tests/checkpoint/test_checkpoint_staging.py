"""A copy of the state that is exact while training goes on, and whose memory is taken once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from armillary.checkpoint.staging import Stager
from armillary.checkpoint.state import gather_state
from armillary.checkpoint.tensors import Piece, digest, flatten, pieces_of


class Held:
    """A stager whose copies wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.stager = Stager()
        buffer_for = self.stager._buffer_for

        def wait(piece: Piece) -> Tensor:
            assert self.go.wait(60)
            return buffer_for(piece)

        monkeypatch.setattr(self.stager, "_buffer_for", wait)


def test_passes_go_on_during_the_copy_and_the_update_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def passes() -> None:
        optimizer.zero_grad()
        model(torch.ones(8)).sum().backward()

    passes(), optimizer.step()
    held = Held(monkeypatch)
    pieces = pieces_of(flatten(gather_state(model, [optimizer])))
    before = digest(pieces)
    staging = held.stager.stage(pieces)
    writer = threading.Thread(target=lambda: staging.pieces)
    writer.start()
    passes()  # nothing is copied yet, and the weights are only read
    done = threading.Event()

    def update() -> None:
        staging.wait()
        optimizer.step()
        done.set()

    training = threading.Thread(target=update)
    training.start()
    assert not done.wait(0.2), "the update did not wait for the copy"
    held.go.set()
    training.join(), writer.join()
    assert staging.digest() == before
    assert digest(pieces) != before
    passes(), optimizer.step()
    assert staging.digest() == before


def test_memory_is_taken_once_and_what_is_gone_is_given_back() -> None:
    tensors = {"a": torch.ones(5, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    stager = Stager()
    addresses = []
    for number in range(3):
        tensors["a"].fill_(number)
        staging = stager.stage(pieces_of(tensors))
        assert staging.digest() == digest(pieces_of(tensors))
        addresses.append([piece.data.data_ptr() for piece in staging.pieces])
        staging.release()
    assert addresses[0] == addresses[1] == addresses[2]
    stager.stage(pieces_of(tensors)).release()  # given up before it was made
    assert len(stager._spare) == 2
    last = stager.stage(pieces_of({"b": tensors["b"]}))
    last.wait(), last.release()
    assert [key[0] for key in stager._spare] == ["b"]


def test_a_copy_that_is_still_read_keeps_its_memory() -> None:
    tensors = {"a": torch.ones(5)}
    stager = Stager()
    first = stager.stage(pieces_of(tensors))
    first.wait()
    tensors["a"].fill_(2)
    second = stager.stage(pieces_of(tensors))
    second.wait()
    assert first.pieces[0].data.tolist() == [1.0] * 5
    assert second.pieces[0].data.tolist() == [2.0] * 5
    second.release(), first.release()
    assert len(stager._spare) == 1


def test_a_copy_that_fails_does_not_stop_training_and_tells_who_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stager = Stager()

    def no_memory(piece: Piece) -> Tensor:
        raise MemoryError("no room for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(stager, "_buffer_for", no_memory)
        staging = stager.stage(pieces_of({"a": torch.ones(5)}))
        staging.wait()
        with pytest.raises(MemoryError, match="no room for a copy"):
            _ = staging.pieces
        staging.release()
    again = stager.stage(pieces_of({"a": torch.ones(5)}))
    assert again.pieces[0].data.tolist() == [1.0] * 5
