"""`armillary data`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.cli.main import main
from armillary.data.config import Bytes, Data, Text
from data_examples import write_texts


@pytest.fixture
def typed(tmp_path: Path) -> list[str]:
    """A recipe over a small corpus, as one types it."""
    write_texts(tmp_path / "texts", 40)
    return [
        "debug",
        *("--data.corpus", "text", "--data.corpus.files", f"{tmp_path}/texts/**/*.txt"),
        *("--data.tokenizer", "bytes", "--data.cache", f"{tmp_path}/cache"),
        *("--data.validation-fraction", "0.2", "--budget.seq-len", "128"),
    ]


def test_build_tells_where_the_store_is_and_what_it_holds(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "build", *typed, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert Path(facts["folder"], "manifest.json").exists()
    counts = facts["parts"][0]
    assert counts["train"]["documents"] + counts["validation"]["documents"] == 40
    assert counts["train"]["tokens"] == counts["train"]["bytes"] + 2 * counts["train"]["documents"]
    assert main(["data", "build", *typed]) == 0
    text = capsys.readouterr().out
    assert facts["folder"] in text
    assert f"{counts['train']['tokens']:,} tokens" in text


def test_inspect_shows_documents_positions_and_special_tokens(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "inspect", *typed, "--no-data.shuffle", "--sample", "3", "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)
    assert sample["inputs"] == 128
    assert sample["position"] == 3
    assert sum(document["inputs"] for document in sample["documents"]) == 128
    for document in sample["documents"]:
        assert document["first_position"] == 0
        assert document["last_position"] == document["inputs"] - 1
        whole = "<|bos|>" + (tmp_path / "texts" / document["id"]).read_text() + "<|eos|>"
        assert document["text"].strip("\ufffd") in whole
    assert main(["data", "inspect", *typed, "--no-data.shuffle"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("sample at position 0 (id 0): 128 inputs")
    assert "<|bos|>" in text
    assert main(["data", "inspect", *typed, "--sample", "-1"]) == 2


def test_verify_takes_a_recipe_or_a_folder_and_fails_where_bytes_have_changed(
    typed: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from armillary.data import cache
    from armillary.data.store import build

    monkeypatch.setattr(cache, "_SETTLED_NS", -(10**18))
    assert main(["data", "verify", *typed]) == 2
    assert "has not been built" in capsys.readouterr().err
    corpus = Text(files=(f"{tmp_path}/texts/**/*.txt",))
    data = Data(
        corpus=corpus, tokenizer=Bytes(), cache=f"{tmp_path}/cache", validation_fraction=0.2
    )
    store = build(data)
    assert main(["data", "verify", *typed]) == 0
    assert "files are as they were written" in capsys.readouterr().out
    (store.folder / "part-0/train/ids.txt").write_text("?")
    assert main(["data", "verify", str(store.folder), "--json"]) == 1
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["problems"]) == 1
    assert "part-0/train/ids.txt has 1 bytes" in printed.err
    assert main(["data", "verify", str(tmp_path)]) == 2
    assert "is not a token store" in capsys.readouterr().err
