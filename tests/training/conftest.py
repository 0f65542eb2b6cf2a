"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reliability.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts commands without importing torch each time; it does so once, for all tests."""
    with Zygote() as made:
        yield made
