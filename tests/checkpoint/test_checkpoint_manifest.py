"""A manifest is what it says, or `Unverified`, whoever wrote it."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_examples import names, save
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.checkpoint.code_version import _commit, code_version
from armillary.checkpoint.load import load_rest
from armillary.checkpoint.manifest import (
    Unverified,
    compose,
    data_prefix,
    parse_manifest,
    render,
)
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.places.place import Written
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.retention import PINS_FILE, read_pins
from armillary.checkpoint.store import CheckpointStore
from armillary.checkpoint.verify import verify
from armillary.foundation.errors import RunError

DIGEST = hashlib.sha256(b"").hexdigest()
FILES = {name: Written(bytes=0, sha256=DIGEST) for name in ("state.json", "tensors.json")}


def manifest(**changes: Any) -> dict[str, Any]:
    """One that is right but for the changes; its own checksum is right."""
    made = compose(20, FILES, {"tokens_total": 5, "cursor": 1}, {"mesh": {"tp": 1}})
    made = {name: value for name, value in (made | changes).items() if value is not ...}
    body = {name: value for name, value in made.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return body | {"sha256": digest}


def test_a_manifest_comes_back_as_it_was_and_scores_that_are_none_are_left_out() -> None:
    made = compose(20, FILES, {}, {"scores": {"validation": 1.5, "b": float("nan")}})
    read = parse_manifest(render(made))
    assert read == made
    assert read["scores"] == {"validation": 1.5}
    assert data_prefix(read) == ""
    moved = {f"attempt/{name}": file for name, file in FILES.items()}
    assert data_prefix(parse_manifest(render(compose(1, moved, {}, {})))) == "attempt/"


OUTSIDE = [
    "../x", "/etc/passwd", "a/../../x", "..", ".", "", "a//b", "./x", "a/./b", "C:\\x", "a\\b",
    "x\0", "\ud800", "manifest.json", "a/b/c/d/e", "x" * 300, "x\n",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_out_or_is_none_of_ours_is_refused(name: str) -> None:
    files = manifest()["files"] | {name: {"bytes": 0, "sha256": DIGEST}}
    with pytest.raises(Unverified, match="outside the folder"):
        parse_manifest(json.dumps(manifest(files=files)).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "20"},
        {"step": -1},
        {"step": True},
        {"step": 10**8},
        {"step": ...},
        {"provenance": "scratch"},
        {"provenance": ...},
        {"recipe_sha256": 3},
        {"scores": {"validation": "1"}},
        {"scores": [1]},
        {"scores": {"\x1b[2J": 1.0}},
        {"created": "\ud800"},
        {"kind": "other"},
        {"kind": []},
        {"versions": None},
        {"code": {"commit": 1}},
        {"files": {}},
        {"files": {"state.json": 3}},
        {"files": {"state.json": {"bytes": -1, "sha256": DIGEST}}},
        {"files": {"state.json": {"bytes": 0, "sha256": "AB"}}},
        {"files": {"tensors.json": {"bytes": 0, "sha256": DIGEST}}},
        {
            "files": {
                "a/state.json": {"bytes": 0, "sha256": DIGEST},
                "b/x": {"bytes": 0, "sha256": DIGEST},
            }
        },
    ],
)
def test_a_field_of_another_kind_is_refused_though_the_checksum_is_right(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(Unverified):
        parse_manifest(json.dumps(manifest(**changes)).encode())


HOSTILE = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 200 + b"]" * 200,
    b'{"format": 2, "files": {}, "format": 2}',
    b'{"format": NaN, "files": {}}',
    b'{"format": 1e999, "files": {}}',
    b'{"format": ' + b"9" * 5000 + b', "files": {}}',
    b'{"format": 99999999999999999999, "files": {}}',
    b"null",
    b'"text"',
    b'{"files": {}}',
    b'{"format": [2], "files": {}}',
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_what_no_writer_of_ours_makes_is_refused(data: bytes) -> None:
    with pytest.raises(Unverified):
        parse_manifest(data)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200) | st.integers(0, 2**32))
def test_whatever_bytes_lie_there_the_answer_is_a_manifest_or_unverified(
    seed: bytes | int,
) -> None:
    data = seed if isinstance(seed, bytes) else damaged(render(manifest()), seed)
    try:
        parsed = parse_manifest(data)
    except Unverified:
        return
    assert parsed["step"] == 20


def damaged(data: bytes, seed: int) -> bytes:
    """A right manifest with a few bytes cut, doubled or replaced."""
    chance = random.Random(seed)
    for _ in range(chance.randrange(1, 4)):
        at, until = sorted(chance.randrange(len(data)) for _ in range(2))
        piece = chance.choice([b"", data[at:until] * 2, chance.randbytes(3), b'"', b"{", b"9"])
        data = data[:at] + piece + data[until:]
    return data


def test_links_in_a_checkpoint_are_not_followed(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "c") as store:
        save(store, 10)
    state = tmp_path / "c" / "step-00000010" / "state.json"
    state.rename(tmp_path / "outside.json")
    state.symlink_to(tmp_path / "outside.json")
    with pytest.raises(Unverified, match=r"state.json is missing, or not a regular file"):
        verify(LocalPlace(tmp_path / "c"), "step-00000010")
    with CheckpointStore(tmp_path / "c") as store:
        save(store, 20)
    manifest = tmp_path / "c" / "step-00000020" / "manifest.json"
    manifest.rename(tmp_path / "outside.json")
    manifest.symlink_to(tmp_path / "outside.json")
    with pytest.raises(Unverified, match=r"manifest.json is unreadable \(not a regular file\)"):
        verify(LocalPlace(tmp_path / "c"), "step-00000020")


def test_a_manifest_of_another_step_is_named(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        save(store, 10)
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000020")
    with pytest.raises(Unverified, match=r"manifest.json is of step 10"):
        verify(LocalPlace(tmp_path), "step-00000020")


def test_a_checkpoint_without_scalars_or_with_odd_ones_is_an_error_in_words(
    tmp_path: Path,
) -> None:
    with CheckpointStore(tmp_path) as store:
        save(store, 10)
        found = store.find("auto")
        assert found is not None
        for text in ("[]", "{" * 3000, '{"a": NaN}'):
            (tmp_path / "step-00000010" / "state.json").write_text(text)
            with pytest.raises(RunError, match="cannot read checkpoint"):
                load_rest(found, Ranks())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"pinned": 3}', '{"pinned": [true]}', '{"pinned": [-1]}', "{" * 9999]
)
def test_a_list_of_pins_that_cannot_be_read_lets_nothing_go(tmp_path: Path, text: str) -> None:
    (tmp_path / PINS_FILE).write_text(text)
    with pytest.raises(Unverified, match=r"pins\.json"):
        read_pins(LocalPlace(tmp_path))
    with CheckpointStore(tmp_path) as store:
        for step in range(1, 5):
            store.save(step, {"a": torch.zeros(2)}, {})
        store.wait()
    assert len(names(tmp_path)) == 5


def test_the_commit_is_read_from_a_repository_a_work_tree_or_packed_references(
    tmp_path: Path,
) -> None:
    git, commit = tmp_path / ".git", "0123456789abcdef" * 2 + "01234567"
    assert _commit(git) is None
    git.mkdir()
    (git / "HEAD").write_text(commit + "\n")
    assert _commit(git) == commit
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert _commit(git) is None
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert _commit(git) == commit
    tree = git / "worktrees" / "second"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/main\n")
    (tree / "commondir").write_text("../..\n")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / ".git").write_text(f"gitdir: {tree}\n")
    assert _commit(tmp_path / "second" / ".git") == commit
    assert code_version()["version"]
