"""The allocator setting takes effect where there is one, and never hurts."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

import pytest

from armillary.kernels import tune_host_allocator


def test_it_is_idempotent_and_takes_effect_on_glibc() -> None:
    on_glibc = platform.libc_ver()[0] == "glibc"
    assert [tune_host_allocator(), tune_host_allocator()] == [on_glibc, on_glibc]


class OldGlibc:
    """Refuses to serve more than 32 MiB from the heap."""

    def __init__(self) -> None:
        self.accepted: list[tuple[int, int]] = []

    def __call__(self, _: None) -> OldGlibc:
        return self

    @property
    def mallopt(self) -> Callable[[int, int], int]:
        def mallopt(parameter: int, value: int) -> int:
            if parameter == -3 and value > 32 << 20:
                return 0
            self.accepted.append((parameter, value))
            return 1

        return mallopt


def test_an_older_glibc_gets_what_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    old = OldGlibc()
    monkeypatch.setattr("ctypes.CDLL", old)
    monkeypatch.setattr(sys, "platform", "linux")
    assert tune_host_allocator() is True
    assert old.accepted == [(-3, 32 << 20), (-1, 2**31 - 1)]


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tune_host_allocator() is False
