"""A copy of the state in host memory, made while training goes on.

`Stager.stage` returns at once. Forward and backward passes only read weights and optimizer state,
so they may run while the copy is made; whoever changes them first calls `Staging.wait`. What lies
in host memory is looked through and copied by the thread that writes the checkpoint, as soon as it
asks for `pieces`, or by the one that waits, if that comes first. What lies on a CUDA device is
copied by a stream of its own into pinned memory, and `wait` makes the stream of training wait for
it, not the host.

Buffers are kept from save to save: memory is taken once, and pinning it, which is slow, is done
once.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from armillary.checkpoint.tensors.pieces import Piece, digest

Key = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]


class Staging:
    """One copy, perhaps still to be made. Made by `Stager`."""

    def __init__(self, sources: Iterable[Piece], stager: Stager) -> None:
        self._here = sources
        self._stager = stager
        self._lock = threading.Lock()
        self._copies: list[Piece] = []
        self._failure: Exception | None = None
        self._copied: list[torch.cuda.Event] = []
        is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_in_use:  # else nothing lies there, and looking can wait
            self._copy_from_device()

    def wait(self) -> None:
        """After this, the tensors may be changed. Never raises: `pieces` tells what went wrong."""
        self._copy_here()
        for event in self._copied:
            torch.cuda.current_stream().wait_event(event)

    @property
    def pieces(self) -> list[Piece]:
        """The copies, for any thread; waits until they are made.

        Raises:
            Exception: they could not be made, for lack of memory perhaps.
        """
        self._copy_here()
        if self._failure is not None:
            raise self._failure
        for event in self._copied:
            event.synchronize()
        return self._copies

    def digest(self) -> str:
        """SHA-256 of the copies; that of the tensors when they were staged."""
        return digest(self.pieces)

    def release(self) -> None:
        """Gives the buffers back, for the next copy; this one is no longer to be read."""
        with self._lock:
            if self._copies:
                self._stager._take_back(self._copies)
            self._copies, self._here = [], ()

    def _copy_here(self) -> None:
        """Copies what is left to copy; a second thread waits for the first."""
        with self._lock:
            left, self._here = self._here, ()
            try:
                for piece in left:
                    self._buffer(piece).copy_(piece.data)
            except Exception as error:
                self._failure = error

    def _copy_from_device(self) -> None:
        """What lies on the device; what does not is left to copy."""
        try:
            pieces = list(self._here)
            self._here = [piece for piece in pieces if not piece.data.is_cuda]
            if on_device := [piece for piece in pieces if piece.data.is_cuda]:
                self._queue_copies(on_device)
        except Exception as error:
            self._failure, self._here = error, ()

    def _queue_copies(self, pieces: Sequence[Piece]) -> None:
        """Queues the copies behind what training has queued so far, beside what it queues next."""
        stream = self._stager.stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for piece in pieces:
                self._buffer(piece).copy_(piece.data, non_blocking=True)
                piece.data.record_stream(stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._copied.append(event)

    def _buffer(self, piece: Piece) -> Tensor:
        buffer = self._stager._buffer_for(piece)
        self._copies.append(dataclasses.replace(piece, data=buffer))
        return buffer


class Stager:
    """Makes copies, and keeps their memory for the next one. Used by one thread."""

    def __init__(self) -> None:
        self._spare: dict[Key, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def stage(self, pieces: Iterable[Piece]) -> Staging:
        """Begins a copy of pieces, which may be found out by another thread.

        A copy before it that was not released yet keeps its memory, so there are two then.
        """
        return Staging(pieces, self)

    def stream(self) -> torch.cuda.Stream:
        """The one that copies from the device, beside that of training."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._stream

    def _buffer_for(self, piece: Piece) -> Tensor:
        spare = self._spare.pop(_key(piece), None)
        if spare is not None:
            return spare
        return torch.empty(
            piece.data.shape, dtype=piece.data.dtype, device="cpu", pin_memory=piece.data.is_cuda
        )

    def _take_back(self, copies: Sequence[Piece]) -> None:
        # Only these: buffers of tensors that are gone are not kept.
        self._spare = {_key(copy): copy.data for copy in copies}


def _key(piece: Piece) -> Key:
    return piece.name, piece.offset, tuple(piece.data.shape), piece.data.dtype
