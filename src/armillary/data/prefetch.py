"""Prefetcher: makes what comes next in a background thread, a few items ahead.

What has been made but not taken is never counted: batches are pure functions of positions, so the
consumer's cursor is the whole state, and dropping what is in the queue loses nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over the results of `makers`, in order, made up to `depth` items ahead.

    An error in a maker, or in the iterable, is raised in the consumer at the item where it
    happened, with its own traceback; after it there are no more items. `close()` (or leaving the
    `with` block) stops the thread at the next item, whether or not all was consumed.

    Args:
        makers: functions without arguments, each called once, in the thread.
        depth: items made ahead; 0 makes each item when it is asked for, without a thread.
    """

    def __init__(self, makers: Iterable[Callable[[], Item]], depth: int = 2) -> None:
        assert depth >= 0
        self._makers = iter(makers)
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._finished = False  # the producer will add nothing more
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=self._produce, name="prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return self._take() if self._thread else self._make()

    def close(self) -> None:
        """Stops the thread and drops what was made ahead. May be called more than once."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished or self._closed)
            if self._closed:
                raise StopIteration
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is None:
            raise StopIteration
        if isinstance(error, StopIteration):  # would look like the end
            raise RuntimeError("a maker raised StopIteration") from error
        raise error

    def _has_room(self) -> bool:
        """Waits until another item may be made; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
            return not self._closed

    def _make(self) -> Item:
        """The next item, made here; StopIteration after the last, an error or `close`."""
        if self._closed or self._finished:
            raise StopIteration
        make = next(self._makers, None)
        if make is None:
            raise StopIteration
        try:
            return make()
        except StopIteration as error:  # would look like the end
            self._finished = True
            raise RuntimeError("a maker raised StopIteration") from error
        except BaseException:
            self._finished = True
            raise

    def _produce(self) -> None:
        try:
            while self._has_room():
                make = next(self._makers, None)
                if make is None:
                    return
                item = make()
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, it belongs to the consumer
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()
