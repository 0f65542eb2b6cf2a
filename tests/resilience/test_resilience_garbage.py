"""Python's garbage is collected when all ranks do it, and measured."""

from __future__ import annotations

import gc
import weakref

from armillary.resilience.garbage import Garbage


class Knot:
    """Refers to itself, so that only a collection ends it."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_waits_for_its_step_and_afterwards_all_is_as_it_was() -> None:
    garbage = Garbage(every=5)
    callbacks = len(gc.callbacks)
    with garbage.kept():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        knot = weakref.ref(Knot())
        for step in range(1, 5):
            garbage.step_done(step)
        assert knot() is not None and garbage.seconds > 0  # the collection at the start
        before = garbage.seconds
        garbage.step_done(5)
        assert knot() is None and garbage.seconds > before
    assert gc.isenabled() and gc.get_freeze_count() == 0 and len(gc.callbacks) == callbacks


def test_left_to_python_it_is_only_measured() -> None:
    garbage = Garbage(every=0)
    with garbage.kept():
        assert gc.isenabled() and gc.get_freeze_count() == 0
        garbage.step_done(1)
        assert garbage.seconds == 0.0
        gc.collect()
        assert garbage.seconds > 0.0
