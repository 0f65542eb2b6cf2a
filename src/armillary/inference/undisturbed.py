"""Asking a model in the midst of its training: nothing that training depends on is changed."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from armillary.checkpoint import rng
from armillary.checkpoint.ranks import describe
from armillary.foundation.errors import Stopped
from armillary.parallel.blocks import blocks_of
from armillary.parallel.model import ParallelModel

T = TypeVar("T")


@contextmanager
def undisturbed(model: ParallelModel) -> Iterator[None]:
    """Inside, the model only answers; afterwards mode and random states are as they were."""
    was_training, states = model.training, rng.capture()
    model.eval()
    try:
        with torch.no_grad(), uncompiled():
            yield
    finally:
        model.train(was_training)
        rng.restore(states)


def uncompiled() -> AbstractContextManager[None]:
    """Runs compiled blocks as plain code: shapes here are not those that training compiled for.

    Where nothing has been compiled the compiler is not even loaded, which takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance = torch.compiler.set_stance("force_eager")
    return cast("AbstractContextManager[None]", stance)


class Mishaps:
    """What goes wrong on this rank, kept until all ranks can hear of it.

    A rank that left a forward pass where it failed would leave the others waiting for its part in
    the collectives of the blocks to come. So it goes on, with values that mean nothing, until the
    ranks meet.
    """

    def __init__(self) -> None:
        self.words = ""
        """The first one; empty: nothing went wrong."""

    def attempt(self, work: Callable[[], T], instead: Callable[[], T]) -> T:
        """What `work` returns, or, where it fails, `instead`."""
        try:
            return work()
        except Stopped:
            raise
        except Exception as error:
            self.words = self.words or describe(error)
        free_memory()  # outside: the exception holds all that its frames hold
        return instead()

    @contextmanager
    def watching(self, model: ParallelModel) -> Iterator[None]:
        """Inside, a block that fails hands on what it was given.

        Ranks that share the products within a block (tp, ep) have to fail alike.
        """
        with ExitStack() as stack:
            for part in model.parts:
                for block in blocks_of(part):
                    stack.enter_context(self._watched(block))
            yield

    @contextmanager
    def _watched(self, block: nn.Module) -> Iterator[None]:
        own, forward = vars(block), block.forward
        replaced = own.get("forward")

        def watched(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self.attempt(lambda: forward(hidden, *args, **kwargs), lambda: hidden)

        own["forward"] = watched
        try:
            yield
        finally:
            if replaced is None:
                del own["forward"]
            else:
                own["forward"] = replaced


def free_memory() -> None:
    """Gives back what is held by nobody, so that training has the room that it had."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
