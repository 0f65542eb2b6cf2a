"""Where things are kept, and how many cores there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.data.cache import cache_folder
from armillary.foundation.machine import available_cores, cache_base
from armillary.telemetry.measured_peaks import peaks_file


def test_everything_that_can_be_made_again_lies_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, base in (
        ("", tmp_path / ".cache" / "armillary"),
        ("~/kept", tmp_path / "kept"),
        (f"{tmp_path}/elsewhere", tmp_path / "elsewhere"),
    ):
        monkeypatch.setenv("ARMILLARY_CACHE", value)
        assert cache_base() == base
        assert (cache_folder(""), peaks_file()) == (base / "data", base / "peaks.json")
    assert cache_folder("~/mine") == tmp_path / "mine"
    assert available_cores() >= 1
