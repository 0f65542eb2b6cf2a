"""Requests that are made again while a store has trouble. Imports no torch."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import TypeVar

from armillary.foundation.errors import ArmillaryError
from armillary.foundation.progress import mark

T = TypeVar("T")

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 8.0
_SECONDS_IN_A_HURRY = 2.0
_GLANCE_SECONDS = 0.2

_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, ImportError)
"""What the same request would only be told again."""
_OFFLINE = "OfflineModeIsEnabled"
"""What the Hugging Face hub's library raises where its environment forbids it the network."""


def insist(
    request: Callable[[], T], seconds: float, hurried: Callable[[], bool] = lambda: False
) -> T:
    """Makes a request until it succeeds, or for some seconds; each wait doubles, with chance in it.

    Once `hurried`, no longer than two seconds: somebody waits for this to end.

    Errors of the server, time-outs and connections that break are tried again; that something is
    not there, or not allowed, is an answer. The last try may end after the time is over.

    Raises:
        OSError: what the store said last, whatever the kind of error its library raised.
        ArmillaryError: the request's own, such as of a library that is not installed; at once.
    """
    began = time.monotonic()
    wait = _FIRST_WAIT

    def is_over(ahead: float) -> bool:
        limit = min(seconds, _SECONDS_IN_A_HURRY) if hurried() else seconds
        return time.monotonic() + ahead > began + limit

    while True:
        mark()  # a store in trouble is not a process that has come to a standstill
        try:
            return request()
        except ArmillaryError:
            raise
        except Exception as error:
            if is_final(error) or is_over(wait):
                raise as_os_error(error) from error
        end = time.monotonic() + wait * random.uniform(0.5, 1.0)
        while (left := end - time.monotonic()) > 0 and not is_over(left):
            time.sleep(min(left, _GLANCE_SECONDS))
        wait = min(2 * wait, _LONGEST_WAIT)


def is_final(error: Exception) -> bool:
    """Whether the same request would fail in the same way."""
    # Libraries of stores tell of missing credentials each with a class of its own.
    kind = type(error).__name__
    if "Credential" in kind or kind == _OFFLINE or isinstance(error, _FINAL):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.EINVAL
    # Python's own errors are of this process; what libraries raise for a bad answer is theirs.
    return type(error).__module__ == "builtins" and not isinstance(error, RuntimeError)


def as_os_error(error: Exception) -> OSError:
    """The error itself, or its words in one of the kind that places raise."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    number = errno.EACCES if "Credential" in type(error).__name__ else errno.EIO
    if isinstance(error, FileNotFoundError | PermissionError):  # some come with words only
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES
    return OSError(number, f"{type(error).__name__}: {error}")
