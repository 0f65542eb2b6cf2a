"""`armillary lighthouse`: what it refuses; whole runs around it are in the tests of training."""

from __future__ import annotations

import pytest

from armillary.cli.main import main


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--listen", "nowhere"], "--listen nowhere is no address"),
        (["--least", "0"], "allowed: 1 or more"),
        (["--silent-seconds", "nan", "--join-seconds", "0"], "--join-seconds 0.0"),
        (["--silent-seconds", "nan"], "--silent-seconds nan"),
        (["--silent-seconds", "1e30"], "--silent-seconds 1e+30"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_listens(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lighthouse", *options]) == 2
    assert told in capsys.readouterr().err
