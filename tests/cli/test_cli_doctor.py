import json
import sys

import pytest

from armillary.cli.main import main
from armillary.telemetry.machine import examine
from armillary.telemetry.machine.finding import finding


@pytest.fixture
def findings(monkeypatch):
    found = [
        finding("torch", "2.13.0", version="2.13.0"),
        finding("compiler", "none", "install one", path=None),
    ]
    monkeypatch.setattr(examine, "examine", lambda *, quick, progress: iter(found))
    return found


def test_each_line_has_a_verdict_and_what_to_do(findings, capsys):
    assert main(["doctor", "--quick"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok    torch        2.13.0",
        "warn  compiler     none",
        "                   -> install one",
        "ready to train; 1 to look at",
    ]


def test_json_is_one_document_and_nothing_else(findings, capsys):
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "warn"
    assert document["findings"][0]["values"] == {"version": "2.13.0"}


def test_only_what_makes_training_impossible_is_a_failure(findings, capsys):
    findings.append(finding("cache", "full", "free some", verdict="fail"))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("1 to repair before training can work, 1 to look at\n")


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_without_torch_the_doctor_says_how_to_get_it(words, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", *words]) == 1
    out = capsys.readouterr().out
    assert "torch>=2.11,<2.14" in out
    assert not words or json.loads(out)["verdict"] == "fail"


def test_this_machine_is_examined_for_real(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("armillary.telemetry.machine.measure._SQUARE_SIZES", (128,))
    monkeypatch.setattr("armillary.telemetry.machine.hardware._ARRAY_BYTES", 2**20)
    monkeypatch.chdir(tmp_path)
    main(["doctor", "--quick", "--json"])
    names = [each["name"] for each in json.loads(capsys.readouterr().out)["findings"]]
    for name in ("torch", "cpu", "distributed", "compiler", "memory", "here", "products"):
        assert name in names
    assert (tmp_path / "cache" / "peaks.json").exists() or "device 0" in names
