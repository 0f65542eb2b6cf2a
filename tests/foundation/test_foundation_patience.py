"""What is asked of a store again, and what is not."""

from __future__ import annotations

import errno

import pytest

from armillary.foundation.errors import Problem, UserError
from armillary.foundation.patience import insist


class Requests:
    """Fails with some errors, one after another, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


class OfflineModeIsEnabled(ConnectionError):
    """As the hub's library names it."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError(Problem("no library")), UserError),
        (OfflineModeIsEnabled("forbidden"), OSError),
        (FileNotFoundError(errno.ENOENT, "gone"), FileNotFoundError),
        (ValueError("ours"), OSError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_would_only_be_told_again_is_told_at_once(
    error: Exception, kind: type[Exception]
) -> None:
    request = Requests(error, error)
    with pytest.raises(kind):
        insist(request, 60)
    assert request.count == 1


def test_trouble_of_a_store_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armillary.foundation.patience._FIRST_WAIT", 0.01)
    request = Requests(ConnectionResetError(), TimeoutError(), OSError(errno.EIO, "500"))
    assert insist(request, 60) == "answer"
    assert request.count == 4
