"""What a place promises, whichever kind it is."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.places.open import open_place
from armillary.checkpoint.places.place import Place
from armillary.foundation import files
from armillary.foundation.errors import UserError
from object_store import ObjectStore

STEP = "step-00000010"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        yield store


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return open_place(tmp_path / "checkpoints")
    store: ObjectStore = request.getfixturevalue("server")
    return open_place(store.new_address(), retry_seconds=20)


def publish(place: Place, content: bytes, name: str = STEP) -> None:
    """A checkpoint of one file."""
    draft = place.begin(name)
    place.write(f"{draft.folder}/part/data", [content])
    place.publish(draft, json.dumps({"files": {f"{draft.prefix}part/data": 1}}).encode())


def content(place: Place, name: str = STEP) -> bytes:
    (file,) = json.loads(place.read(f"{name}/manifest.json"))["files"]
    return place.read(f"{name}/{file}")


def test_what_is_not_there_is_empty_or_an_error_of_the_system(place: Place) -> None:
    assert place.names() == place.folders() == place.names("a/b") == []
    assert place.files() == place.files("a") == {}
    place.remove("nothing")
    assert place.clean() == []
    with pytest.raises(FileNotFoundError):
        place.read("nothing")
    with pytest.raises(FileNotFoundError):
        b"".join(place.chunks("nothing"))


@pytest.mark.parametrize("size", [0, 10, 40 << 20])
def test_a_file_is_read_as_it_was_written_whole_or_in_part(place: Place, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    parts = [memoryview(data)[: size // 3], data[size // 3 :]]
    written = place.write("below/there/file", parts)
    assert written.bytes == size and written.sha256 == hashlib.sha256(data).hexdigest()
    assert place.read("below/there/file") == data
    assert b"".join(place.chunks("below/there/file")) == data
    if size:
        assert place.read("below/there/file", size // 2, 7) == data[size // 2 : size // 2 + 7]
    assert place.files("below") == {"there/file": size} and place.names("below") == ["there"]
    place.write("below/there/file", [b"other"])
    assert place.read("below/there/file") == b"other"


def test_a_write_that_breaks_off_leaves_what_was_there(place: Place) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(20 << 20)
        raise MemoryError

    place.write("file", [b"old"])
    for name in ("file", "new"):
        with pytest.raises((MemoryError, OSError), match=r"MemoryError|^$"):
            place.write(name, broken())
    assert place.files() == {"file": 3} and place.read("file") == b"old"


def test_a_checkpoint_is_seen_once_it_is_published_and_replaced_at_once(place: Place) -> None:
    draft = place.begin(STEP)
    place.write(f"{draft.folder}/data", [b"half"])
    assert place.folders() == []
    publish(place, b"whole")
    assert place.folders() == [STEP] and content(place) == b"whole"
    before = place.signature(STEP)
    assert place.signature(STEP) == before
    publish(place, b"again")
    assert place.signature(STEP) != before
    assert content(place) == b"again" and len(place.files(STEP)) == 2


def test_cleaning_removes_drafts_and_nothing_else(place: Place) -> None:
    publish(place, b"whole")
    for name in (STEP, "step-00000020"):
        draft = place.begin(name)
        place.write(f"{draft.folder}/data", [b"half"])
    place.write("notes.txt", [b"mine"])
    assert len(place.clean()) == 2
    assert place.clean() == []
    assert place.folders() == [STEP] and content(place) == b"whole"
    assert set(place.files()) - {"claim.json"} == {
        "notes.txt",
        *(f"{STEP}/{name}" for name in place.files(STEP)),
    }


def test_setting_aside_keeps_all_under_another_name_and_removing_nothing(place: Place) -> None:
    publish(place, b"kept", "step-00000001")
    publish(place, b"whole")
    aside = place.set_aside(STEP)
    assert aside.startswith("set-aside-step-00000010-")
    assert place.folders() == [aside, "step-00000001"] and content(place, aside) == b"whole"
    assert place.clean() == []
    place.remove(aside)
    assert place.folders() == ["step-00000001"] and content(place, "step-00000001") == b"kept"
    assert place.files(aside) == {}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a\0b", "a\\b", "\ud800"])
def test_no_name_leads_out_of_a_place(place: Place, name: str) -> None:
    for act in (place.read, place.remove, place.files, place.names, lambda n: place.write(n, [])):
        with pytest.raises(PermissionError):
            act(name)


def test_links_in_a_folder_are_no_files_of_a_checkpoint(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "checkpoints")
    publish(place, b"whole")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("not ours")
    (tmp_path / "checkpoints" / STEP / "file").symlink_to(outside / "secret")
    (tmp_path / "checkpoints" / STEP / "folder").symlink_to(outside)
    assert set(place.files(STEP)) == {"manifest.json", "part/data"}
    place.remove(STEP)
    assert (outside / "secret").read_text() == "not ours"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "checkpoints")
    place.write("file", [b"ours"])
    (tmp_path / "outside").write_text("not ours")
    (place.local / "link").symlink_to(tmp_path / "outside")
    (place.local / "loop").symlink_to("loop")
    (place.local / "folder").mkdir()
    os.mkfifo(place.local / "pipe")  # who opens it waits for a writer
    for name in ("link", "loop", "folder", "pipe"):
        with pytest.raises(OSError, match="not a regular file"):
            place.read(name)
        with pytest.raises(OSError, match="not a regular file"):
            list(place.chunks(name))
    assert place.read("file") == b"ours"


def test_folders_are_made_durably_from_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]


def test_a_file_system_that_cannot_sync_folders_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        def refuse(descriptor: int) -> None:
            raise OSError(number, "refused")

        monkeypatch.setattr(os, "fsync", refuse)

    fail(errno.EINVAL)
    files.sync_folder(tmp_path)
    fail(errno.EIO)
    with pytest.raises(OSError, match="refused"):
        files.sync_folder(tmp_path)


def test_what_a_dead_writer_moved_aside_is_put_back(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    publish(place, b"whole")
    (tmp_path / STEP).rename(tmp_path / f".tmp-replaced-{STEP}-0123456789ab")
    assert place.folders() == []
    assert place.clean() == []
    assert place.folders() == [STEP] and content(place) == b"whole"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://key:secret@bucket/run", "user name or a password"),
        ("s3://token@bucket/run", "user name or a password"),
        ("ftp://host/run", "no kind of place"),
        ("s3:///run", "not a folder of a bucket"),
        ("s3://bucket/run?versionId=1", "not a folder of a bucket"),
        ("s3://bucket/../run", "not a folder of a bucket"),
        ("s3://bucket/run*", "not a folder of a bucket"),
        ("s3://bu[cket/run", "not a folder of a bucket"),
    ],
)
def test_an_address_is_refused_in_words_and_no_secret_is_repeated(address: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        open_place(address)
    assert words in str(error.value)
    assert "secret" not in str(error.value) and "token" not in str(error.value)


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_a_library_that_is_missing_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(UserError, match=rf"armillary\[{kind}\]"):
        open_place(f"{kind}://bucket/run")
