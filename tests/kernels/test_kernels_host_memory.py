"""The allocator setting takes effect where there is one, and never hurts."""

from __future__ import annotations

import platform
import sys

import pytest

from armillary.kernels import tune_host_allocator


def test_it_is_idempotent_and_takes_effect_on_glibc() -> None:
    on_glibc = platform.libc_ver()[0] == "glibc"
    assert [tune_host_allocator(), tune_host_allocator()] == [on_glibc, on_glibc]


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tune_host_allocator() is False
