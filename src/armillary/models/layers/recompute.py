"""Telling a forward pass from its repetition under activation checkpointing.

What a forward pass counts must be counted once: a block that is run again in the backward pass, to
get back activations that were not kept, asks `recomputing()` and does not count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar, cast

_T = TypeVar("_T")
_state = threading.local()  # backward passes run in threads of their own, one for each device


def recomputing() -> bool:
    """Whether this forward pass repeats one that was already run, for its activations only."""
    return getattr(_state, "depth", 0) > 0


def once(compute: Callable[[], _T]) -> _T:
    """`compute()` in a forward pass; in its repetition, what that returned.

    For what must be agreed with other ranks or read from the device. Held until the backward pass.
    """
    keeper: Callable[[Callable[[], _T]], Any] = getattr(_state, "keeper", _call)
    return cast("_T", keeper(compute))


@contextmanager
def recomputation(kept: list[object] | None = None) -> Iterator[None]:
    """Marks all forward passes inside as repetitions of one whose results of `once` were `kept`."""
    results = iter(kept or ())
    depth = getattr(_state, "depth", 0)
    _state.depth = depth + 1
    try:
        with _keeper(lambda compute: next(results) if kept else compute()):
            yield
    finally:
        _state.depth = depth


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`: (of the forward, of its repetition)."""
    kept: list[object] = []

    def keep(compute: Callable[[], object]) -> object:
        kept.append(compute())
        return kept[-1]

    return _keeper(keep), _Recomputation(kept)


class _Recomputation(AbstractContextManager[None]):
    """`recomputation`, as often as asked for: a pipeline that computes the gradients of activations
    and of weights at different moments repeats the forward pass for each.
    """

    def __init__(self, kept: list[object]) -> None:
        self._kept, self._active = kept, ExitStack()

    def __enter__(self) -> None:
        self._active.enter_context(recomputation(self._kept))

    def __exit__(self, *error: Any) -> bool | None:
        return self._active.__exit__(*error)


@contextmanager
def _keeper(keeper: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """What `once` does inside."""
    before = getattr(_state, "keeper", _call)
    _state.keeper = keeper
    try:
        yield
    finally:
        _state.keeper = before


def _call(compute: Callable[[], object]) -> object:
    return compute()
