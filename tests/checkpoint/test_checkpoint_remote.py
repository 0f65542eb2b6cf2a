"""Object stores that fail, hang and crawl, writers that die in the middle, and two at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import object_store
from armillary.checkpoint.places.open import open_place
from armillary.checkpoint.places.remote import PART_BYTES, RemotePlace
from armillary.foundation.errors import RunError
from object_store import Environ, ObjectStore, Trouble

STEP = "step-00000010"
SIZE = 2 * PART_BYTES


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        yield store


@pytest.fixture
def place(server: ObjectStore) -> Iterator[RemotePlace]:
    place = RemotePlace(server.new_address(), retry_seconds=30, request_seconds=1)
    server.requests.clear()
    yield place
    server.trouble = object_store.no_trouble


def publish(place: RemotePlace, content: bytes, name: str = STEP) -> None:
    draft = place.begin(name)
    place.write(f"{draft.folder}/data", [content])
    place.publish(draft, json.dumps({"files": {f"{draft.prefix}data": 1}}).encode())


def content(place: RemotePlace, name: str = STEP) -> bytes:
    (file,) = json.loads(place.read(f"{name}/manifest.json"))["files"]
    return place.read(f"{name}/{file}")


TROUBLES = {
    "errors of the server": lambda: object_store.fail_with(503, 3),
    "connections that break": lambda: object_store.hang_up(3),
    "time-outs": lambda: object_store.say_nothing(1, 2.0),
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_whatever_is_asked_during_trouble_is_done_after_it(
    server: ObjectStore, place: RemotePlace, kind: str
) -> None:
    data = os.urandom(SIZE)
    server.trouble = TROUBLES[kind]()
    publish(place, data)
    server.trouble = TROUBLES[kind]()
    assert place.folders() == [STEP]
    assert content(place) == data
    place.remove(STEP)
    assert place.files(STEP) == {}


def test_trouble_amid_a_large_file_or_longer_than_patience(
    server: ObjectStore, place: RemotePlace
) -> None:
    data = os.urandom(SIZE)
    server.trouble = only("PUT", object_store.fail_with(500, 4), skip=2)
    publish(place, data)
    assert content(place) == data
    impatient = RemotePlace(place.address, retry_seconds=1, request_seconds=2)
    server.trouble = object_store.fail_with(500, 1 << 60)
    with pytest.raises(OSError, match="Internal Server Error"):
        publish(impatient, b"new")
    server.trouble = object_store.no_trouble
    assert content(place) == data, "the old one is untouched"


def only(method: str, trouble: Trouble, *, skip: int = 0) -> Trouble:
    """Trouble for requests of one kind, from the `skip`-th on."""
    seen = 0

    def some(request: Environ) -> int | None:
        nonlocal seen
        if request["REQUEST_METHOD"] != method:
            return None
        seen += 1
        return trouble(request) if seen > skip else None

    return some


def test_a_manifest_that_is_there_counts_though_its_answer_was_lost(
    server: ObjectStore, place: RemotePlace
) -> None:
    def lose_the_answer(request: Environ) -> int | None:
        if request["REQUEST_METHOD"] == "PUT" and request["PATH_INFO"].endswith("manifest.json"):
            list(server._app(request, lambda *_: lambda data: None))
            request["CONTENT_LENGTH"] = "0"  # the body has been read
            return 503
        return None

    place.retry_seconds = 0.1
    publish(place, b"older")
    server.trouble = lose_the_answer
    publish(place, b"newer")
    assert content(place) == b"newer"
    server.trouble = lambda request: 503 if request["REQUEST_METHOD"] == "PUT" else None
    with pytest.raises(OSError):
        publish(place, b"newest")
    assert content(place) == b"newer"


def test_what_is_not_allowed_is_said_at_once(server: ObjectStore, place: RemotePlace) -> None:
    server.trouble = object_store.fail_with(403, 1 << 60)
    with pytest.raises(PermissionError):
        place.write("file", [b"x"])
    assert len(server.requests) == 1, "an answer is an answer"


_MEASURED = """
import sys, tracemalloc
from armillary.checkpoint.places.remote import RemotePlace
place = RemotePlace(sys.argv[1], retry_seconds=20)
part = bytes(1 << 22)
place.write("small", [part])  # imports and connects
tracemalloc.start()
place.write("large", [part] * 28)
print(tracemalloc.get_traced_memory()[1])
"""


def test_a_slow_link_is_waited_for_and_no_file_is_held_whole(
    server: ObjectStore, place: RemotePlace
) -> None:
    server.trouble = object_store.slow_link(64 * 2**20)
    command = [sys.executable, "-c", _MEASURED, place.address]
    most = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert place.files() == {"small": 1 << 22, "large": 112 << 20}
    assert sum(method == "PUT" for method, _ in server.requests) == 1 + 7, "parts of 16 MiB"
    assert most < 5 * PART_BYTES, f"{most / PART_BYTES:.1f} parts in memory"


def test_two_runs_that_write_one_place_never_mix_files_and_the_newer_one_wins(
    server: ObjectStore, place: RemotePlace
) -> None:
    newer = RemotePlace(place.address, retry_seconds=10)
    place.clean()
    publish(place, b"first", "step-00000001")
    one, two = place.begin(STEP), newer.begin(STEP)
    contents = {one.folder: b"older", two.folder: b"newer"}
    threads = [
        threading.Thread(
            target=where.write, args=(f"{draft.folder}/data", [contents[draft.folder]])
        )
        for where, draft in ((place, one), (newer, two))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newer.clean()  # its draft is cleared away with the older run's: it begins after it
    publish(newer, b"newer")
    with pytest.raises(RunError, match=r"another run writes to s3://.*process \d+ on host"):
        place.publish(one, json.dumps({"files": {f"{one.prefix}data": 1}}).encode())
    assert newer.folders() == ["step-00000001", STEP]
    assert content(newer) == b"newer" and content(newer, "step-00000001") == b"first"


def test_a_claim_that_was_removed_is_made_again_and_an_odd_one_is_another_s(
    place: RemotePlace,
) -> None:
    publish(place, b"one")
    place.remove("claim.json")
    publish(place, b"two")
    for odd in (b"", b"[]", b'{"owner": 3}'):
        place.write("claim.json", [odd])
        with pytest.raises(RunError, match="another run"):
            publish(place, b"three")
    assert content(place) == b"two"


_WRITER = """
import json, sys
from armillary.checkpoint.places.remote import RemotePlace
place = RemotePlace(sys.argv[1], retry_seconds=20)
draft = place.begin("step-00000020")
place.write(f"{draft.folder}/first", [b"done"])
place.write(f"{draft.folder}/data", [bytes(1 << 24)] * 6)
place.publish(draft, json.dumps({"files": {f"{draft.prefix}data": 1}}).encode())
"""


@pytest.mark.parametrize("moment", [2, 5, 8])
def test_a_writer_that_is_killed_amid_an_upload_leaves_nothing_to_see(
    server: ObjectStore, place: RemotePlace, moment: int
) -> None:
    """At its first part, in the middle, and when the manifest is put."""
    publish(place, b"whole")
    child: list[subprocess.Popen[bytes]] = []
    killed = threading.Event()

    def kill(request: Environ) -> int | None:
        child[0].send_signal(signal.SIGKILL)
        child[0].wait()
        killed.set()
        return 500

    begun = threading.Event()

    def when_begun(request: Environ) -> int | None:
        begun.wait()
        return trouble(request)

    trouble = only("PUT", kill, skip=moment)
    server.trouble = when_begun
    child.append(subprocess.Popen([sys.executable, "-c", _WRITER, place.address]))
    begun.set()
    assert child[0].wait(60) == -signal.SIGKILL and killed.is_set()
    server.trouble = object_store.no_trouble
    assert place.folders() == [STEP] and content(place) == b"whole"
    assert [name.split("/")[0] for name in place.clean()] == ["step-00000020"]
    assert set(place.names()) == {"claim.json", STEP}
    publish(place, b"after", "step-00000020")
    assert content(place, "step-00000020") == b"after"


def test_a_place_in_a_store_and_one_in_a_folder_take_the_same_address_option(
    server: ObjectStore, tmp_path: Path
) -> None:
    address = server.new_address() + "/"
    assert open_place(address).address == address.rstrip("/")
    assert open_place(address).local is None and open_place(tmp_path).local == tmp_path
