"""`hf:OWNER/NAME`: from the hub's own cache when there is no network, and no code ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.checkpoint.hugging_face import hub
from armillary.checkpoint.hugging_face.hub import folder_of
from armillary.foundation.errors import UserError

huggingface_hub = pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model in it, in the hub's layout; and no network."""
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--owner--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    real = huggingface_hub.snapshot_download

    def download(name: str, **options: object) -> str:
        if not options.get("local_files_only"):
            raise OSError("there is no network here")
        found: str = real(name, cache_dir=tmp_path, **options)
        return found

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return snapshot


def test_a_model_in_the_cache_is_found_without_a_network(cache: Path) -> None:
    assert folder_of("hf:owner/tiny") == cache
    assert folder_of(f"hf:owner/tiny@{COMMIT}") == cache


def test_a_model_that_cannot_be_had_is_told_with_the_reason(cache: Path) -> None:
    with pytest.raises(UserError, match=r"cannot fetch hf:owner/other: there is no network here"):
        folder_of("hf:owner/other")


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "a b", "a/../b"])
def test_names_that_are_no_names_are_refused(name: str) -> None:
    with pytest.raises(UserError):
        folder_of(f"hf:{name}")


def test_neither_code_nor_pickles_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options)
        return "."

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder_of("hf:owner/name@v1")
    assert asked["revision"] == "v1"
    import fnmatch

    wanted, unwanted = asked["allow_patterns"], asked["ignore_patterns"]
    assert isinstance(wanted, list) and isinstance(unwanted, list)
    for file, expected in {
        "model-00001-of-00002.safetensors": True, "config.json": True, "tokenizer.json": True,
        "chat_template.jinja": True, "modeling.py": False, "tokenizer.py": False,
        "pytorch_model.bin": False, "tokenizer.model": False,
    }.items():  # fmt: skip
        allowed = any(fnmatch.fnmatch(file, pattern) for pattern in wanted)
        refused = any(fnmatch.fnmatch(file, pattern) for pattern in unwanted)
        assert (allowed and not refused) == expected, file
    assert hub.is_hub("hf:owner/name") and not hub.is_hub("owner/name")
